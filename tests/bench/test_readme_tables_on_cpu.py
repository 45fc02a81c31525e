"""Tables and figures of the READMEs are those of the result files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import readme_tables as made

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests" / "bench" / "results" / "h200"
PAGES = (ROOT / "README.md", ROOT / "tests" / "bench" / "results" / "README.md")


def result(name: str) -> Any:
    return json.loads((H200 / f"{name}.json").read_text(encoding="utf-8"))


def medians(name: str) -> dict[str, dict[str, float]]:
    """Arm -> phase -> seconds, of a file of bench_step.py."""
    return {row["arm"]: row["median_s"] for row in result(name)["rows"]}


def row(arm: str, batch: int, value: float, context: int | str = 384) -> dict[str, Any]:
    whole = context == "realistic"
    measured = {"decode_ms_per_step": None if whole else value, "tokens_per_s": value}
    return {"arm": arm, "model": "7B", "batch": batch, "context": context} | measured


def test_tables_of_rollouts_are_those_of_their_files():
    text = PAGES[1].read_text(encoding="utf-8")
    assert "<!-- rollout " in text
    assert made.filled(PAGES[1], text) == text, "run: python tests/bench/readme_tables.py"


def test_an_arm_is_as_many_times_as_fast_as_the_baseline_of_its_file():
    rows = [row("bf16_lora_stock", 1, 6.0), row("nvfp4_lora_ours", 1, 3.0), row("fp8_lora_stock", 32, 5.0)]
    rows += [row("bf16_lora_stock", 8, 100.0, "realistic"), row("nvfp4_lora_ours", 8, 150.0, "realistic")]
    assert made.speed([{"rows": rows}]).splitlines()[2:] == [
        "| 7B: bf16, stock | 6.00 ms | - | 100 tokens/s |",
        "| 7B: **NVFP4, verl_qerl** | 2.00x | - | 1.50x |",
    ]


def test_a_row_says_how_many_gpus_share_the_model():
    rows = [row("bf16_lora_stock", 1, 6.0), row("nvfp4_lora_ours_noise", 1, 3.0)]
    assert made.speed([{"rows": rows, "options": {"tensor_parallel": 2}}]).splitlines()[2:] == [
        "| 7B on 2 GPUs: bf16, stock | 6.00 ms |",
        "| 7B on 2 GPUs: NVFP4, verl_qerl, noise | 2.00x |",
    ]


def test_no_column_is_empty():
    lines = made.speed([{"rows": [row("bf16_lora_stock", 1, 6.0)]}]).splitlines()
    assert lines == ["| sequences at once | 1 |", "|---|---|", "| 7B: bf16, stock | 6.00 ms |"]


def test_a_cell_is_of_one_measurement():
    rows = [row("bf16_lora_stock", 1, 6.0), row("bf16_lora_stock", 1, 7.0, context=1024)]
    with pytest.raises(ValueError, match="measured twice"):
        made.speed([{"rows": rows}])


RUNS = [f"h200/train_step_{name}" for name in ("32b_80gib", "7b_24gib", "7b_24gib_shared", "7b_ours")]


@pytest.mark.parametrize("name", ["h100/train_step_32b", *RUNS])
def test_time_and_memory_by_phase(name):
    data = json.loads((H200.parent / f"{name}.json").read_text(encoding="utf-8"))
    first, *_, last = data["steps"]
    phases = last["phases"]
    peaks = [phases[phase]["peak_gib"] for phase in ("gen", "old_log_prob", "update_actor", "update_weights")]
    assert data["cap_gib"] is None or data["peak_gib"] < data["cap_gib"]
    cells = " | ".join(f"{peak:.1f}" for peak in (*peaks, data["peak_gib"]))
    (line,) = (line for line in PAGES[1].read_text().splitlines() if line.endswith(f"| [file]({name}.json) |"))
    seconds = f"{last['step_s']:.0f} s (the first {first['step_s']:.0f} s)"
    assert f"({data['commit']}) | {seconds} | {cells} |" in line
    assert data["cap_gib"] is None or f" inside {data['cap_gib']:.0f} GiB" in line


def test_the_first_page_has_the_memory_of_two_steps():
    peaks = {size: result(f"train_step_{size}")["peak_gib"] for size in ("32b_80gib", "7b_24gib")}
    front = PAGES[0].read_text()
    assert f"| 32B in {peaks['32b_80gib']:.1f} GiB ([file]" in front
    assert f"7B in {peaks['7b_24gib']:.1f} GiB ([file]" in front
    assert f"a 32B (random weights) takes [{peaks['32b_80gib']:.1f} GiB]" in front


def decode_ms(rows: list[dict[str, Any]], arm: str, batch: int) -> float:
    found = [row for row in rows if row["arm"] == arm and row["batch"] == batch and row["context"] != "realistic"]
    return min(row["decode_ms_per_step"] for row in found)


def test_the_first_page_has_decoding_beside_both_stock_arms():
    front, batches = PAGES[0].read_text(), (1, 64, 256)

    def times(name, stock):
        rows = result(name)["rows"]
        found = (decode_ms(rows, stock, batch) / decode_ms(rows, "nvfp4_lora_ours", batch) for batch in batches)
        return ", ".join(f"{ratio:.2f}x" for ratio in found)

    assert f"| {times('rollout_7b', 'bf16_lora_stock')} ([file]" in front
    assert f"| {times('rollout_7b_0526c25', 'bf16')} ([file]" in front

    def prefill(name):
        seconds = {(row["arm"], row["batch"]): row["prefill_s"] for row in result(name)["rows"]}
        return [f"{seconds['nvfp4_lora_ours', batch] / seconds['bf16', batch]:.2f}" for batch in (256, 1)]

    many, one = prefill("rollout_7b_0526c25")
    least, most = prefill("prefill_1.5b")
    told = f"takes a 7B {many} (256 at once) to {one} times (one) as long as plain bf16, a 1.5B {least} to {most} times"
    assert told in front


def test_what_stock_4_and_8_bits_gain_beside_stock_bf16():
    rows = result("rollout_7b_a966dd7")["rows"]
    page = PAGES[1].read_text()
    for arm, before in (("nvfp4_lora_stock", "what QeRL runs), in a call of its own: "), ("fp8_lora_stock", "LoRA: ")):
        batches = (1, 32, 64, 128, 256)
        *most, last = (decode_ms(rows, "bf16_lora_stock", n) / decode_ms(rows, arm, n) for n in batches)
        assert f"{before}{', '.join(f'{times:.2f}' for times in most)} and {last:.2f}" in page
        whole = {row["arm"]: row["tokens_per_s"] for row in rows if row["context"] == "realistic"}
        assert f"{whole[arm] / whole['bf16_lora_stock']:.2f}" in page.partition(before)[2].partition("]")[0]


def test_steps_of_a_long_tailed_rollout():
    page = PAGES[1].read_text()
    for row in result("rollout_7b")["steps"]:
        kinds = {(kind["begins"], kind["tokens"]): 1e3 * kind["seconds"] / kind["steps"] for kind in row["kinds"]}
        cells = [(True, 512), *((False, tokens) for tokens in (256, 192, 128, 64, 32, 8))]
        assert f"| {row['arm']} | {' | '.join(f'{kinds[cell]:.1f}' for cell in cells)} |" in page


def test_a_draw_for_each_sequence_or_token_costs_less_than_three_per_cent():
    rows = result("rollout_7b_draws")["rows"]
    for batch in (1, 32, 256):
        none = decode_ms(rows, "nvfp4_lora_ours", batch)
        costs = [decode_ms(rows, f"nvfp4_lora_ours_{draw}", batch) / none for draw in ("sequence", "token")]
        assert max(costs) < 1.03


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_the_first_page_has_whole_steps_beside_both_stock_arms(size):
    ours, *stock = (seconds["step"] for seconds in medians(f"step_{size}").values())
    told = " | ".join([f"{ours:.1f} s", *(f"{step:.1f} s ({step / ours:.2f}x)" for step in stock)])
    front = PAGES[0].read_text()
    assert f"step_{size}.json)) | {told} |" in front
    if size == "7b":
        told = (
            "[{:.1f} s]({}step_7b.json), with stock LoRA {:.1f} s, with a plain bf16 rollout (adapter merged) {:.1f} s"
        )
        assert told.format(ours, "tests/bench/results/h200/", *stock) in front


def test_the_first_page_has_the_peaks_of_whole_steps():
    both = [[row["peak_allocated_gb"] for row in result(f"step_{size}")["rows"]] for size in ("1.5b", "7b")]
    ours, lora, merged = (f"{small:.1f}, {large:.1f} GiB" for small, large in zip(*both, strict=True))
    assert f"| {ours}: it keeps activations while there is memory | {lora} | {merged} |" in PAGES[0].read_text()


def test_the_first_page_has_whole_steps_in_bypass_mode():
    both = [[seconds["step"] for seconds in medians(f"step_{size}_bypass").values()] for size in ("1.5b", "7b")]
    (small, *lora_merged), (large, *others) = both
    (lora, merged) = (
        f"{one:.1f} s ({one / small:.2f}x), {two:.1f} s ({two / large:.2f}x"
        for one, two in zip(lora_merged, others, strict=True)
    )
    assert f"| {small:.1f}, {large:.1f} s | {lora}) | {merged}, all activations kept) |" in PAGES[0].read_text()


def test_accuracy_before_and_after_training():
    run = result("grpo_eval_1.5b")
    front, page = (page.read_text() for page in PAGES)
    before, after = (run[name]["gsm8k"] for name in ("before", "after"))
    cells = []
    for name, found in (("before", before), ("after", after)):
        mean, low, high = found["accuracy"].values()
        cells.append(f"{100 * mean:.1f}")
        told = f"{mean:.3f} ({low:.3f} to {high:.3f}) | {found['pass_at']['4']:.3f} | {found['mean_tokens']:.0f}"
        assert f"| {name} | {told} |" in page
    gain = {name: 100 * run["after_less_before"][name] for name in ("mean", "low", "high")}
    told = "[+{mean:.1f}, {low:.1f} to {high:.1f}](".format(**gain)
    assert f"| {' to '.join(cells)}: {told}" in front


def test_accuracy_of_each_format():
    front, page = (page.read_text() for page in PAGES)
    evaluations = result("eval_gsm8k_1.5b")["evaluations"]
    names = ("bf16, stock vLLM", "fp8", "int8", "nvfp4, scales by mse", "gptq", "mxfp4")
    means = (evaluations[name]["tasks"]["gsm8k"]["accuracy"]["mean"] for name in names)
    assert f"each +- 1.9 | {' | '.join(f'{100 * mean:.1f}' for mean in means)} |" in front
    for name, found in evaluations.items():
        mean, low, high = found["tasks"]["gsm8k"]["accuracy"].values()
        assert 0.016 < mean - low < high - low < 0.0385
        figures = f" | {mean:.3f} ({low:.3f} to {high:.3f}) | {found['tasks']['gsm8k']['pass_at']['4']:.3f} | "
        assert [line for line in page.splitlines() if line.startswith(f"| {name}") and figures in line], name


def test_the_first_page_has_what_noise_does():
    rows = json.loads((H200.parent / "h100" / "noise.json").read_text())["rows"]
    found = {(row["base"], row["mode"], row["draw"], row["sigma"]): row for row in rows}
    front = PAGES[0].read_text()
    one, each = (found["nvfp4:mse", "additive", draw, 0.05] for draw in ("batch", "sequence"))
    assert f"raises the entropy of answers by {each['entropy']['change']:.3f} nats" in front
    assert each["entropy"]["spread"] < one["entropy"]["spread"] / 2
    assert 0.004 < each["kl"]["mean"] < one["kl"]["mean"] < 0.006
    gain = found["nvfp4:mse", "none", "batch", 0.0]["accuracy"]["mean"]
    gain -= found["nvfp4:minmax", "none", "batch", 0.0]["accuracy"]["mean"]
    assert f"gains {100 * gain:.0f} points over QeRL's `minmax`" in front


def test_what_noise_does_to_a_pretrained_model():
    rows = json.loads((H200.parent / "h100" / "noise.json").read_text())["rows"]
    lines = [
        line
        for line in PAGES[1].read_text().splitlines()
        if re.match(r"\| (bf16|nvfp4:\w+) \| \S+.* \+- .* \| 0\.\d+ \|$", line)
    ]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        what = "none" if row["mode"] == "none" else f"{row['mode']}, {row['draw']}, {row['sigma']:g}"
        assert line.startswith(f"| {row['base']} | {what}")
        for name in ("entropy", "accuracy", "pass"):
            value, error = ("mean", "standard_error") if what == "none" else ("change", "change_standard_error")
            sign = "" if what == "none" else "+"
            assert f"| {row[name][value]:{sign}.3f} +- {row[name][error]:.3f}" in line


@pytest.mark.parametrize(
    ("line", "way", "rows"),
    [
        ("base and term rounded", "added", 8192),
        ("term first", "in place", 8192),
        ("one product (", "actor", 8192),
        ("one product over", "rollout", 8192),
        ("our rollout, 256 rows", "rollout", 256),
    ],
)
def test_a_young_adapter(line, way, rows):
    found = [row for row in result("adapter_sums")["rows"] if (row["way"], row["rows"]) == (way, rows)]
    told = next(each for each in PAGES[1].read_text().splitlines() if each.startswith(f"  | {line}"))
    cells = told.replace(" us", "").split("|")[2:-1]
    for cell, name in zip(cells, ("q", "o", "up", "down"), strict=True):
        (row,) = [row for row in found if f".{name}_proj" in row["linear"]]
        assert cell.strip() == f"{row['share']:.2f}, {row['us']:.0f}"


def test_an_adapter_on_its_way():
    ms = result("adapter_sync_7b")["ms"]
    assert f"| {ms['ours']['total']:.0f} ms | {ms['verl']['total']:.0f} ms verl's way |" in PAGES[1].read_text()


def test_a_merged_adapter():
    found = result("merged_sync")
    ours, verl = (f"{found['seconds'][way]:.2f} s, {found['extra_gib'][way]:.2f} GiB" for way in ("ours", "verl"))
    assert f"| {ours} more while it lasts | {verl} verl's way, the same bits |" in PAGES[1].read_text()
    assert found["same_bits"] is True
    study = (PAGES[0].parent / "recipes" / "study" / "README.md").read_text()
    assert f"it takes [{found['seconds']['ours']:.1f} s](../../tests/bench/results/README.md#weight-sync)" in study


def test_a_merged_step_with_a_short_sync():
    def reckoned(name: str, merged: str) -> tuple[str, str]:
        ours, stock = (medians(name)[arm] for arm in ("ours", merged))
        step = stock["step"] - stock["weight_sync"] + ours["weight_sync"]
        return f"{step:.1f} s", f"{step / ours['step']:.2f}"

    large, large_bypass = reckoned("step_7b", "stock_merged"), reckoned("step_7b_bypass", "stock_merged_kept")
    small, small_bypass = (reckoned(f"step_1.5b{mode}", "stock_merged") for mode in ("", "_bypass"))
    assert (
        f"it would take {large[0]} a step of 7B ({large[1]} times ours; in bypass mode {large_bypass[0]},"
        f" {large_bypass[1]}) and {small[0]} of the 1.5B ({small[1]}; {small_bypass[0]}, {small_bypass[1]})"
    ) in PAGES[1].read_text()
    before, short = medians("step_7b"), medians("step_7b_short_sync")
    stock = before["stock_merged"]
    told = f"{stock['weight_sync']:.1f} of the {stock['step']:.1f} s are verl's sync"
    front = PAGES[0].read_text()
    assert told in front
    times = f"[{short['stock_merged']['step'] / short['ours']['step']:.2f}x]"
    assert f"With it the step took {times}(tests/bench/results/h200/step_7b_short_sync.json)" in front
    longer = [f"{short[arm]['rollout'] - before[arm]['rollout']:.1f} s" for arm in ("ours", "stock_merged")]
    assert "ours by {}, merged by {}".format(*longer) in PAGES[1].read_text()
    assert f"it would be {large[0]} ({large[1]}x)" in front


def test_what_calibration_takes_of_the_cost_of_4_bits():
    same, other = json.loads((H200.parent / "cpu" / "recovery.json").read_text())["runs"]
    rows, others = ({row["method"]: row for row in run["rows"]} for run in (same, other))
    gptq, nearest = rows["nvfp4 gptq"], rows["nvfp4 mse"]
    assert round(nearest["kl"] / gptq["kl"]) == 4
    assert round(nearest["change"] / gptq["change"]) == 5
    times = [gptq[name] / rows["int8"][name] for name in ("kl", "change")]
    beside = "{:.1f} and {:.1f} times those of int8".format(*times)
    page = PAGES[1].read_text()
    assert f"of the KL a quarter is left, of the change of NLL a fifth ({beside})" in page
    shares = [others["nvfp4 gptq"][name] / others["nvfp4 mse"][name] for name in ("kl", "change")]
    assert all(0.48 < share < 0.53 for share in shares)
    assert "half of both is left" in page


def test_what_formats_keep_of_answers_of_the_model_itself():
    own, solutions = json.loads((H200.parent / "cpu" / "recovery_1.5b.json").read_text())["runs"]
    rows, others = ({row["method"]: row for row in run["rows"]} for run in (own, solutions))
    kl = {method: row["kl"] for method, row in rows.items() if method != "bf16"}
    page = PAGES[1].read_text()
    told = "int8 has a KL of {int8:.4f}, its weights alone {int8 weights:.4f}, fp8 {fp8:.4f} and nvfp4 {nvfp4 mse:.4f}."
    assert told.format_map(kl) in page
    nll = [math.log(each["bf16"]["perplexity"]) for each in (rows, others)]
    assert "its NLL is {:.2f}, in solutions of the test set {:.2f}.".format(*nll) in page
    assert kl["nvfp4 mse"] > 4 * kl["int8"] > 4 * kl["int8 weights"]
    study = (ROOT / "recipes" / "study" / "README.md").read_text()
    told = (
        "its KL is {nvfp4 mse:.4f}, that of INT8's rollout {int8:.4f} and of INT8's actor, which does not round inputs,"
    )
    assert f"{told.format_map(kl)} {kl['int8 weights']:.4f}." in study
    assert f"FP8, whose KL is {kl['fp8']:.4f}, lost nothing" in study


def test_answers_through_verls_server():
    rows = result("answers_7b")["rows"]
    page = PAGES[1].read_text()
    for verl, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (verl["arm"], ours["arm"], verl["answers"]) == ("verl", "ours", ours["answers"])
        slow, fast, times = verl["tokens_per_s"], ours["tokens_per_s"], ours["tokens_per_s"] / verl["tokens_per_s"]
        shares = f"{verl['server_share']:.2f}; {ours['server_share']:.2f}"
        assert f"| {verl['answers']} | {slow:,.0f} | {fast:,.0f} ({times:.2f}) | {shares} |" in page
    assert f"nothing to do for {1 - rows[4]['engine_share']:.0%}".replace("%", " %") in page
