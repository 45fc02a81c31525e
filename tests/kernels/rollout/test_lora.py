"""The single-adapter kernels on a GPU, in bf16 and under CUDA graphs."""

import pytest
import torch

from verl_qerl.kernels.rollout.lora import lora_expand, lora_shrink, member_of_tile

pytestmark = pytest.mark.gpu

ACTIVE, NONE = torch.tensor([False]), torch.tensor([True])
# The fused linears of a 7B: (K, columns of the members).
LINEARS = [(3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944, 18944)), (18944, (3584,))]


def build(rows: int, K: int, slices: tuple[int, ...], rank: int) -> tuple:
    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    N = sum(slices)
    slots = torch.zeros(rows + 5, dtype=torch.int64, device="cuda")
    slots[1::3] = -1
    members = member_of_tile(slices, "cuda")
    return (
        random(rows, K),
        random(len(slices) * rank, K, scale=K**-0.5),
        random(rows, N),
        random(N, rank),
        members,
        slots,
    )


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 33, 64, 256, 1500])
def test_within_the_rounding_of_bf16(rows, linear, rank):
    """NaN fails too: vLLM's kernel gives some on Hopper, in tiles of 128 columns of one slice (vllm #48590)."""
    x, a, y, b, members, slots = build(rows, *linear, rank)
    bias = torch.randn(y.shape[1], device="cuda").bfloat16()
    out = lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, bias, x.shape[1])
    low = (x.double() @ a.double().T).bfloat16().double() * (slots[:rows, None] >= 0)
    expected = y.double() + bias.double()
    start = 0
    for member, size in enumerate(linear[1]):
        part = low[:, member * rank : (member + 1) * rank]
        expected[:, start : start + size] += part @ b[start : start + size].double().T
        start += size
    # Half an ulp of the result; a low-rank value that float32 rounds to the other side moves it by an ulp of that.
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-6 * rank**0.5).all()
    assert torch.equal(out, lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, bias, x.shape[1]))


def test_new_values_and_a_new_mask_act_within_a_graph():
    x, a, y, b, members, slots = build(8, 3584, (3584, 512, 512), 32)
    graph = torch.cuda.CUDAGraph()
    lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, None, x.shape[1])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, None, x.shape[1])
    for change in (lambda: None, lambda: b.mul_(2), lambda: slots.fill_(-1)):
        change()
        graph.replay()
        assert torch.equal(out, lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, None, x.shape[1]))
    assert torch.equal(out, y)


def test_without_an_adapter_the_base_is_left_as_it_is():
    x, a, y, b, members, slots = build(8, 3584, (3584,), 32)
    assert torch.equal(lora_expand(y, lora_shrink(x, a, NONE), b, members, slots, NONE, None, x.shape[1]), y)
