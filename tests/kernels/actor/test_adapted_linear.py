"""Adapted linears on a GPU."""

import pytest
from bench_adapter_sums import measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("linear", [("self_attn.q_proj", 1536, 1536), ("mlp.down_proj", 1536, 8960)], ids=str)
def test_nothing_of_a_small_adapter_is_lost(linear):
    name, *shape = linear
    rows = measure({name: tuple(shape)}, [64, 1024, 8192], 16, 300, "cuda")
    assert [row["share"] for row in rows if row["way"] == "actor"] == pytest.approx([1] * 3, abs=0.1)
