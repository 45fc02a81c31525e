"""bench_small_update.py on a random model."""

import pytest
import torch
from qerl_testing import load_beside, random_qwen2

bench = load_beside(__file__, "bench_small_update")


def test_gains_of_an_update_in_every_form():
    model = random_qwen2(gain=3.0, hidden_size=128, intermediate_size=256, vocab_size=64).float()
    for weight in model.parameters():
        weight.data = bench.rounded(weight.data)
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(0, 64, (1, 48), generator=generator), 16) for _ in range(8)]
    small, large = bench.measure(model, texts[:4], texts[:4], [1, 100], lr=1e-5)
    for row in (small, large):
        assert row["tokens"] == 4 * 32
        assert row["share_of_gain"]["exact"] == 1
        assert sum(row["gains"]["exact"]) > 0
    assert sum(large["gains"]["exact"]) > 50 * sum(small["gains"]["exact"])
    for share in large["share_of_gain"].values():
        assert share == pytest.approx(1, abs=0.2)
    assert len(set(large["share_of_gain"].values())) == len(bench.KINDS)  # each is computed by itself
