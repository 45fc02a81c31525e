import contextlib
import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase

from verl_qerl.verl_plugin.cpu.platform import PlatformCPU, register

USED = """
import json
import verl
from verl.plugin.platform import get_platform
from verl.utils import device
module = device.get_torch_device()
names = ["is_available", "current_device", "device_count", "get_device_name", "set_device", "synchronize",
         "empty_cache", "ipc_collect", "reset_peak_memory_stats", "memory_allocated", "memory_reserved",
         "max_memory_allocated", "max_memory_reserved", "mem_get_info", "get_rng_state", "set_rng_state"]
print(json.dumps({
    "class": type(get_platform()).__name__,
    "device": device.get_device_name(),
    "id": device.get_device_id(),
    "backend": device.get_nccl_backend(),
    "resource": get_platform().ray_resource_name(),
    "missing": [name for name in names if not callable(getattr(module, name, None))],
    "memory": [module.max_memory_allocated(), list(module.mem_get_info())],
}))
"""


def test_every_abstract_method_is_there():
    assert inspect.isabstract(PlatformBase)
    assert not inspect.isabstract(PlatformCPU)
    assert not PlatformBase.__abstractmethods__ - set(vars(PlatformCPU))


def test_every_method_takes_what_verl_passes():
    for name in PlatformBase.__abstractmethods__:
        wanted, ours = getattr(PlatformBase, name), getattr(PlatformCPU, name)
        if not isinstance(wanted, property):
            _, *given = inspect.signature(wanted).parameters
            inspect.signature(ours).bind("self", **dict.fromkeys(given))


def test_it_is_a_cpu():
    platform = PlatformCPU()
    assert (platform.device_name, platform.vendor_name) == ("cpu", "cpu")
    assert platform.is_available()
    assert not platform.is_platform_available(use_smi_check=True)  # never chosen unasked
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert platform.get_device_capability() == (None, None)
    assert not platform.is_ipc_supported()
    assert isinstance(platform.nvtx_range("x"), contextlib.nullcontext)
    assert platform.cudart() is None
    assert platform.device_module.get_device_name(0) == "CPU"
    assert platform.device_module.Stream is torch.cpu.Stream  # what it lacks comes from torch.cpu
    platform.manual_seed(5)
    first = torch.rand(3)
    platform.manual_seed_all(5)
    assert torch.equal(torch.rand(3), first)


def test_the_random_state_is_that_of_torch():
    module = PlatformCPU().device_module
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_registers_under_its_name(monkeypatch):
    monkeypatch.setattr(PlatformRegistry, "_platforms", {})
    register()
    register()
    assert PlatformRegistry._platforms == {"cpu": PlatformCPU}


def test_verl_resolves_it(fresh_json, tmp_path):
    script = Path(tmp_path) / "used.py"
    script.write_text(USED)
    found = fresh_json(str(script))
    assert found == {
        "class": "PlatformCPU",
        "device": "cpu",
        "id": "cpu",
        "backend": "gloo",
        "resource": "GPU",
        "missing": [],
        "memory": [0, [0, 0]],
    }


def test_without_the_variable_verl_never_hears_of_it(fresh_process):
    code = "import verl\nfrom verl.plugin.platform import PlatformRegistry as r\nassert 'cpu' not in r._platforms\n"
    fresh_process("-c", code, VERL_PLATFORM="")
