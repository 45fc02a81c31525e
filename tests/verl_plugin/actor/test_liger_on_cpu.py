"""What `model.use_liger` needs, by verl's check of a run; the engine asks Liger in test_engine_on_cpu.py."""

import importlib.util
import json

import pytest

pytest.importorskip("verl")

from qerl_testing import random_qwen3_moe

from verl_qerl.verl_plugin.actor.liger import apply_liger

MODEL = "actor_rollout_ref.model"
LIGER = ("+rollout=nvfp4", f"{MODEL}.use_liger=True")
ADAPTER = f"{MODEL}.lora_rank=8"


@pytest.fixture
def installed(monkeypatch):
    """Whether Liger is said to be installed."""

    def say(yes: bool) -> None:
        find = importlib.util.find_spec
        found = object() if yes else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *args: found if name == "liger_kernel" else find(name, *args)
        )

    return say


def path_to(folder, model_type: str) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": ["A"], "model_type": model_type}))
    return f"{MODEL}.path={folder}"


def test_without_the_package(validate, installed, tmp_path):
    installed(False)
    path = path_to(tmp_path, "qwen2")
    with pytest.raises(ValueError, match=r"^model\.use_liger=True needs the package liger-kernel, .*pip install liger"):
        validate(*LIGER, ADAPTER, path)
    validate(f"{MODEL}.use_liger=True", path)  # of a stock run: verl's own matter
    installed(True)
    validate(*LIGER, ADAPTER, path)


def test_on_the_cpu(validate, installed, tmp_path):
    installed(True)
    with pytest.raises(ValueError, match=r"^model\.use_liger=True with trainer\.device=cpu: .* on a GPU alone\."):
        validate(*LIGER, ADAPTER, path_to(tmp_path, "qwen2"), "trainer.device=cpu")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "phi3", "gemma2"])
def test_families_that_it_does_not_fit(validate, installed, tmp_path, model_type):
    installed(True)
    with pytest.raises(ValueError, match=rf"base of model type {model_type}\. Accepted are llama, mistral,"):
        validate(*LIGER, ADAPTER, path_to(tmp_path, model_type))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_families_that_it_fits(validate, installed, tmp_path, model_type):
    installed(True)
    validate(*LIGER, ADAPTER, path_to(tmp_path, model_type))


def test_the_worker_refuses_what_the_driver_could_not_read():
    with pytest.raises(ValueError, match=r"packed base of model type qwen3_moe\."):
        apply_liger(random_qwen3_moe())
