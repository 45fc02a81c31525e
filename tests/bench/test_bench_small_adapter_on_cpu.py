"""bench_small_adapter.py on a random model."""

import pytest
import torch
from qerl_testing import load_beside, random_qwen2

bench = load_beside(__file__, "bench_small_adapter")


def test_a_small_term_arrives_where_it_is_summed_before_rounding():
    model = random_qwen2(gain=3.0, hidden_size=128, intermediate_size=256, vocab_size=64).float()
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(0, 64, (1, 48), generator=generator), 16) for _ in range(8)]
    small, large = bench.measure(model, texts[:4], texts[:4], [1, 100], lr=1e-5)
    for row in (small, large):
        assert row["tokens"] == 4 * 32
        assert (row["share_of_gain"]["exact"], row["share_of_gain"]["none"]) == (1, 0)
        assert row["kl_from_exact"]["exact"] == 0
    assert large["share_of_gain"]["after"] == pytest.approx(1, abs=0.1)
    assert small["share_of_gain"]["after"] < 0.8
    assert small["kl_from_exact"]["after"] > 0
