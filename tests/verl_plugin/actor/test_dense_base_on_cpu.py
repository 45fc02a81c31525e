import logging
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn

from verl_qerl.modules import NVFP4Linear
from verl_qerl.testing import random_packed_weight
from verl_qerl.verl_plugin.actor import dense_base
from verl_qerl.verl_plugin.actor.dense_base import DenseBase

GIB = 2**30


@pytest.fixture
def linear():
    module = NVFP4Linear.from_linear(nn.Linear(48, 24, bias=False, dtype=torch.bfloat16))
    module.fill(random_packed_weight(24, 48))
    return module


@contextmanager
def mode():
    yield "mode"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose passes take 5 GiB beside 2 GiB that are held, with `free` GiB; loading took 30."""

    class Cuda:
        free = 10.0
        peak = 30
        is_available = staticmethod(lambda: True)
        memory_allocated = staticmethod(lambda: 2 * GIB)
        memory_reserved = staticmethod(lambda: 3 * GIB)

        def reset_peak_memory_stats(self):
            self.peak = 7

        def max_memory_allocated(self):
            return self.peak * GIB

        def mem_get_info(self):
            return int(self.free * GIB), 80 * GIB

    cuda = Cuda()
    monkeypatch.setattr(dense_base.torch, "cuda", cuda)
    return cuda


def test_the_copy_lives_inside_and_changes_no_bit(linear):
    dense, x = DenseBase([linear]), torch.randn(3, 48).bfloat16()
    expected = linear(x)
    with dense.within(mode(), training=True) as entered:
        assert entered == "mode"
        assert torch.equal(linear.dense, linear.decode(torch.bfloat16))
        linear.weight.zero_()  # what is read is the copy
        assert torch.equal(linear(x), expected)
    assert linear.dense is None
    assert torch.count_nonzero(linear(x)) == 0


def test_gradients_through_the_copy(linear):
    grads = []
    for dense in (None, DenseBase([linear])):
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        with dense.within(mode(), training=True) if dense else mode():
            linear(x).float().square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_it_is_given_back_after_an_error(linear):
    with pytest.raises(KeyError), DenseBase([linear]).within(mode(), training=True):
        raise KeyError
    assert linear.dense is None


@pytest.mark.parametrize(("free", "fits", "said"), [(5.0, True, "kept from now on"), (3.9, False, "stays packed")])
def test_the_first_update_decides(linear, gpu, caplog, free, fits, said):
    dense = DenseBase([linear])
    dense.num_bytes = 1 * GIB  # 1 + 5 GiB of passes need 5 + 1 GiB
    gpu.free = free
    with caplog.at_level(logging.WARNING):
        for training in (False, True):
            with dense.within(mode(), training=training):
                assert linear.dense is None
            assert dense.fits is (fits if training else None)
        with dense.within(mode(), training=False):
            assert (linear.dense is not None) is fits
    (record,) = caplog.records
    assert said in record.message
    assert "1.0 GiB beside 5.0 GiB" in record.message
