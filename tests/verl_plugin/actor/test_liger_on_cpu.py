"""What `model.use_liger` needs, by verl's check of a run; the engine asks Liger in test_engine_on_cpu.py."""

import importlib.metadata
import json

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from qerl_testing import random_qwen3_moe

from verl_qerl.verl_plugin.actor import liger
from verl_qerl.verl_plugin.actor.liger import apply_liger, uses_liger

MODEL = "actor_rollout_ref.model"
LIGER = ("+rollout=nvfp4", f"{MODEL}.use_liger=True")
ADAPTER = f"{MODEL}.lora_rank=8"


@pytest.fixture
def installed(monkeypatch):
    """Which release of Liger is said to be installed."""

    def say(release: str | None) -> None:
        monkeypatch.setattr(liger, "liger_version", lambda: release)

    return say


def path_to(folder, model_type: str) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": ["A"], "model_type": model_type}))
    return f"{MODEL}.path={folder}"


def test_without_the_package(validate, installed, tmp_path):
    installed(None)
    path = path_to(tmp_path, "qwen2")
    with pytest.raises(ValueError, match=r"^model\.use_liger=True needs the package liger-kernel, .*pip install liger"):
        validate(*LIGER, ADAPTER, path)
    validate(f"{MODEL}.use_liger=True", path)  # of a stock run: verl's own matter
    installed(liger.LIGER)
    validate(*LIGER, ADAPTER, path)


def test_on_the_cpu(validate, installed, tmp_path):
    installed(liger.LIGER)
    with pytest.raises(ValueError, match=r"^model\.use_liger=True with trainer\.device=cpu: .* on a GPU alone\."):
        validate(*LIGER, ADAPTER, path_to(tmp_path, "qwen2"), "trainer.device=cpu")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "phi3", "gemma2"])
def test_families_that_it_does_not_fit(validate, installed, tmp_path, model_type):
    installed(liger.LIGER)
    with pytest.raises(ValueError, match=rf"base of model type {model_type}\. Accepted are llama, mistral,"):
        validate(*LIGER, ADAPTER, path_to(tmp_path, model_type))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_families_that_it_fits(validate, installed, tmp_path, model_type):
    installed(liger.LIGER)
    validate(*LIGER, ADAPTER, path_to(tmp_path, model_type))


def test_a_run_that_says_nothing_has_them_where_they_can_be(validate, configuration, installed, tmp_path, monkeypatch):
    assert OmegaConf.select(configuration(LIGER[0], ADAPTER), f"{MODEL}.use_liger") is None
    for release in (None, liger.LIGER):
        installed(release)
        validate(LIGER[0], ADAPTER, path_to(tmp_path, "gemma2"))
    assert uses_liger(True, "gemma2")  # `apply_liger` refuses it
    monkeypatch.setattr(liger, "get_device_name", lambda: "cpu")
    assert not uses_liger(None, "qwen2")
    monkeypatch.setattr(liger, "get_device_name", lambda: "cuda")
    assert [uses_liger(asked, "qwen2") for asked in (None, False)] == [True, False]
    assert not uses_liger(None, "gemma2")
    for release in (None, "0.9.0"):
        installed(release)
        assert not uses_liger(None, "qwen2")


def test_the_release_is_the_one_that_is_installed_with_us():
    (pin,) = (pin for pin in importlib.metadata.requires("verl-qerl") if pin.startswith("liger-kernel"))
    assert Requirement(pin).specifier == SpecifierSet(f"=={liger.LIGER}")


def test_the_worker_refuses_what_the_driver_could_not_read():
    with pytest.raises(ValueError, match=r"packed base of model type qwen3_moe\."):
        apply_liger(random_qwen3_moe())
