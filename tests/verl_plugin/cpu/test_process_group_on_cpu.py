import pytest

pytest.importorskip("verl")

GROUP = """
import os
import verl
import torch.distributed as dist
from verl.utils.distributed import initialize_global_process_group_ray
assert not dist.is_initialized()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": "file://" + os.environ["STORE"]}
initialize_global_process_group_ray()
print("backend", dist.get_backend())
"""
DRIFTED = """
import dataclasses
from verl_qerl.verl_plugin import shims
shims.OF_THE_CPU["verl.utils.distributed"] = dataclasses.replace(shims.PROCESS_GROUP, fingerprint="000000000000")
import verl.utils.distributed
"""
STOOD_DOWN = """
import dataclasses
from verl_qerl.verl_plugin import shims
shim = shims.PROCESS_GROUP
shims.OF_THE_CPU["verl.utils.distributed"] = dataclasses.replace(shim, patched=shim.fingerprint)
import verl.utils.distributed as module
assert not hasattr(module.initialize_global_process_group_ray, "__wrapped__")
"""


def test_verl_starts_a_group_on_the_cpu(fresh_process, tmp_path):
    assert "backend gloo" in fresh_process("-c", GROUP, STORE=str(tmp_path / "store")).stdout


def test_a_function_that_is_not_the_one_of_the_shim_stops(fresh_process):
    found = fresh_process("-c", DRIFTED, fails=True)
    assert "UpstreamDriftError: cannot replace verl.utils.distributed:initialize" in found.stderr


def test_stands_down_where_the_patch_is_applied(fresh_process):
    fresh_process("-c", STOOD_DOWN)
