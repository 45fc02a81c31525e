"""What the driver does with a run's configuration before verl starts Ray."""

import dataclasses
import logging
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import ray
import torch
import verl.utils
import verl.utils.config
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from qerl_testing import RUN

from verl_qerl import verl_plugin
from verl_qerl.algos.uaq import write_record
from verl_qerl.checkpoints.record import BaseRecord
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin import driver

ROLLOUT = "actor_rollout_ref.rollout"
ACTIVE = "VERL_QERL_ACTIVE"
ACR = "actor_rollout_ref.actor.policy_loss.loss_mode=acr"
NOISE = "+aqn.enabled=true"


def test_verl_has_it_in_both_places():
    assert verl.utils.config.validate_config is verl.utils.validate_config
    assert verl.utils.config.validate_config.__wrapped__


def test_a_changed_verl_is_told(monkeypatch, caplog):
    shim = dataclasses.replace(driver.CONFIG_CHECK, patch="verl/9999")
    monkeypatch.setattr(driver, "CONFIG_CHECK", shim)
    with caplog.at_level(logging.WARNING, logger=driver.__name__):
        driver.install(verl.utils)
    (message,) = caplog.messages
    assert message.startswith(
        "verl_qerl takes part in no run that does not have VERL_QERL_ACTIVE=1 in the environment of all its processes:"
        " cannot replace verl.utils.config:"
    )


def test_a_verl_with_the_patch_is_wrapped_too(monkeypatch):
    tried = []
    monkeypatch.setattr(driver.upstream, "install", lambda shim: tried.append(shim) or len(tried) > 1)
    driver.install(verl.utils)
    assert [shim.fingerprint for shim in tried] == [driver.CONFIG_CHECK.fingerprint, driver.CONFIG_CHECK.patched]


@pytest.fixture
def env_vars(configuration, monkeypatch):
    """The environment that verl hands to its Ray workers, after the driver looked at a run with `options`."""
    calls = []
    monkeypatch.setattr(verl_plugin, "activate", lambda: calls.append("activate"))
    monkeypatch.setattr(driver, "check_run", lambda config, use_critic: calls.append("check"))
    monkeypatch.delenv(ACTIVE, raising=False)

    def look(*options: str) -> tuple[list[str], dict[str, str]]:
        calls.clear()
        config = configuration(*options)
        driver.look_at(config, use_critic=False)
        return list(calls), dict(config.ray_kwargs.ray_init.runtime_env.get("env_vars", {}))

    return look


def test_a_run_of_ours_is_told_to_its_workers_beside_what_the_user_tells_them(env_vars):
    assert env_vars(NOISE) == (["activate", "check"], {ACTIVE: "1"})
    variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
    assert env_vars(NOISE, f"{variables}.A=b")[1] == {"A": "b", ACTIVE: "1"}
    with pytest.raises(ValueError, match=rf"^{variables[1:]}=\[\] is no group of options\. Accepted is a dictionary"):
        env_vars(NOISE, f"{variables}=[]")
    assert ACTIVE not in os.environ  # a Ray that this process starts later, for another run, must not inherit it


@pytest.mark.parametrize("options", [(), ("+agn.enabled=true",), ("trainer.use_v1=False",), ("+platform=cpu",)])
def test_a_stock_run_is_neither_checked_nor_changed(env_vars, options):
    assert env_vars(*options, "actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.name=vllm") == ([], {})


@pytest.mark.parametrize(("environment", "own"), [({}, None), (None, None), ({ACTIVE: "1"}, None), ({}, "1")], ids=str)
def test_a_ray_that_runs_already_must_have_told_its_workers(env_vars, monkeypatch, environment, own):
    context = SimpleNamespace(runtime_env={} if environment is None else {"env_vars": environment})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    if own:
        monkeypatch.setenv(ACTIVE, own)
    if environment or own:
        assert env_vars(NOISE) == (["activate", "check"], {})
        return
    with pytest.raises(RuntimeError, match=r"Ray runs already: its workers would train without them\. Accepted"):
        env_vars(NOISE)
    assert env_vars() == ([], {})


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("own", [False, True])
def test_a_sweep_of_ours_and_of_stock_runs_has_a_ray_for_each(env_vars, monkeypatch, told, own):
    running: list[dict] = []
    monkeypatch.setattr(driver, "_verl_starts_ray", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(running))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=running[0]))
    monkeypatch.setattr(ray, "shutdown", running.clear)
    of_this_kind, other = ((NOISE,), ()) if told else ((), (NOISE,))
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose("ppo_trainer", ["hydra.mode=MULTIRUN"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", whole)
    if not own:  # else the program started Ray before the first job
        env_vars(*of_this_kind)
    running.append({"env_vars": {ACTIVE: "1"} if told else {}})
    env_vars(*of_this_kind)
    assert running
    if own and not told:
        with pytest.raises(RuntimeError, match="Ray runs already"):
            env_vars(*other)
    else:
        assert env_vars(*other)[1] == ({} if told else {ACTIVE: "1"})
    assert bool(running) == own


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ([ACR, f"{ROLLOUT}.calculate_log_probs=False"], "calculate_log_probs=False does not go together with"),
        (["+mine=noise"], "aqn.sigma=0.1"),  # a file of the user's: the command line names no option of ours
        (["+qerl.gate.mismatch_sample=0", "trainer.use_v1=False"], "trainer.use_v1=False does not go together with"),
    ],
)
def test_main_ppo_stops_before_ray(fresh_process, tmp_path, options, refused):
    ray_dir = tmp_path / "ray"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "noise.yaml").write_text("# @package _global_\naqn:\n  enabled: true\n  sigma: 0.1\n")
    folders = ("--config-dir", str(tmp_path), f"hydra.run.dir={tmp_path}")
    command = ("-m", "verl.trainer.main_ppo", *folders, *RUN, *options)
    found = fresh_process(*command, fails=True, RAY_TMPDIR=str(ray_dir))
    assert refused in found.stderr
    assert "Started a local Ray instance" not in found.stderr
    assert not ray_dir.exists()


@pytest.mark.parametrize("name", ["actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"])
def test_a_name_that_verl_would_miss_after_the_first_answers_is_told(validate, name):
    accepted = "vanilla, .*bypass_mode" if "loss" in name else "gae, grpo, .*"
    with pytest.raises(ValueError, match=rf"^{name}='arc' is no value of this option\. Accepted: {accepted}"):
        validate(NOISE, f"{name}=arc")
    with pytest.raises(ValueError, match=rf"^{name}=None is no value of this option"):
        validate(NOISE, f"{name}=null")
    validate(NOISE, f"{name}=arc", "actor_rollout_ref.model.external_lib=mine")
    validate(f"{name}=arc")


@pytest.mark.parametrize(
    ("mode", "path", "sentence"),
    [
        ("resume_path", "{run}/global_step_7", "the step to resume from is not there: .*/global_step_7"),
        ("resume_path", "{run}", "trainer.resume_from_path=.* names no step"),
        ("resume_path", "null", "trainer.resume_from_path=None names no step"),
        ("resume_path", "{run}/global_step_3", "the step to resume from has no actor: .*/global_step_3/actor"),
        ("resume_path", "{run}/global_step_5", "the checkpoint is half-written: .* has no whole data.pt"),
        ("auto", "null", "the checkpoint is half-written: .* has no whole data.pt"),
    ],
)
def test_a_step_that_cannot_be_resumed_is_told_before_ray_starts(validate, tmp_path, monkeypatch, mode, path, sentence):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "global_step_3").mkdir()
    torch.save({}, tmp_path / "global_step_3" / "data.pt")
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    options = [f"trainer.resume_mode={mode}", f"trainer.resume_from_path={path.format(run=tmp_path)}"]
    options.append(f"trainer.default_local_dir={tmp_path}")
    packed = "+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8"
    with pytest.raises(CheckpointFormatError, match=f"^{sentence}"):
        validate(*packed, *options)
    validate(*options)
    validate(NOISE, *options)
    validate(*packed, *options, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    validate(*packed, *options[1:], "trainer.resume_mode=disable")


@pytest.mark.parametrize(
    ("saved", "options"), [(2.0, ()), (None, ("+uaq.enabled=true",)), (1.5, ("+uaq.enabled=true",))]
)
def test_a_step_with_another_scale_of_uaq_is_told_before_ray_starts(validate, tmp_path, monkeypatch, saved, options):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    write_record(tmp_path / "global_step_5" / "actor", saved, "base")
    torch.save({}, tmp_path / "global_step_5" / "data.pt")
    run = "+rollout=int8", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5"
    if saved == 1.5:
        validate(*run, *options)
    else:
        with pytest.raises(CheckpointFormatError, match=r"^the weights of the checkpoint are .*, those of this run "):
            validate(*run, *options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("+rollout=nvfp4", "{model}.lora_rank=8"), None),
        (("+rollout=fp8", "{model}.lora_rank=8"), "a base in another format: nvfp4, now fp8, .* Use \\+rollout=nvfp4"),
        (("+rollout=nvfp4", "{model}.lora_rank=4"), "another adapter: r=8, now 4, "),
        (("+rollout=nvfp4", "{model}.lora_rank=8", "{model}.lora_alpha=32"), "another adapter: lora_alpha=16, now 32"),
        (("+rollout=nvfp4",), "an adapter: lora_rank=8, now 0, "),
    ],
)
def test_a_step_of_another_base_or_adapter_is_told_before_ray_starts(
    validate, tmp_path, monkeypatch, options, sentence
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    BaseRecord("base", "mse", (), {"q_proj": "1"}, adapter, files={"a": 1}).write(tmp_path / "global_step_5" / "actor")
    torch.save({}, tmp_path / "global_step_5" / "data.pt")
    run = [option.format(model="actor_rollout_ref.model") for option in options]
    run += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5"]
    if sentence is None:
        validate(*run)
    else:
        with pytest.raises(CheckpointFormatError, match=f"^the checkpoint is of {sentence}"):
            validate(*run)
