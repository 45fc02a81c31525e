import pytest
import torch
import torch.nn.functional as F
from qerl_testing import assert_close, rms_error_ratio
from small_adapter import draw, share_that_arrives

from verl_qerl.kernels.actor.adapted_linear import FrozenWeights, adapted_linears

# Roundings: of s x A^T and of the result, each at most half a step.
BOUND = {torch.bfloat16: 2 * 2.0**-9, torch.float32: 2.0**-20}
SCALINGS = [2.0, 0.75, 1.0]
SIZES = [24, 8, 40]
RANKS = [4, 2, 4]


def normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


class Case:
    """n linears of one input in `dtype`, and the same in float64; every tensor is exact in `dtype`."""

    def __init__(self, dtype: torch.dtype, count: int, bias: bool = True) -> None:
        def draw(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
            return normal(*shape, seed=seed, std=std).to(dtype)

        self.x = draw(3, 5, 32, seed=0)
        sizes, ranks = SIZES[:count], RANKS[:count]
        self.Ws = [draw(N, 32, seed=1 + i, std=0.2) for i, N in enumerate(sizes)]
        self.As = [draw(R, 32, seed=11 + i, std=0.2) for i, R in enumerate(ranks)]
        self.Bs = [draw(N, R, seed=21 + i, std=0.2) for i, (N, R) in enumerate(zip(sizes, ranks, strict=True))]
        self.biases = [draw(N, seed=31 + i) if bias and i != 1 else None for i, N in enumerate(sizes)]
        self.grads = [draw(3, 5, N, seed=41 + i) for i, N in enumerate(sizes)]
        self.scalings = SCALINGS[:count]

    def weights(self) -> FrozenWeights:
        def read(dtype: torch.dtype) -> list[torch.Tensor]:
            return [W.to(dtype) for W in self.Ws]

        return FrozenWeights(read, read)

    def fused(self) -> dict[str, torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (self.x, *self.As, *self.Bs)]
        x, As, Bs = leaves[0], leaves[1 : 1 + len(self.As)], leaves[1 + len(self.As) :]
        ys = adapted_linears(x, self.weights(), As, Bs, self.scalings, self.biases)
        return self._results(ys, x, As, Bs)

    def plain(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """As PEFT computes it, in `dtype`."""
        leaves = [t.to(dtype).clone().requires_grad_() for t in (self.x, *self.As, *self.Bs)]
        x, As, Bs = leaves[0], leaves[1 : 1 + len(self.As)], leaves[1 + len(self.As) :]
        ys = [
            F.linear(x, W.to(dtype), None if bias is None else bias.to(dtype)) + F.linear(F.linear(x, A), B) * s
            for W, A, B, bias, s in zip(self.Ws, As, Bs, self.biases, self.scalings, strict=True)
        ]
        return self._results(ys, x, As, Bs)

    def _results(self, ys, x, As, Bs) -> dict[str, torch.Tensor]:
        torch.autograd.backward(ys, [grad.to(y.dtype) for grad, y in zip(self.grads, ys, strict=True)])
        named = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"x": x.grad}
        named |= {f"A{i}": A.grad for i, A in enumerate(As)} | {f"B{i}": B.grad for i, B in enumerate(Bs)}
        return named


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_outputs_and_gradients(dtype, count, bias):
    case = Case(dtype, count, bias)
    found, expected = case.fused(), case.plain(torch.float64)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert_close(tensor, expected[name], BOUND[dtype])


def test_the_error_is_not_above_that_of_pefts_formula():
    case = Case(torch.bfloat16, 3)
    found, peft, exact = case.fused(), case.plain(torch.bfloat16), case.plain(torch.float64)
    means = [sum(rms_error_ratio(of[name], exact[name]) for name in exact) / len(exact) for of in (found, peft)]
    assert means[0] <= 1.05 * means[1]


def test_b_of_zero_is_the_base():
    case = Case(torch.bfloat16, 3)
    case.Bs = [torch.zeros_like(B) for B in case.Bs]
    found = case.fused()
    for i, (W, bias) in enumerate(zip(case.Ws, case.biases, strict=True)):
        assert_close(found[f"y{i}"], F.linear(case.x, W, bias), 2.0**-8)
        assert torch.count_nonzero(found[f"A{i}"]) == 0
        assert torch.count_nonzero(found[f"B{i}"]) > 0


def test_backward_is_the_derivative_of_forward():
    case = Case(torch.float64, 2)

    def call(x, A0, A1, B0, B1):
        return adapted_linears(x, case.weights(), [A0, A1], [B0, B1], case.scalings, case.biases)

    leaves = [t.requires_grad_() for t in (case.x, *case.As, *case.Bs)]
    assert torch.autograd.gradcheck(call, leaves)


def test_an_output_that_is_not_used():
    case = Case(torch.float32, 2)
    x = case.x.requires_grad_()
    y, _ = adapted_linears(x, case.weights(), case.As, case.Bs, case.scalings, case.biases)
    y.backward(case.grads[0])
    W, A, B, s = case.Ws[0], case.As[0], case.Bs[0], case.scalings[0]
    assert_close(x.grad, case.grads[0].double() @ (W.double() + s * B.double() @ A.double()), 2.0**-20)


def test_no_gradient_for_x_where_it_needs_none():
    case = Case(torch.float32, 1)
    (A,), (B,) = ([t.requires_grad_()] for t in (case.As[0], case.Bs[0]))
    (y,) = adapted_linears(case.x, case.weights(), [A], [B], case.scalings, case.biases)
    y.backward(case.grads[0])
    assert case.x.grad is None
    assert A.grad is not None
    assert B.grad is not None


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)], ids=str)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "none"])
def test_no_rows(shape, gradients):
    case = Case(torch.float32, 2)
    x, (A, B) = torch.zeros(shape, requires_grad=True), (case.As[0].requires_grad_(), case.Bs[0].requires_grad_())
    with torch.set_grad_enabled(gradients):
        ys = adapted_linears(x, case.weights(), case.As, case.Bs, case.scalings, case.biases)
    assert [y.shape for y in ys] == [(*shape[:-1], N) for N in SIZES[:2]]
    if gradients:
        sum(y.sum() for y in ys).backward()
        assert x.grad.shape == shape
        assert not A.grad.any()
        assert not B.grad.any()


@pytest.mark.parametrize("count", [1, 3])
def test_without_gradients_it_is_the_same(count):
    case = Case(torch.float32, count)
    arguments = case.x.requires_grad_(), case.weights(), case.As, case.Bs, case.scalings, case.biases
    expected = adapted_linears(*arguments)
    with torch.no_grad():
        found = adapted_linears(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(y.requires_grad for y in expected)
    assert not any(y.requires_grad for y in found)


def test_no_dense_weight_is_saved():
    case, saved = Case(torch.float32, 2), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        case.fused()
    assert saved == [(15, 32), (15, 6), (6, 32), (24, 4), (8, 2)]  # x, x A^T, A of both, B


def test_each_weight_is_read_once_a_pass():
    case, reads = Case(torch.float32, 1), []
    Ws = case.Ws
    weights = FrozenWeights(lambda dtype: reads.append("forward") or Ws, lambda dtype: reads.append("backward") or Ws)
    x = case.x.requires_grad_()
    (y,) = adapted_linears(x, weights, case.As, case.Bs, case.scalings, case.biases)
    assert reads == ["forward"]
    y.sum().backward()
    assert reads == ["forward", "backward"]


def test_nothing_of_a_small_adapter_is_lost_beside_a_bias():  # without one a CPU keeps it in `addmm_` too
    x, W, A = draw(4096, 256, 256, 8, "cpu")
    weights = FrozenWeights(lambda _: [W], lambda _: [W])
    bias = torch.full((256,), 4.0, dtype=x.dtype)
    share = share_that_arrives(lambda B: adapted_linears(x, weights, [A], [B], [1.0], [bias])[0], x, A, 256)
    assert share == pytest.approx(1, abs=0.1)
