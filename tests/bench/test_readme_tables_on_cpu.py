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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_rollouts_are_those_of_their_files(made, page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- rollout " in text
    assert made.filled(page, text) == text, "run: python tests/bench/readme_tables.py"


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
    (line,) = (line for line in PAGES[0].read_text().splitlines() if line.startswith(f"| {size} |"))
    assert f"**{peak}** | {later}" in line
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


def test_the_step_beside_stock_verl():
    parts = []
    for name in ("ours", "bf16_fused"):
        data = result(f"train_step_7b_{name}")
        step = data["steps"][-1]
        times = [step["phases"][phase]["seconds"] for phase in ("gen", "old_log_prob", "update_actor")]
        parts.append((f"{step['step_s']:.1f}", [f"{seconds:.1f}" for seconds in times], f"{data['peak_gib']:.1f} GiB"))
    (ours, (gen, log_probs, update), peak), (stock, others, other_peak) = parts
    text = PAGES[0].read_text()
    assert f"**{ours} s** (rollout {gen}, log-probs {log_probs}, update {update}; {peak})" in text
    assert f"against {stock} s ({', '.join(others)}; {other_peak})" in text


def test_the_mismatch_of_a_trained_model():
    arms = {row["arm"]: row["mean_abs_log_prob_difference"] for row in result("mismatch")["arms"]}
    ours, stock = (f"{arms[arm]:.1e}".replace("e-0", "e-") for arm in ("nvfp4", "bf16"))
    assert f"{ours}, where bf16 has {stock}" in PAGES[0].read_text()
    assert f"{ours}, with or without float32 norms | {stock} bf16" in PAGES[1].read_text()


def test_an_adapter_on_its_way():
    ms = result("adapter_sync_7b")["ms"]
    assert f"| {ms['ours']['total']:.0f} ms | {ms['verl']['total']:.0f} ms verl's way |" in PAGES[1].read_text()


def test_answers_through_verls_server():
    rows = result("answers_7b")["rows"]
    front, page = (path.read_text() for path in PAGES)
    for verl, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (verl["arm"], ours["arm"], verl["answers"]) == ("verl", "ours", ours["answers"])
        slow, fast, times = verl["tokens_per_s"], ours["tokens_per_s"], ours["tokens_per_s"] / verl["tokens_per_s"]
        assert f"{verl['answers']} at once {slow:,.0f} and **{fast:,.0f}**" in front
        shares = f"{verl['server_share']:.2f}; {ours['server_share']:.2f}"
        assert f"| {verl['answers']} | {slow:,.0f} | {fast:,.0f} ({times:.2f}) | {shares} |" in page
    assert f"nothing to do for {1 - rows[4]['engine_share']:.0%}".replace("%", " %") in page


def test_a_step_whose_answers_are_asked_for_once():
    step = result("train_step_7b_ours_a5dc027")["steps"][-1]
    assert (
        f"{step['step_s']:.1f} s (rollout {step['phases']['gen']['seconds']:.1f}) in another call"
        in PAGES[0].read_text()
    )


def test_room_on_a_gpu_of_80_gb():
    engines = json.loads((H200.parent / "h100" / "rollout_32b_realistic.json").read_text())["engines"]
    room = {engine["arm"]: f"{engine['kv_cache_tokens']:,}" for engine in engines}
    ours, stock = room["nvfp4_lora_ours"], room["bf16_lora_stock"]
    assert f"{ours} tokens of KV cache beside 32B of ours, and for {stock} beside bf16" in PAGES[0].read_text()
