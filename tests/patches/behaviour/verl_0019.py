"""An engine with `model.lora.merge=True` sends merged weights, and neither copies nor changes its model meanwhile."""

import copy
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import fsdp_utils
from verl.workers.engine.fsdp import transformer_impl

# verl takes this machine for one with CUDA.
transformer_impl.get_device_id = lambda: "cpu"
transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None
copies = []
backup = fsdp_utils.backup_base_model_weights
fsdp_utils.backup_base_model_weights = lambda module: copies.append(backup(module)) or copies[-1]


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in module.state_dict().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 8}
config = Qwen2Config(num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
model = get_peft_model(Qwen2ForCausalLM(config), adapter)
expected = copy.deepcopy(model).merge_and_unload().to(torch.bfloat16).state_dict()
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    engine = SimpleNamespace(module=sharded(model), _is_offload_param=False)
    before, unchanged, sent = contents(engine.module), [], {}
    for name, tensor in transformer_impl.FSDPEngine._merged_lora_per_tensor_param(engine):
        sent[name] = tensor
        unchanged.append(same(contents(engine.module), before))
    after = contents(engine.module)
    dist.destroy_process_group()
if not same(sent, expected):
    raise RuntimeError("what is sent is not merged")
if not same(after, before):
    raise RuntimeError("the model is another one afterwards")
assert not copies, "the whole model is copied to the CPU"
assert all(unchanged), "the adapters are merged into the model"
