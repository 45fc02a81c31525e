import pytest
import torch
import torch.nn as nn
from qerl_testing import random_packed_weight, random_qwen3_moe

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.modules.convert import packed_linears, replace_experts
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.repacked_linear import RepackedNVFP4Linear
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear
from verl_qerl.modules.placement.shared_base import RepackedGroup, share_base

ROWS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 192}


def attention(kind: type[NVFP4Linear] = NVFP4Linear, K: int = 48, **rows: int) -> nn.Module:
    """Packed linears named as in a layer; q, k and v have one global scale, as the quantizer gives them."""
    model = nn.Module()
    model.self_attn = nn.Module()
    for seed, (name, N) in enumerate((ROWS | rows).items()):
        linear = kind.from_linear(nn.Linear(K, N, bias=False))
        weight = random_packed_weight(N, K, seed)
        scale = torch.tensor(2.0**-9 if name == "o_proj" else 2.0**-11)
        linear.fill(nvfp4_weight(weight.codes, weight.block_scale, scale))
        model.self_attn.add_module(name, linear)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {name: weight_digest(linear.packed()) for name, linear in packed_linears(model)}


def test_linears_read_the_bytes_that_are_shared_and_hold_the_weights_they_held():
    model = attention()
    before = digests(model)
    base = share_base(model)
    assert digests(model) == before
    assert [group.members for group in base.groups] == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
    ]
    linears = dict(packed_linears(model))
    assert all(type(linear) is RepackedNVFP4Linear for linear in linears.values())
    storage = base.flat.untyped_storage()
    assert all(t.untyped_storage().data_ptr() == storage.data_ptr() for one in linears.values() for t in one.tiles)
    assert base.flat.is_shared()
    base.flat[base.groups[1].offset] ^= 1
    changed = digests(model)
    assert [name for name in before if changed[name] != before[name]] == ["self_attn.o_proj"]


def test_groups_lie_one_after_the_other_and_what_vllm_stacks_is_contiguous():
    first, second = share_base(attention()).groups
    assert (first.offset, first.rows, first.columns) == (0, (128, 64, 64), 48)
    assert first.num_bytes == 256 * (24 + 3) + 256  # the four bytes of the global scale start another 256
    assert second.offset == first.num_bytes
    flat = torch.zeros(second.offset + second.num_bytes, dtype=torch.uint8)
    words, scale, decode_scale = second.tiles(flat)
    assert (words.shape, scale.shape, decode_scale.shape) == ((3, 384), (3, 192), (1,))
    assert words.is_contiguous()
    assert scale.is_contiguous()
    assert [part[0].shape[1] for part in first.member_tiles(flat)] == [256, 128, 128]
    assert RepackedGroup(("a",), (64,), 32, 0).num_bytes == 64 * 18 + 256 - 64 * 18 % 256


def test_torch_goes_on_sharing_other_tensors_as_it_did():
    before = torch.multiprocessing.get_sharing_strategy()
    share_base(attention())
    assert torch.multiprocessing.get_sharing_strategy() == before


def experts() -> nn.Module:
    model = attention()
    model.moe = random_qwen3_moe()
    replace_experts(model.moe)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: attention(v_proj=48), r"'self_attn\.v_proj' has 48 rows\. Multiples of 64 are accepted"),
        (
            lambda: attention(ShardedNVFP4Linear),
            r"qerl\.base\.share=true is not possible: ShardedNVFP4Linear in the model",
        ),
        (experts, r"qerl\.base\.share=true is not possible: NVFP4Experts in the model"),
        (lambda: nn.Linear(4, 4), r"qerl\.base\.share=true is not possible: no packed linear in the model"),
    ],
    ids=["rows", "sharded", "experts", "dense"],
)
def test_models_that_cannot_be_shared_are_refused_as_they_are(model, message):
    built = model()
    before = digests(built)
    with pytest.raises(ValueError, match=message):
        share_base(built)
    assert digests(built) == before
