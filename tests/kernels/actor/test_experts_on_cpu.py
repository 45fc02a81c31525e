import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.formats.reference import dequantize
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.kernels.actor.linear import experts_linear

E, N, K = 4, 48, 64
GROUPS = {"uneven": [3, 3, 8, 11], "one expert has all": [0, 0, 11, 11], "one token": [0, 0, 0, 1]}


def stack(parts: int):
    """(what decodes E experts of `parts` weights each, dense [E, N, K] float32)."""
    weights = [random_packed_weight(N // parts, K, seed=i) for i in range(E * parts)]
    factors = 2.0 ** torch.arange(E * parts)  # every weight has a global scale of its own
    dense = torch.cat([dequantize(weight, torch.float32) * f for weight, f in zip(weights, factors, strict=True)])
    codes = torch.cat([weight.codes for weight in weights])
    scale = torch.cat([weight.block_scale.view(torch.uint8) for weight in weights])
    decode_scale = torch.stack([weight.global_decode_scale for weight in weights]) * factors
    return lambda dtype: dequantize_nvfp4(codes, scale, decode_scale, dtype).view(E, N, K), dense.view(E, N, K)


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_meets_its_expert_forward_and_backward(dtype, parts, ends):
    decode, dense = stack(parts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ends[-1], K, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(ends[-1], N, generator=generator).to(dtype)
    y = experts_linear(x, torch.tensor(ends, dtype=torch.int32), decode)
    y.backward(grad)
    starts = [0, *ends[:-1]]
    for e, (start, end) in enumerate(zip(starts, ends, strict=True)):
        weight = dense[e].to(dtype)  # exact: global scales are powers of two
        assert torch.equal(y[start:end], x[start:end] @ weight.T)
        assert torch.equal(x.grad[start:end], grad[start:end] @ weight)


def test_backward_takes_a_gradient_without_strides():
    decode, dense = stack(1)
    x = torch.ones(3, K, requires_grad=True)
    experts_linear(x, torch.tensor([3, 3, 3, 3], dtype=torch.int32), decode).sum().backward()
    assert torch.allclose(x.grad, dense[0].sum(0).expand(3, K))


def test_no_weight_is_saved_dense_or_packed():
    decode, _ = stack(2)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x, ends = torch.ones(2, K, requires_grad=True), torch.tensor([2] * E, dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts_linear(x, ends, decode)
    assert [tensor.tolist() for tensor in kept] == [ends.tolist()]
