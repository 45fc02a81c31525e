import importlib.util
import re

import pytest
from qerl_testing import RUN

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


@needs_verl
def test_our_warnings_are_heard_beside_vllms_server(fresh_process):
    """It imports a package that silences the root logger and its handlers."""
    script = """
import logging, verl, verl_qerl.verl_plugin.trainer.mismatch
ours = logging.getLogger("verl_qerl.verl_plugin.trainer.mismatch")
ours.warning("before")
logging.getLogger().setLevel(logging.ERROR)
for handler in logging.getLogger().handlers:
    handler.setLevel(logging.ERROR)
ours.warning("after")
ours.info("too much")
"""
    heard = fresh_process("-c", script).stderr
    assert (heard.count(":before"), heard.count(":after"), heard.count("too much")) == (1, 1, 0)


OTHER_VERSION = """
import importlib.metadata, sys
real = importlib.metadata.version
other = dict([sys.argv[1].split("=")])
importlib.metadata.version = lambda name: other.get(name) or real(name)
sys.argv = ["-m", *sys.argv[2:]]
import verl
from verl_qerl import verl_plugin
print(type(verl_plugin.FAILURE).__name__, verl_plugin.hooks._waiting)
"""


@needs_verl
def test_another_verl_is_a_warning_where_that_is_asked_for(fresh_process):
    arguments = ("-c", OTHER_VERSION, "verl=0.10.0", "+aqn.enabled=true")
    found = fresh_process(*arguments, VERL_QERL_UNTESTED_VERSIONS="1")
    assert found.stdout.splitlines()[-1].startswith("NoneType ")  # no failure: everything is registered
    assert "verl is 0.10.0." in found.stderr
    assert re.search(r"0 of the \d\d places of verl that verl_qerl changes or follows", found.stderr)


@needs_verl
@pytest.mark.parametrize(("name", "version", "accepted"), [("verl", "0.10.0", "==0.9.1"), ("ray", "2.53.0", ">=2.54")])
def test_another_verl_or_ray_stops_a_run_that_asks_for_qerl(fresh_process, name, version, accepted):
    found = fresh_process("-c", OTHER_VERSION, f"{name}={version}", "+aqn.enabled=true", fails=True)
    assert found.stderr.splitlines()[-1] == (
        f"verl_qerl cannot be used: {name} is {version}. verl_qerl works with {name}{accepted}. Install that release."
    )


@needs_verl
def test_another_verl_leaves_a_stock_run_alone_and_says_so(fresh_process):
    found = fresh_process("-c", OTHER_VERSION, "verl=0.10.0", "trainer.nnodes=1")
    assert found.stdout.splitlines()[-1] == "UpstreamDriftError {}"
    assert "verl_qerl is installed but not active: verl is 0.10.0" in found.stderr


@needs_verl
def test_options_in_a_file_are_refused_beside_another_verl(fresh_process):
    script = f"""{OTHER_VERSION}
from omegaconf import OmegaConf
from verl.utils.config import validate_config
for options in ({{"trainer": {{"device": "cpu"}}}}, {{"aqn": {{"enabled": True}}}}):
    try:
        validate_config(OmegaConf.create(options), use_reference_policy=False, use_critic=False)
    except Exception as error:
        print(type(error).__name__, error)
"""
    stock, ours = fresh_process("-c", script, "verl=0.10.0", "trainer.nnodes=1").stdout.splitlines()[-2:]
    assert "verl_qerl" not in stock  # verl's own, which misses the rest
    assert ours == (
        "RuntimeError verl_qerl cannot be used, and this run has options of it: verl is 0.10.0. verl_qerl works with"
        " verl==0.9.1. Install that release."
    )


@needs_verl
def test_a_package_of_ours_that_is_missing_ends_no_stock_run(fresh_process):
    script = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == "ray":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.modules["verl_qerl.kernels.actor.log_probs"] = None  # an import of it fails
import verl.utils
from verl_qerl import verl_plugin
print(type(verl_plugin.FAILURE).__name__)
"""
    assert fresh_process("-c", script).stdout.splitlines()[-1] == "PackageNotFoundError"


@needs_verl
def test_main_ppo_stops_before_ray(fresh_process, tmp_path):
    command = [
        "-m",
        "verl.trainer.main_ppo",
        *RUN,
        "+rollout=int8",
        "+platform=cpu",
        "actor_rollout_ref.model.lora_rank=8",
        "+qerl.base.shard=true",
    ]
    found = fresh_process(*command, f"hydra.run.dir={tmp_path}", fails=True, RAY_TMPDIR=str(tmp_path / "ray"))
    assert "qerl.base.shard=True does not go together with +rollout=int8" in found.stderr
    assert "Started a local Ray instance" not in found.stderr
    assert not (tmp_path / "ray").exists()
