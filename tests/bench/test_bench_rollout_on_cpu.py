"""The rollout benchmark: its engines, and whole runs of a tiny model."""

import json
import subprocess
import sys
import time
from pathlib import Path

import bench_rollout as bench
import pytest
import rollout_engine as engine


def test_shapes_have_the_sizes_of_the_models():
    shapes = bench.rollout_arms.SHAPES
    assert shapes["7B"].kv_bytes == 56 * 1024
    assert shapes["32B"].kv_bytes == 256 * 1024
    # bf16 linears, embedding and lm_head: 13.05 + 2 * 1.09 GB
    assert shapes["7B"].weight_bytes(2.0) == pytest.approx(15.2e9, rel=0.01)


def test_an_arm_without_an_adapter_runs_once():
    arguments = ["--out", "x", "--arms", "bf16", "bf16_lora_ours", "--ranks", "16", "32", "--batches", "8", "4"]
    arguments += ["--prompts", "256"]
    found = [(job["arm"], job["rank"], job["largest"], job["fixed"]) for job in bench.jobs(bench.parse(arguments))]
    fixed = [(256, 4), (256, 8)]
    assert found == [("bf16", 0, 8, fixed), ("bf16_lora_ours", 16, 8, fixed), ("bf16_lora_ours", 32, 8, fixed)]


def test_variants_are_measured_when_they_are_named():
    assert set(bench.rollout_arms.VARIANTS).isdisjoint(bench.parse(["--out", "x"]).arms)
    assert bench.parse(["--out", "x", "--arms", "nvfp4_lora_ours_fa2"]).arms == ["nvfp4_lora_ours_fa2"]


def test_larger_graphs_are_of_ours_unless_an_arm_says_otherwise():
    arms = bench.rollout_arms.ARMS
    found = {name: arms[name].has_larger_graphs for name in ("bf16_lora_stock", "bf16_lora_ours", "nvfp4_lora_ours")}
    assert found == {"bf16_lora_stock": False, "bf16_lora_ours": True, "nvfp4_lora_ours": True}
    assert arms["bf16_lora_stock_graphs"].has_larger_graphs
    assert not arms["nvfp4_lora_ours_512"].has_larger_graphs


def test_a_realistic_rollout_alone_runs_as_many_sequences_as_the_batches():
    alone = ["--out", "x", "--arms", "bf16", "--no-fixed", "--batches", "64", "--profile", "2"]
    assert [job["largest"] for job in bench.jobs(bench.parse(alone))] == [2]
    (job,) = bench.jobs(bench.parse([*alone, "--realistic"]))
    assert (job["largest"], job["fixed"]) == (64, [])
    assert job["realistic"] == {"prompts": 128, "samples": 8, "prompt": 256}


def test_the_error_is_the_last_exception_of_the_log():
    log = "KeyError: 'a'\n\nDuring handling\n[rank0]: torch.OutOfMemoryError: CUDA out of memory.\nfurther noise\n"
    assert bench.error_sentence(log, 1) == "torch.OutOfMemoryError: CUDA out of memory."
    of_cpp = "Exception raised from currentStreamCaptureStatusMayInitCtx at CUDAGraphsC10Utils.h:71:\n"
    assert bench.error_sentence(log + of_cpp, 1) == "torch.OutOfMemoryError: CUDA out of memory."
    assert bench.error_sentence("  waits()\nKeyboardInterrupt\n", 1) == "KeyboardInterrupt"
    assert (
        bench.error_sentence("loading\nSegmentation fault\n\n", -11) == "exit code -11, last line 'Segmentation fault'"
    )


def test_an_engine_that_takes_too_long_is_killed_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "GRACE_S", 0)
    child = tmp_path / "child"
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(worker.pid))\n"
        "time.sleep(60)"
    )

    def spawn(job: Path, log) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, str(slow)], start_new_session=True)
        while not (child.exists() and child.read_text()):  # its time counts from here on
            time.sleep(0.05)
        return process

    monkeypatch.setattr(bench.rollout_process, "spawn", spawn)
    job = {"arm": "bf16", "model": "tiny", "rank": 0, "seconds": 2}
    report = bench.rollout_report.Report(tmp_path / "out.json", bench.result_file.header({}), append=False)
    began = time.monotonic()
    with bench.rollout_process.Starter(tmp_path / "work") as starter:
        assert "killed 2 s after its start" in bench.run(job, starter, report)
    assert time.monotonic() - began < 30
    end = time.monotonic() + 60
    status = Path("/proc") / child.read_text() / "status"
    while status.exists() and "zombie" not in status.read_text() and time.monotonic() < end:
        time.sleep(0.1)
    assert not status.exists() or "zombie" in status.read_text()


def test_what_has_no_room_or_no_time_is_skipped_and_says_why(tmp_path):
    one = object.__new__(engine.Engine)  # starting one takes ten seconds and changes none of this
    events = tmp_path / "events"
    one._job = {"arm": "bf16", "model": "tiny", "rank": 0, "seconds": 60, "events": str(events)}
    one._capacity, one._deadline = 1000, time.monotonic() + 60
    assert not one._refuses(8, 256, 512, 1000, 50)
    assert not events.exists()
    assert one._refuses(8, 256, 512, 1001, 50)
    assert one._refuses(8, 256, 512, 1000, 70)
    room, late = (json.loads(line) for line in events.read_text().splitlines())
    assert (room["event"], room["arm"], room["batch"]) == ("skipped", "bf16", 8)
    assert "there is room for 1000" in room["reason"]
    assert "takes about 70 s" in late["reason"]


def test_dummy_nvfp4_weights_are_valid_ones_of_our_format():
    pytest.importorskip("vllm")
    import torch
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    bench.rollout_arms.register_dummy_nvfp4()
    loader = get_model_loader(LoadConfig(load_format=bench.rollout_arms.DUMMY_NVFP4))
    layer = torch.nn.Linear(64, 32, bias=False)
    with pytest.raises(ValueError, match="weight_packed"):
        loader.load_weights(layer, None)
    for name, tensor in {
        "weight_packed": torch.zeros(32, 32, dtype=torch.uint8),
        "weight_scale": torch.zeros(32, 4, dtype=torch.float8_e4m3fn),
        "weight_global_scale": torch.zeros(2),
    }.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    loader.load_weights(layer, None)
    scales = layer.weight_scale.float()
    assert scales.isfinite().all()
    assert scales.min() >= 2.0**-6
    assert scales.unique().numel() > 16
    assert layer.weight_packed.unique().numel() > 128
    assert (layer.weight_global_scale == 2.0**20).all()


def test_two_arms_of_a_tiny_model_from_the_command_to_the_table(tmp_path, capsys):
    pytest.importorskip("vllm")
    out = tmp_path / "rollout.json"
    arguments = ["--out", str(out), "--work", str(tmp_path / "work"), "--models", "tiny", "--ranks", "8", "--eager"]
    arguments += ["--arms", "bf16_lora_stock", "nvfp4_lora_stock_sampler", "nvfp4_lora_stock", "--batches", "1", "3"]
    arguments += ["--log-probs"]
    arguments += ["--prompts", "160", "--new-tokens", "6", "--repeats", "1", "--realistic", "1", "2", "--profile", "2"]
    assert bench.main(arguments) == 1  # Marlin needs a GPU
    found = json.loads(out.read_text())
    assert [(one["arm"], one["rank"]) for one in found["failures"]] == [("nvfp4_lora_stock", 8)]
    assert "MarlinNvFp4LinearKernel is not supported" in found["failures"][0]["error"]
    assert [(entry["arm"], entry["batch"], entry["context"]) for entry in found["rows"]] == [
        (arm, batch, context)
        for arm in ("bf16_lora_stock", "nvfp4_lora_stock_sampler")
        for batch, context in ((1, 166), (3, 166), (2, "realistic"))
    ]
    keys = {"arm", "model", "batch", "rank", "prompt", "context"}
    measured = {"decode_ms_per_step", "prefill_s", "tokens_per_s", "peak_gib", "cached_prompt_tokens"}
    assert set(found["rows"][0]) == keys | measured
    for entry in found["rows"]:
        assert entry["tokens_per_s"] > 0
        assert entry["peak_gib"] is None
        # The second answer to a prompt finds its one whole block of 128 tokens; nothing is left of another measurement.
        assert entry["cached_prompt_tokens"] == (128 if entry["context"] == "realistic" else 0)
        assert (entry["decode_ms_per_step"] is None) == (entry["context"] == "realistic")
    assert found["engines"][1]["quantization"] == "verl_qerl_nvfp4"
    assert "ReferenceKernel" in found["engines"][1]["modules"]["model.layers.0.mlp.down_proj"]
    assert [engine["modules"]["worker"] for engine in found["engines"]] == ["stock", "ours"]
    assert [engine["modules"]["sampler"] for engine in found["engines"]] == ["Sampler", "Sampler"]
    profile, _ = found["profiles"]
    assert profile["batch"] == 2
    assert profile["us_per_step"]["_C::cpu_attention_with_kv_cache"] > 0
    assert profile["kernels_us"] <= sum(profile["us_per_step"].values()) * 1.01
    assert 160 + 16 < profile["context_tokens"] < 160 + 128
    (name, (own, whole)), *others = profile["host_us_per_step"].items()
    assert name.endswith(":_steps")  # of the benchmark: all the others are what it calls
    assert 0 < own < whole
    assert others
    assert all(part <= whole for _, (_, part) in others)
    assert "| nvfp4_lora_stock_sampler |" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_starts")
def test_an_engine_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("vllm")
    out = tmp_path / "rollout.json"
    arguments = ["--out", str(out), "--work", str(tmp_path / "work"), "--models", "tiny", "--ranks", "8", "--eager"]
    arguments += ["--arms", "nvfp4_lora_stock_sampler", "--batches", "2"]
    arguments += ["--prompts", "160", "--new-tokens", "6"]
    assert bench.main([*arguments, "--repeats", "2", "--realistic", "1", "2", "--own-process", "--functions"]) == 0
    found = json.loads(out.read_text())
    assert [row["context"] for row in found["rows"]] == [166, "realistic"]
    assert [len(entry["rounds_s"]) for entry in found["steps"]] == [2]
    assert all(entry["functions"] for entry in found["steps"])
    assert [engine["modules"]["worker"] for engine in found["engines"]] == ["ours"]
    assert found["options"]["own_process"] is True
    assert "ReferenceKernel" in found["engines"][0]["modules"]["model.layers.0.mlp.down_proj"]
    with pytest.raises(SystemExit):
        bench.parse([*arguments, "--own-process", "--profile", "1"])
