"""Tables and figures of the READMEs are those of the result files."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests" / "bench" / "results" / "h200"
PAGES = (ROOT / "README.md", ROOT / "tests" / "bench" / "results" / "README.md")


@pytest.fixture(scope="module")
def made(bench) -> ModuleType:
    import readme_tables

    return readme_tables


def result(name: str) -> Any:
    return json.loads((H200 / f"{name}.json").read_text(encoding="utf-8"))


def row(arm: str, batch: int, value: float, context: int | str = 384) -> dict[str, Any]:
    whole = context == "realistic"
    measured = {"decode_ms_per_step": None if whole else value, "tokens_per_s": value}
    return {"arm": arm, "model": "7B", "batch": batch, "context": context} | measured


def test_tables_of_rollouts_are_those_of_their_files(made):
    text = PAGES[1].read_text(encoding="utf-8")
    assert "<!-- rollout " in text
    assert made.filled(PAGES[1], text) == text, "run: python tests/bench/readme_tables.py"


def test_an_arm_is_as_many_times_as_fast_as_the_baseline_of_its_file(made):
    rows = [row("bf16_lora_stock", 1, 6.0), row("nvfp4_lora_ours", 1, 3.0), row("fp8_lora_stock", 32, 5.0)]
    rows += [row("bf16_lora_stock", 8, 100.0, "realistic"), row("nvfp4_lora_ours", 8, 150.0, "realistic")]
    assert made.speed([{"rows": rows}]).splitlines()[2:] == [
        "| 7B: bf16, stock | 6.00 ms | - | 100 tokens/s |",
        "| 7B: **NVFP4, verl_qerl** | 2.00x | - | 1.50x |",
    ]


def test_a_row_says_how_many_gpus_share_the_model(made):
    rows = [row("bf16_lora_stock", 1, 6.0), row("nvfp4_lora_ours_noise", 1, 3.0)]
    assert made.speed([{"rows": rows, "options": {"tensor_parallel": 2}}]).splitlines()[2:] == [
        "| 7B on 2 GPUs: bf16, stock | 6.00 ms |",
        "| 7B on 2 GPUs: NVFP4, verl_qerl, noise | 2.00x |",
    ]


def test_no_column_is_empty(made):
    lines = made.speed([{"rows": [row("bf16_lora_stock", 1, 6.0)]}]).splitlines()
    assert lines == ["| sequences at once | 1 |", "|---|---|", "| 7B: bf16, stock | 6.00 ms |"]


def test_a_cell_is_of_one_measurement(made):
    rows = [row("bf16_lora_stock", 1, 6.0), row("bf16_lora_stock", 1, 7.0, context=1024)]
    with pytest.raises(ValueError, match="measured twice"):
        made.speed([{"rows": rows}])


@pytest.mark.parametrize("name", ["7b_24gib", "14b_40gib", "32b_80gib"])
def test_memory_and_time_of_a_capped_step(name):
    data, size = result(f"train_step_{name}"), name.partition("_")[0].upper()
    peak, later = f"{data['peak_gib']:.1f} GiB", f"{data['steps'][-1]['step_s']:.0f} s"
    (line,) = (line for line in PAGES[1].read_text().splitlines() if line.startswith(f"| {size} inside "))
    assert f"{later} (the first {data['steps'][0]['step_s']:.0f} s), {peak}" in line
    assert data["peak_gib"] < data["cap_gib"]


@pytest.mark.parametrize("name", ["32b_80gib", "14b_40gib", "7b_24gib", "7b_ours", "7b_bf16_fused"])
def test_memory_by_phase(name):
    data = result(f"train_step_{name}")
    phases = data["steps"][-1]["phases"]
    peaks = [phases[phase]["peak_gib"] for phase in ("gen", "old_log_prob", "update_actor", "update_weights")]
    cells = " | ".join(f"{peak:.1f}" for peak in (*peaks, data["peak_gib"]))
    lines = PAGES[1].read_text().splitlines()
    (line,) = (line for line in lines if line.endswith(f"| [file](h200/train_step_{name}.json) |"))
    assert f"({data['commit']}) | {cells} |" in line


def test_the_first_page_has_the_memory_of_two_steps():
    peaks = {size: result(f"train_step_{size}")["peak_gib"] for size in ("32b_80gib", "7b_24gib")}
    front = PAGES[0].read_text()
    assert f"| 32B in {peaks['32b_80gib']:.1f} GiB ([file]" in front
    assert f"7B in {peaks['7b_24gib']:.1f} GiB ([file]" in front


def decode_ms(rows: list[dict[str, Any]], arm: str, batch: int) -> float:
    found = [row for row in rows if row["arm"] == arm and row["batch"] == batch and row["context"] != "realistic"]
    return min(row["decode_ms_per_step"] for row in found)


def test_the_first_page_has_decoding_beside_both_stock_arms():
    front, batches = PAGES[0].read_text(), (1, 64, 256)

    def times(name, stock):
        rows = result(name)["rows"]
        found = (decode_ms(rows, stock, batch) / decode_ms(rows, "nvfp4_lora_ours", batch) for batch in batches)
        return ", ".join(f"{ratio:.2f}x" for ratio in found)

    assert f"| {times('rollout_7b', 'bf16_lora_stock')} as fast ([file]" in front
    assert f"| {times('rollout_7b_0526c25', 'bf16')} ([file]" in front
    rows = result("rollout_7b_0526c25")["rows"]
    prefill = {row["arm"]: row["prefill_s"] for row in rows if row["batch"] == 256}
    assert f"read in {prefill['nvfp4_lora_ours'] / prefill['bf16']:.2f}x the time of plain bf16" in front


def test_a_draw_for_each_sequence_or_token_costs_less_than_three_per_cent():
    rows = result("rollout_7b_draws")["rows"]
    for batch in (1, 32, 256):
        none = decode_ms(rows, "nvfp4_lora_ours", batch)
        costs = [decode_ms(rows, f"nvfp4_lora_ours_{draw}", batch) / none for draw in ("sequence", "token")]
        assert max(costs) < 1.03


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_the_first_page_has_whole_steps_beside_both_stock_arms(size):
    ours, *stock = (row["median_s"]["step"] for row in result(f"step_{size}")["rows"])
    told = " | ".join([f"{ours:.1f} s", *(f"{step:.1f} s ({step / ours:.2f}x)" for step in stock)])
    assert f"step_{size}.json)) | {told} |" in PAGES[0].read_text()
