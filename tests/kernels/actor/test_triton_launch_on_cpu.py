"""What is launched again without asking Triton, with a kernel in the place of Triton's that counts what it is asked."""

import pytest
import torch

from verl_qerl.kernels.actor.triton_launch import TritonLauncher


class FakeKernel:
    def __init__(self):
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.asked.append((grid, arguments, num_warps))
            return self.compiled()

        return launch

    def compiled(self):
        fake = self

        class Compiled:
            def __getitem__(self, grid):
                return lambda *arguments: fake.launched.append((grid, arguments))

        return Compiled()


def arguments(dtype=torch.uint8, N=8, constant=True, num_warps=4):
    return [torch.zeros(64, dtype=dtype)], (N,), (constant,), num_warps


def test_the_same_again_goes_past_triton():
    kernel = FakeKernel()
    launcher = TritonLauncher(kernel)
    tensors, *rest = arguments()
    launcher((2, 3), tensors, *rest)
    launcher((5, 3), tensors, *rest)  # a grid is nothing that is compiled for
    assert len(kernel.asked) == 1
    assert kernel.launched == [((5, 3, 1), (tensors[0].data_ptr(), 8, True))]


@pytest.mark.parametrize("other", [{"dtype": torch.float32}, {"N": 16}, {"constant": False}, {"num_warps": 8}], ids=str)
def test_anything_that_triton_compiles_for_asks_triton(other):
    kernel = FakeKernel()
    launcher = TritonLauncher(kernel)
    launcher((1, 1), *arguments())
    launcher((1, 1), *arguments(**other))
    assert len(kernel.asked) == 2
    assert not kernel.launched


def test_an_odd_address_asks_triton_each_time():
    kernel = FakeKernel()
    launcher = TritonLauncher(kernel)
    tensors, *rest = arguments()
    for at in ([tensors[0][1:]], tensors, [tensors[0][1:]]):
        launcher((1, 1), at, *rest)
    assert len(kernel.asked) == 3
