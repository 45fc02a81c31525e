import torch
import torch.nn.functional as F

from verl_qerl.kernels.adapted_linear import FrozenWeight
from verl_qerl.kernels.frozen_linear import frozen_linear


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reader(weight, log=None):
    def read(dtype):
        if log is not None:
            log.append(dtype)
        return weight.to(dtype)

    return FrozenWeight(read, read)


def test_it_is_the_dense_linear_forward_and_backward():
    weight, bias = normal(5, 7, seed=1), normal(5, seed=2)
    x, same = (normal(2, 3, 7).requires_grad_() for _ in range(2))
    y, expected = frozen_linear(x, reader(weight), bias), F.linear(same, weight, bias)
    assert torch.equal(y, expected)
    for out in (y, expected):
        out.square().sum().backward()
    assert torch.allclose(x.grad, same.grad, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: frozen_linear(x, reader(weight), bias), (x,))


def test_the_weight_is_read_once_a_pass_in_the_dtype_of_the_pass():
    log = []
    x = normal(3, 7).bfloat16().requires_grad_()
    y = frozen_linear(x, reader(normal(5, 7), log))
    assert (y.dtype, log) == (torch.bfloat16, [torch.bfloat16])
    y.sum().backward()
    assert log == [torch.bfloat16] * 2


def test_an_input_without_gradient_leaves_no_graph():
    assert not frozen_linear(normal(3, 7), reader(normal(5, 7))).requires_grad


def test_neither_pass_keeps_the_weight():
    weight = normal(5, 7)
    saved = []
    x = normal(3, 7).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen_linear(x, reader(weight)).sum().backward()
    assert saved == []
