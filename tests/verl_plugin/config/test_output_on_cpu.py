"""Folders that cannot hold checkpoints, and loggers without a package, are refused before Ray starts."""

import os

import pytest

pytest.importorskip("verl")

from verl_qerl.verl_plugin.config import output

OURS = ("+aqn.enabled=true", "trainer.save_freq=5")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_folder_that_cannot_be_made_is_refused(validate, file, below):
    named = f"trainer.default_local_dir={file}{below}"
    with pytest.raises(ValueError, match=rf"^{named} cannot hold checkpoints: .* write below {file}\. A directory"):
        validate(*OURS, named)
    validate(OURS[1], named)
    validate(OURS[0], named, "trainer.save_freq=-1")
    validate(*OURS, named, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")


def test_a_link_to_nothing_is_refused(validate, file):
    (file.parent / "link").symlink_to(file.parent / "gone")
    with pytest.raises(ValueError, match=rf"cannot write below {file.parent / 'link'}\. "):
        validate(*OURS, f"trainer.default_local_dir={file.parent}/link")


@pytest.mark.parametrize("name", ["save_freq", "default_local_dir"])
def test_null_is_refused(validate, file, name):
    with pytest.raises(ValueError, match=rf"^trainer\.{name}=null ends verl's run\. "):
        validate(*OURS, f"trainer.{name}=null")


def test_a_folder_of_others_is_refused(validate, file, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, *_: path != file.parent)  # root may write everywhere
    with pytest.raises(ValueError, match=rf"cannot write below {file.parent}\. "):
        validate(*OURS, f"trainer.default_local_dir={file.parent}/new/run")


def test_a_folder_that_verl_makes_stays_to_be_made(validate, file):
    validate(*OURS, f"trainer.default_local_dir={file.parent}/new/run")
    assert not (file.parent / "new").exists()


@pytest.mark.parametrize(("name", "package"), [("swanlab", "swanlab"), ("vemlp_wandb", "volcengine_ml_platform")])
def test_a_logger_whose_package_is_missing_is_refused(validate, file, monkeypatch, name, package):
    monkeypatch.setattr(output, "find_spec", lambda asked: None if asked == package else asked)
    named = f"trainer.logger=[console,{name}]"
    with pytest.raises(
        ValueError, match=rf"^trainer\.logger=\['console', '{name}'\] needs the package {package}, which"
    ):
        validate(OURS[0], "trainer.save_freq=-1", named)
    with pytest.raises(ValueError, match=rf"^trainer\.logger={name} needs the package {package}, which"):
        validate(OURS[0], f"trainer.logger={name}")
    validate(named)
    validate(OURS[0], named, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    validate(OURS[0], "trainer.logger=[console,file,wandb]")
