"""A run with use_shm reads what its directory holds, or is refused; with verl's own copies in /dev/shm."""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.utils.fs import copy_to_local

from verl_qerl.verl_plugin.config.shared_memory import check_copies

ACTOR = "actor_rollout_ref.model"
NODES = [(ACTOR, "path"), (ACTOR, "lora_adapter_path"), ("critic.model", "path")]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts" / "weights").write_text("old")
    yield folder
    copy = Path(copy_to_local(str(folder), use_shm=True))
    shutil.rmtree(copy.parent)


def check(node, name, path, use_shm=True):
    check_copies(OmegaConf.from_dotlist([f"{node}.{name}={path}", f"{node}.use_shm={use_shm}"]))


@pytest.mark.parametrize(("node", "name"), NODES)
def test_a_copy_of_other_weights_of_the_same_size_is_refused(source, node, name, monkeypatch):
    check(node, name, source)  # no copy yet
    copied = Path(copy_to_local(str(source), use_shm=True))
    check(node, name, source)
    weights = source / "parts" / "weights"
    weights.write_text("new")
    os.utime(weights, (1, 1))
    assert (Path(copy_to_local(str(source), use_shm=True)) / "parts" / "weights").read_text() == "old"
    said = rf"^{node}\.{name}={source} has changed .* first weights, .*older copy\. .*: rm -r {copied.parent}$"
    with pytest.raises(ValueError, match=said):
        check(node, name, source)
    monkeypatch.chdir(source / "parts")
    with pytest.raises(ValueError, match="older copy"):
        check(node, name, "../../model")
    check(node, name, source, use_shm=False)
    shutil.rmtree(copied.parent)
    check(node, name, source)


def test_the_driver_looks(source, validate):
    copy_to_local(str(source), use_shm=True)
    os.utime(source / "config.json", (1, 1))
    run = ("+aqn.enabled=true", f"{ACTOR}.path={source}", f"{ACTOR}.use_shm=True", f"{ACTOR}.lora_rank=8")
    with pytest.raises(ValueError, match="has changed since it was copied"):
        validate(*run)


def test_verl_itself_copies_anew_what_has_another_size(source):
    copy_to_local(str(source), use_shm=True)
    (source / "config.json").write_text("{ }")
    check("critic.model", "path", source)
    assert (Path(copy_to_local(str(source), use_shm=True)) / "config.json").read_text() == "{ }"


def test_a_model_of_the_hub_is_left_to_verl():
    check("critic.model", "path", "Qwen/Qwen2.5-3B-Instruct")
