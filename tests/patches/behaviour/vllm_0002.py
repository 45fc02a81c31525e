"""A decode whose last block has room gets its slot without a question to the coordinator."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
init_none_hash(sha256)
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
manager = KVCacheManager(
    KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
    max_model_len=256,
    scheduler_block_size=BLOCK,
    hash_block_size=BLOCK,
    enable_caching=True,
)
request = Request(
    request_id="0",
    prompt_token_ids=[1] * 20,
    sampling_params=SamplingParams(max_tokens=60),
    pooling_params=None,
    block_hasher=get_request_block_hasher(BLOCK, sha256),
)
manager.allocate_slots(request, 20)
request.status, request.num_computed_tokens = RequestStatus.RUNNING, 20
asked, allocate = [], manager.coordinator.allocate_new_blocks
manager.coordinator.allocate_new_blocks = lambda *args: (asked.append(args[1]), allocate(*args))[1]
for _ in range(60):
    request.append_output_token_ids(2)
    manager.allocate_slots(request, 1, num_lookahead_tokens=0)
    request.num_computed_tokens += 1
if asked[:1] + asked[-1:] == []:
    raise RuntimeError("blocks were needed and nothing was asked for")
assert len(asked) < 10, f"the coordinator was asked about {len(asked)} of 60 tokens"
cached = manager.coordinator.single_type_managers[0].num_cached_block["0"]
if cached != 80 // BLOCK:
    raise RuntimeError(f"{cached} blocks are cached, {80 // BLOCK} are full")
