"""Every arm of recipes/study composes with verl's configuration, and is what its name says."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from qerl_testing import verl_config
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_module

from verl_qerl.verl_plugin.config.apply import aqn_options, prepare
from verl_qerl.verl_plugin.trainer.polling import POLL_S

FULL = {"bf16_full", "int8", "int8_acr", "fp8", "fp8_acr", "nvfp4_full_acr", "nvfp4_full_tis"}
ARMS = ["bf16", "bf16_merge", "nvfp4", "nvfp4_gptq", "nvfp4_aqn", "nvfp4_noise"]
ARMS += ["int8_lora", "fp8_lora", "bf16_of_nvfp4", "bf16_noise", "bf16_aqn", "bf16_hot", *sorted(FULL)]


@pytest.fixture
def composed(study, tmp_path):
    """Arm and further arguments -> the configuration that verl would get."""
    runner = study("run")
    bases = ("calibrated", "dequantized")
    for folder in ("model", *bases, "data/gsm8k", "data/math"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for folder in bases:
        (tmp_path / folder / "quantization_report.json").write_text('{"model_digest": "0", "method": "gptq"}')
        (tmp_path / folder / "config.json").write_text("{}")

    def configuration(arm, *more):
        places = ["--model", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "out"]
        if base := study("arms").BASES.get(arm):
            places += [f"--{base}", tmp_path / base]
        earlier = ["--earlier", tmp_path / "out"]
        args = runner.parse([*map(str, places + earlier), "--arms", arm, "--seeds", "7", *more])
        (job,) = runner.to_run(args)
        command = runner.command_of(args)(job, tmp_path / "work")
        assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
        return verl_config(*command[3:])

    return configuration


def test_all_arms_are_checked_here(study):
    assert sorted(ARMS) == sorted(study("arms").ARMS)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_composes_and_is_what_its_name_says(composed, study, arm):
    config = composed(arm)
    prepare(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert config.reward.custom_reward_function.path.endswith("recipes/study/reward.py")
    assert config.reward.custom_reward_function.name == "compute_score"
    model = Path(config.actor_rollout_ref.model.path).name
    assert model == study("arms").BASES.get(arm, "model")
    form = arm.partition("_")[0]
    qerl = getattr(actor.fsdp_config, "qerl", None)
    assert (qerl.format if qerl else "bf16") == form
    assert config.actor_rollout_ref.model.lora_rank == (0 if arm in FULL else 32)
    assert actor.optim.lr == (1e-6 if arm in FULL else 4e-5)
    assert (actor.policy_loss.loss_mode == "acr") == arm.endswith("_acr")
    assert (config.algorithm.rollout_correction.rollout_is == "token") == arm.endswith("_tis")
    assert config.actor_rollout_ref.model.lora.merge == (arm.startswith("bf16_") and arm not in FULL)
    assert (config.actor_rollout_ref.rollout.temperature != 1.0) == (arm == "bf16_hot")
    assert config.get("aqn", {}).get("enabled", False) == arm.endswith(("_aqn", "_noise"))
    # Same questions in the same order, as many updates, for every arm.
    steps = config.trainer.total_training_steps
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, steps) == (32, 16, 60)
    sampler = config.trainer.v1.sampler.custom_sampler
    if qerl is None and "aqn" not in config:  # stock verl looks for answers as often as the others
        looks = getattr(load_module(sampler.path), sampler.name)("sync", config.trainer.v1.sync, None, "drop", {})
        assert looks.poll_interval == POLL_S
    else:
        assert sampler.path is None
    assert {config.data.seed, config.actor_rollout_ref.rollout.seed, actor.data_loader_seed} == {7}
    assert config.actor_rollout_ref.rollout.calculate_log_probs


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.endswith(("_aqn", "_noise"))])
def test_the_noise_is_known_and_has_the_seed(composed, arm):
    assert aqn_options(composed(arm)).seed == 7


@pytest.mark.parametrize(("task", "longest"), [("gsm8k", (256, 512)), ("math", (512, 1024))])
def test_the_task(composed, tmp_path, task, longest):
    config = composed("nvfp4", "--tasks", task)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.data.max_prompt_length, config.data.max_response_length) == longest
    assert rollout.max_model_len == sum(longest)
    assert config.data.train_files == str(tmp_path / "data" / task / "train.parquet")
    assert (config.actor_rollout_ref.model.use_remove_padding, actor.use_dynamic_bsz) == (True, True)
    assert rollout.log_prob_use_dynamic_bsz


@pytest.mark.parametrize(
    ("kind", "files", "every", "before", "drawn"),
    [
        ("end", 4 * ["test"], 60, False, (True, 1.0, 1)),
        ("often", ["val"], 20, True, (False, 0, 1)),
        ("none", ["val"], -1, False, (False, 0, 1)),
    ],
)
def test_validation(composed, tmp_path, kind, files, every, before, drawn):
    config = composed("nvfp4", "--validate", kind)
    assert config.data.val_files == [str(tmp_path / f"data/gsm8k/{file}.parquet") for file in files]
    assert (config.trainer.test_freq, config.trainer.val_before_train) == (every, before)
    asked = config.actor_rollout_ref.rollout.val_kwargs
    assert (asked.do_sample, asked.temperature, asked.n) == drawn


def test_runs_on_part_of_a_gpu_and_on_several(composed):
    part, several = ["--per-gpu", "2"], ["--gpus-per-run", "4"]
    alone, pair, wide, both = (composed("nvfp4", *more) for more in ([], part, several, part + several))
    for config, share in ((alone, 0.35), (pair, 0.175), (wide, 0.35), (both, 0.175)):
        rollout = config.actor_rollout_ref.rollout
        assert rollout.gpu_memory_utilization == share
        assert rollout.engine_kwargs.vllm.kv_cache_memory_bytes >= 32 * 8 * 768 * 28 * 1024
    assert [config.trainer.n_gpus_per_node for config in (alone, pair, wide, both)] == [1, 1, 4, 4]


def test_the_users_overrides_win(composed):
    override = "actor_rollout_ref.actor.optim.lr=1e-5"
    assert composed("nvfp4", "--tag", "lr1e-5", "--", override).actor_rollout_ref.actor.optim.lr == 1e-5
