import pytest

pytest.importorskip("vllm")
from verl_qerl.vllm_plugin.linear import TiledKernel


def test_it_asks_for_hopper():
    assert TiledKernel.is_supported() == (False, "there is no GPU")
