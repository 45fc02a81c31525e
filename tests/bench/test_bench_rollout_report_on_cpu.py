"""The rollout benchmark: its arithmetic, its order, its result file and tables."""

import json
import re
import statistics
from pathlib import Path

import bench_rollout as bench
import pytest
import rollout_load as load

FOLDER = Path(__file__).parent


def row(arm: str = "bf16_lora_stock", batch: int = 1, **values) -> dict:
    base: dict = {"arm": arm, "model": "7B", "batch": batch, "rank": 32, "prompt": 256, "context": 512}
    empty = {"decode_ms_per_step": None, "prefill_s": None, "tokens_per_s": None, "peak_gib": None}
    return base | empty | values


HEAD = {"gpu": "H200", "driver": "580", "versions": {}, "commit": "abc", "time": "now", "options": {}}


def test_a_decode_step_is_the_difference_to_one_token():
    prefill, step = 2.0, 0.005  # 256 tokens are the prefill's one and 255 steps
    assert load.decode_ms(prefill, prefill + 255 * step, 256) == pytest.approx(5.0)


def test_answer_lengths_are_long_tailed_cut_and_repeatable():
    lengths = load.draw_lengths(1024)
    assert lengths == load.draw_lengths(1024)
    assert min(lengths) >= 16
    assert max(lengths) == 2048
    assert 350 < statistics.median(lengths) < 450
    # exp(0.8 * 1.645) = 3.7 medians at the 95th percentile
    assert 1200 < statistics.quantiles(lengths, n=20)[-1] < 1800
    assert sum(length == 2048 for length in lengths) < 40


def test_a_cuda_graph_is_captured_for_every_batch():
    assert load.capture_sizes([1, 8, 100, 256], 256, realistic=False, larger=True) == [1, 2, 4, 8, 100, 256, 512]
    assert load.capture_sizes([1], 1, realistic=False, larger=True) == [1, 2]
    assert set(range(8, 257, 8)) <= set(load.capture_sizes([1], 256, realistic=True, larger=True))
    assert load.capture_sizes([1024], 1024, realistic=False, larger=False)[-1] == 512
    assert load.capture_sizes([1024], 1024, realistic=False, larger=True)[-9:] == list(range(512, 1025, 64))


def test_the_cache_holds_whole_blocks_and_one_more():
    assert load.kv_tokens(3, 256, 16) == 3 * (16 + 1) * 16
    assert load.kv_tokens(1, 257, 16) == (17 + 1) * 16


def test_a_row_replaces_that_of_its_key_at_its_place(tmp_path):
    path = tmp_path / "new" / "rollout.json"
    report = bench.rollout_report.Report(path, HEAD, append=False)
    report.add("rows", row(prefill_s=1.0))
    report.add("rows", row(batch=8, prefill_s=2.0))
    report.add("rows", row(prefill_s=3.0))
    found = json.loads(path.read_text())["rows"]
    assert [(entry["batch"], entry["prefill_s"]) for entry in found] == [(1, 3.0), (8, 2.0)]


def test_append_keeps_the_rows_and_remembers_the_runs(tmp_path):
    path = tmp_path / "rollout.json"
    report = bench.rollout_report.Report(path, HEAD, append=False)
    report.add("rows", row(prefill_s=1.0))
    report.add("skipped", {"reason": "no time"} | row(batch=8))
    report.add("failures", {"arm": "fp8_lora_stock", "model": "7B", "rank": 32, "error": "no kernel"})
    again = bench.rollout_report.Report(path, HEAD | {"commit": "def"}, append=True)
    again.add("rows", row(batch=8, prefill_s=2.0))
    again.add("engines", {"arm": "fp8_lora_stock", "model": "7B", "rank": 32, "startup_s": 1})
    found = json.loads(path.read_text())
    assert [entry["batch"] for entry in found["rows"]] == [1, 8]
    assert found["commit"] == "def"
    assert [run["commit"] for run in found["runs"]] == ["abc", "def"]
    assert found["skipped"] == found["failures"] == []
    bench.rollout_report.Report(path, HEAD, append=False).add("rows", row(batch=64))
    assert [entry["batch"] for entry in json.loads(path.read_text())["rows"]] == [64]


def test_rows_of_another_gpu_are_not_appended(tmp_path):
    path = tmp_path / "rollout.json"
    bench.rollout_report.Report(path, HEAD, append=False).add("rows", row())
    with pytest.raises(ValueError, match="another GPU"):
        bench.rollout_report.Report(path, HEAD | {"gpu": "H100"}, append=True)


def test_rows_of_another_number_of_gpus_are_not_appended(tmp_path):
    path = tmp_path / "rollout.json"
    bench.rollout_report.Report(path, HEAD, append=False).add("rows", row())
    with pytest.raises(ValueError, match="models on 1 GPUs: --tensor-parallel 2"):
        bench.rollout_report.Report(path, HEAD | {"options": {"tensor_parallel": 2}}, append=True)


def test_a_table_has_batches_as_columns_and_ratios_to_stock_bf16():
    rows = [
        row("nvfp4_lora_ours", 8, decode_ms_per_step=4.0, prefill_s=0.21),
        row("nvfp4_lora_ours", 1, decode_ms_per_step=3.0, prefill_s=0.2),
        row("bf16_lora_stock", 8, decode_ms_per_step=6.0, prefill_s=0.2),
        row("bf16_lora_ours", 256, decode_ms_per_step=12.0),
        row("nvfp4_lora_ours", 1024, context="realistic", tokens_per_s=30000.0),
        row("bf16_lora_stock", 1024, context="realistic", tokens_per_s=15000.0),
    ]
    decode, prefill, whole = bench.rollout_report.tables({"rows": rows}).split("\n\n7B")
    assert decode.splitlines()[2:] == [
        "| arm, batch | 1 | 8 | 256 |",
        "|---|---|---|---|",
        "| bf16_lora_stock | - | 6.00 | - |",
        "| bf16_lora_ours | - | - | 12.00 |",
        "| nvfp4_lora_ours | 3.00 | 4.00 (1.50) | - |",
    ]
    assert "| nvfp4_lora_ours | 0.200 | 0.210 (1.05) |" in prefill
    assert "| nvfp4_lora_ours | 30000 (2.00) |" in whole


def test_arms_that_are_measured_no_more_come_last():
    rows = [row(arm, 8, decode_ms_per_step=2.0) for arm in ("an_old_name", "nvfp4", "bf16_lora_stock")]
    lines = bench.rollout_report.tables({"rows": rows}).splitlines()[4:]
    assert [line.split()[1] for line in lines] == ["bf16_lora_stock", "nvfp4", "an_old_name"]


def test_a_table_says_how_many_gpus_share_the_model():
    text = bench.rollout_report.tables({"rows": [row(decode_ms_per_step=1.0)], "options": {"tensor_parallel": 4}})
    assert text.startswith("7B on 4 GPUs, rank 32, prompt ")


def test_small_models_come_first():
    rows = [row(decode_ms_per_step=1.0) | {"model": model} for model in ("32B", "7B", "14B")]
    text = bench.rollout_report.tables({"rows": rows})
    assert [line.split(",")[0] for line in text.splitlines() if "decode" in line] == ["7B", "14B", "32B"]


def test_the_seconds_of_a_row_are_those_measured_within_a_third():
    found = json.loads((FOLDER / "results" / "h200" / "rollout_7b_a966dd7.json").read_text())["rows"]
    shape = bench.rollout_arms.SHAPES["7B"]
    rows = [entry for entry in found if entry["arm"] == "bf16_lora_stock" and entry["context"] != "realistic"]
    assert len(rows) == 5
    for entry in rows:
        assert load.step_seconds(shape, entry["batch"]) * 1e3 == pytest.approx(entry["decode_ms_per_step"], rel=1 / 3)
        if entry["batch"] > 1:  # one prompt is bound by latency
            tokens = entry["batch"] * entry["prompt"]
            assert load.prefill_seconds(shape, tokens) == pytest.approx(entry["prefill_s"], rel=1 / 3)


def test_a_plan_takes_what_the_file_lacks(tmp_path, capsys):
    out = tmp_path / "rollout.json"
    args = bench.parse(["--out", str(out), "--plan", "100000"])
    report = bench.rollout_report.Report(out, HEAD, append=False)
    whole = [(job["arm"], job["model"], job["rank"]) for job in bench.planned(args, report)]
    assert whole[:2] == [("nvfp4_lora_ours", "7B", 32), ("bf16_lora_stock", "7B", 32)]
    assert {arm for arm, model, _ in whole if model == "32B"} >= {"nvfp4_lora_ours", "bf16_lora_stock"}
    for job in bench.planned(args, report):  # as if everything but one row had been measured
        for prompt, batch in job["fixed"]:
            if (job["arm"], job["model"], job["rank"], batch) != ("bf16_lora_stock", "7B", 32, 64):
                key = {name: job[name] for name in ("arm", "model", "rank")} | {"batch": batch, "prompt": prompt}
                report.measured("rows", row(**key) | {"context": prompt + job["new_tokens"]})
        for batch in job["profile"]:
            report.measured("profiles", row(job["arm"], batch, model=job["model"], context="profile"))
        if job["realistic"]:
            report.measured("rows", row(job["arm"], 1024, model=job["model"], context="realistic"))
    (left,) = bench.planned(args, report)
    assert (left["arm"], left["fixed"], left["realistic"], left["profile"]) == (
        "bf16_lora_stock",
        [(256, 64)],
        None,
        [],
    )
    report.data["commit"] = "another"  # ours are measured again, vLLM's own are not
    again = {job["arm"] for job in bench.planned(args, report)}
    assert again == {"bf16_lora_stock", "bf16_lora_ours", "nvfp4_lora_ours"}
    capsys.readouterr()
    assert not list(bench.planned(bench.parse(["--out", str(out), "--plan", "1"]), report))
    assert "no time for nvfp4_lora_ours 7B rank 32" in capsys.readouterr().out
    assert bench.main(["--out", str(tmp_path / "none.json"), "--plan", "0"]) == 0
    assert len(re.findall(r"rank \d+: about \d+ \+ \d+ s", capsys.readouterr().out)) == len(whole)


def test_a_step_is_taken_apart_by_groups_of_kernels():
    kernels = {
        "w4a16_matmul": 700.0,
        "marlin::Marlin<1, 2>": 50.0,
        "triton_red_fused_fused_add_rms_norm_lora_linear_tiled_2": 30.0,
        "low_rank": 20.0,
        "nvjet_sm90_tst": 100.0,
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90>": 40.0,
        "unheard of": 5.0,
    }
    profile = {"wall_us": 1000.0, "kernels_us": 945.0, "us_per_step": kernels, "context_tokens": 300}
    found = bench.rollout_profile.grouped(profile)
    assert found == {
        "quantized linears": 750.0,
        "norms, activations": 30.0,
        "LoRA": 20.0,
        "cuBLAS": 100.0,
        "attention": 40.0,
        "other": 5.0,
        "gaps": 55.0,
    }
    ours = row("nvfp4_lora_ours", 1, context="profile") | profile
    # 3.67 GB of packed linears and 1.09 of lm_head at 4.25 TB/s
    bounds = bench.rollout_profile.least(ours)
    assert bounds["quantized linears"] == pytest.approx(864, rel=0.01)
    assert bounds["cuBLAS"] == pytest.approx(256, rel=0.01)
    assert bounds["attention"] == pytest.approx(300 * 56 * 1024 / 4.25e6, rel=0.01)
    stock = bench.rollout_profile.least(row("bf16_lora_stock", 256, context="profile") | profile)
    # cuBLAS has all linears: 6.5e9 products by 256 tokens at 790 TFLOP/s, more than the time of 13 GB
    assert stock["cuBLAS"] == pytest.approx(4229 + 353, rel=0.01)
    text = bench.tables({"rows": [], "profiles": [ours]})
    assert "| quantized linears | 750 (864) |" in text
    assert "| step | 1000 (" in text
