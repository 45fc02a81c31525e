import pytest
from qerl_testing import random_qwen2


@pytest.fixture
def tiny_model():
    """Builds a two-layer Qwen2 in bf16, from a seed; its four linears of attention and three of the MLP per layer."""
    pytest.importorskip("transformers")
    return lambda seed=0: random_qwen2(seed, hidden_size=32, intermediate_size=48)
