"""bench_small_update.py on a random model."""

import json
import re
from pathlib import Path

import numpy as np
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


def test_what_the_page_says_is_what_the_file_says():
    found = json.loads((Path(__file__).parent / "results" / "cpu" / "small_update.json").read_text())["rows"]
    page = (Path(__file__).parents[2] / "verl_qerl" / "algos" / "README.md").read_text()
    table = page.partition("| updates | weights in bf16")[2]
    told = [list(map(int, re.findall(r"\d+", row))) for row in table.splitlines()[2:6]]
    shares = [[row["updates"], *(100 * row["share_of_gain"][kind] for kind in bench.KINDS[1:])] for row in found[:4]]
    assert told == np.round(shares).tolist()
    assert (found[0]["tokens"], len(found[0]["gains"]["bf16"])) == (1001, 6)
    gains = [{kind: np.array(values) for kind, values in row["gains"].items()} for row in found[:4]]
    for kind in ("int8", "fp8"):  # "no more that could be seen"
        for gain in gains:
            apart = (gain[kind] - gain["bf16"]) / gain["exact"].mean()
            error = apart.std(ddof=1) / len(apart) ** 0.5
            assert apart.mean() > -2.57 * error  # of t with 5 degrees of freedom, 95 %
            assert 0.01 < error < 0.055
    lost = [(gain["bf16"] - gain["nvfp4"]).mean() / gain["exact"].mean() for gain in gains]
    assert round(100 * max(lost)) == 9
