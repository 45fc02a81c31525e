"""bench_adapter_sums.py on a CPU, whose `addmm_` sums before it rounds."""

import pytest
from qerl_testing import load_beside

bench = load_beside(__file__, "bench_adapter_sums")


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
def test_what_is_summed_before_rounding_arrives(name):
    found = {row["way"]: row for row in bench.measure({name: (256, 256)}, [2048], 8, 300, "cpu")}
    assert [*found] == ["added", "in place", "whole", "actor", "rollout"]
    assert found["actor"]["share"] == pytest.approx(1, abs=0.1)
    assert found["rollout"]["share"] == pytest.approx(1, abs=0.1)
    assert found["added"]["share"] < 0.5
    assert found["actor"]["error"] <= found["added"]["error"]
