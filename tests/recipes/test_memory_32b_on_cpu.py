"""The arithmetic of recipes/qwen32b_80gb/README.md is that of `plan`, for the recipe's own settings."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir

from verl_qerl.planning.memory_plan import GIB, Settings, plan, rollout_weights
from verl_qerl.planning.model_shape import ModelShape

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "qwen32b_80gb"
README = (RECIPE / "README.md").read_text(encoding="utf-8")
MEASURED = json.loads((ROOT / "tests" / "bench" / "results" / "h200" / "train_step_32b_80gib.json").read_text())
SHAPE = ModelShape(hidden=5120, intermediate=27648, layers=64, vocabulary=152_064, query=5120, key_value=1024)
GPU = 79.2 * GIB  # of an H100 of 80 GB
KV_BYTES = 64 * 2 * 1024 * 2  # a token: k and v of all layers in bf16
CONTEXTS, BESIDE_CACHE = 6 * GIB, 4 * GIB  # two processes and vLLM beyond its share; its adapter slot and passes


def composed(recorder, twin):
    """The configuration of the recipe."""
    env = {"PATH": f"{recorder}:{os.environ['PATH']}", "HOME": "/h", "ROLLOUT": twin}
    script = RECIPE / "run_qwen2_5_32b_fsdp2.sh"
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True, timeout=900)
    *_, call = [part.strip("\n").split("\n") for part in done.stdout.split("== end\n") if part]
    with initialize_config_dir(config_dir=str(RECIPE), version_base=None):
        overrides = [*call[call.index("config") + 1 :], "hydra.searchpath=[pkg://verl.trainer.config]"]
        return compose("config", overrides=overrides)


def settings_of(config):
    model, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    return Settings(
        rank=model.lora_rank,
        gpus=config.trainer.n_gpus_per_node,
        tokens=actor.ppo_max_token_len_per_gpu,
        checkpointing=model.enable_gradient_checkpointing,
        whole_logits=not model.use_fused_kernels,
        utilization=rollout.gpu_memory_utilization,
        tensor_parallel=rollout.tensor_model_parallel_size,
    )


def cells(name):
    """Numbers of a row of the table, None for a cell without one."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {name}")]
    found = [re.search(r"\d+\.\d", cell) for cell in line.strip("| ").split("|")[1:]]
    return [float(match.group()) if match else None for match in found]


def test_the_table_is_that_of_plan(recorder):
    rollout, update = plan(SHAPE, settings_of(composed(recorder, "nvfp4")), GPU)
    names = ["packed base", "embedding and head", "adapters", "optimizer", "gradients", "checkpoints", "one layer"]
    for name in [*names, "logits", "contexts", "vLLM beyond its share"]:
        parts = [{**phase.held, **phase.estimated}.get(name) for phase in (rollout, update)]
        assert cells(name) == [part and round(part / GIB, 1) for part in parts], name
    asleep = update.estimated["vLLM asleep"]
    assert cells("vLLM, `") == [round(part / GIB, 1) for part in (rollout.held["vLLM"], asleep)]
    assert cells("**sum**") == [round(phase.total / GIB, 1) for phase in (rollout, update)]
    assert max(rollout.total, update.total) <= GPU


def test_the_control_run_on_four_gpus(recorder):
    config = composed(recorder, "bf16")
    weights = SHAPE.packed_weights + 2 * SHAPE.vocabulary * SHAPE.hidden
    adapter = 32 * SHAPE.adapted_features
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * GPU
    trainer = (4 * weights + 12 * adapter) / config.trainer.n_gpus_per_node
    total = share + trainer + CONTEXTS
    figures = [2 * weights, 4 * weights, share, trainer, total]
    one, two, three, four, five = (f"{figure / GIB:.1f}" for figure in figures)
    assert f"{one} of bf16 weights for vLLM and {two} of fp32 weights" in README
    assert f"{three} + {four} + 6.0 = {five} per GPU" in README
    assert total <= GPU
    assert share - 2 * weights / 4 - BESIDE_CACHE >= 16 * 3072 * KV_BYTES / 4


def test_the_cache_holds_a_group_of_answers_of_full_length(recorder):
    config = composed(recorder, "nvfp4")
    rollout, settings = config.actor_rollout_ref.rollout, settings_of(config)
    left = settings.utilization * GPU - rollout_weights(SHAPE, settings)
    assert f"{left / GIB:.1f} GiB are left" in README
    sequences = int((left - BESIDE_CACHE) / KV_BYTES / rollout.max_model_len)
    assert f"{sequences} sequences of full length" in README
    assert sequences >= rollout.n


def test_the_head_gives_log_probs_where_stock_verl_cannot(recorder):
    model = composed(recorder, "nvfp4").actor_rollout_ref.model
    assert model.use_fused_kernels
    assert model.fused_kernel_options.impl_backend == "torch"  # the one our engine accepts
    assert not composed(recorder, "bf16").actor_rollout_ref.model.use_fused_kernels


def test_the_measured_run_is_told_apart_from_the_recipe():
    options = dict(option.split("=", 1) for option in MEASURED["command"])
    utilization = float(options["actor_rollout_ref.rollout.gpu_memory_utilization"])
    tokens = int(options["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]) * (256 + 2048)
    rollout, update = plan(SHAPE, Settings(rank=32, tokens=tokens, utilization=utilization), 139.8 * GIB)
    read = [max(step["phases"][name]["peak_gib"] for step in MEASURED["steps"]) for name in ("gen", "update_actor")]
    assert f"`plan` says {rollout.total / GIB:.1f} and {update.total / GIB:.1f} GiB for that run" in README
    assert f"the driver read {read[0]:.1f} and {read[1]:.1f}" in README
    assert max(read) == pytest.approx(MEASURED["peak_gib"])
