"""Started by test_worker_extension_on_cpu.py: what a worker with our extension does. Prints case -> finding as JSON.

A process of its own, since verl's class patches vLLM when a worker is made.
"""

import json
import weakref
from types import SimpleNamespace

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as Upstream
from vllm.v1.worker.gpu_worker import Worker as VllmWorker
from worker_extension_fakes import (
    FLAT,
    KINDS,
    LAYOUTS,
    NAMED,
    SHIFTED,
    SHIFTS,
    ModelOptNvFp4Config,
    Sender,
    config,
    make,
)

from verl_qerl.verl_plugin.config.base_options import CHECKSUM, DIGESTS, LAYOUT
from verl_qerl.verl_plugin.weight_sync import worker_extension
from verl_qerl.verl_plugin.weight_sync.flat_adapter import adapter_checksum
from verl_qerl.verl_plugin.weight_sync.worker_extension import WorkerExtension
from verl_qerl.vllm_plugin import worker as noise_extension
from verl_qerl.vllm_plugin.adapter.buffers import unflatten

# The model here has no layers of vLLM.
noise_extension.release_buffers = noise_extension.use_single_adapter = lambda model, lora_config: None

DIGEST = {"model.layers.0.mlp.down_proj": "0123456789abcdef"}
OTHER = {"model.layers.0.mlp.down_proj": "fedcba9876543210"}
PEFT = {"r": 8, "lora_alpha": 16}


def construction(quant_config):
    """What verl's class got to see, and the flags afterwards."""
    seen, real = [], Upstream.__new__

    def spy(cls, **kwargs):
        seen.append(kwargs["vllm_config"])
        return real(cls, **kwargs)

    Upstream.__new__ = spy
    try:
        given = config(quant_config)
        worker = make(given)
    finally:
        Upstream.__new__ = real
    return {
        "flags": [worker._is_qat_model, worker._is_modelopt_qat],
        "verl saw a quantized model": seen[0].quant_config is not None,
        "the same configuration": seen[0] is given,
        "the worker keeps it": worker.vllm_config is given and given.quant_config is quant_config,
    }


def update(vllm_config, peft_config, base_sync_done=True, norm=None, sends=None, capacity=1, told=(), lost=None):
    """What is called, in order, during one sync, and the error at its end."""
    log, real = [], (Upstream.update_weights_from_ipc, Upstream._update_weights)

    def transfer(self, peft_config=None, base_sync_done=False, use_shm=False):
        log.append(["verl", peft_config, base_sync_done, use_shm])
        if norm is not None:
            model().input_layernorm.weight.data.fill_(norm)

    def listed(tensors):
        return {name: [str(one.dtype), one.tolist()] for name, one in tensors}

    Upstream.update_weights_from_ipc = transfer
    Upstream._update_weights = lambda self, weights, peft_config, base_sync_done: log.append(
        ["verl loads", listed(weights), peft_config]
    )
    Sender.queue, Sender.log = NAMED if sends is None else sends, log
    worker_extension.WatchfulReceiver = Sender
    worker_extension.place_adapter = lambda manager, number, layout, flat, peft: log.append(
        ["place", number, listed(unflatten(layout, flat).items()), peft]
    )

    def require_placed(manager, number, flat):
        if lost == "adapter":
            raise ValueError("the rollout does not hold the adapter")

    worker_extension.require_placed = require_placed
    worker = make(vllm_config)
    if lost == "norms":
        worker._qerl_norms.place = lambda shifts: None
    worker.model_runner.lora_manager._adapter_manager.capacity = capacity
    worker._get_zmq_handle, worker.remove_lora = (lambda: "handle"), lambda number: log.append(["remove", number])
    if worker._qerl_noise is not None:
        worker.qerl_set_noise(0.1, 1)
        recapture = worker._qerl_noise.recapture
        worker._qerl_noise.recapture = lambda dtype: log.append(["recapture", str(dtype)]) or recapture(dtype)
    model = worker.model_runner.get_model
    worker.model_runner.get_model = lambda: log.append(["look"]) or model()
    error = None
    try:
        for peft in peft_config if isinstance(peft_config, list) else [peft_config]:
            given = None if peft is None else dict(peft)
            worker.update_weights_from_ipc(peft_config=given, base_sync_done=base_sync_done, use_shm=True)
    except (ValueError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        Upstream.update_weights_from_ipc, Upstream._update_weights = real
    clean = None
    if worker._qerl_noise is not None:
        worker.qerl_set_noise(0.0, 0)
        clean = model().input_layernorm.weight[0].item()
    found = {"log": log, "error": error, "clean": clean}
    if "sync" in told:
        found["sync"] = worker.qerl_last_sync()
    return found | ({"norms": [getattr(model(), kind).weight[3].item() for kind in KINDS]} if "norms" in told else {})


class Bucket(str):
    """As a list of tensors, something that knows whether somebody still holds it."""


WHOLE = adapter_checksum(torch.cat([piece for _, piece in FLAT]))
TWO = [("first", torch.ones(1)), ("second", torch.ones(1))]


def broken_bucket(processing_fails):
    """A whole model that verl loads, and fails to in its second bucket of three; the events, the error, who is held."""
    held, log, real = [], [], (Upstream.update_weights_from_ipc, Upstream._update_weights)

    def load(self, weights, peft_config, base_sync_done):
        log.append(["load", str(weights)])
        if weights == "second":
            raise AssertionError("a weight of another shape")

    def transfer(self, peft_config=None, base_sync_done=False, use_shm=False):
        views = []
        for name in ("first", "second", "third"):
            bucket = Bucket(name)
            views.append(weakref.ref(bucket))
            self._update_weights(bucket, peft_config=peft_config, base_sync_done=base_sync_done)
            log.append(["answer", name])
        del bucket
        held.append([view() for view in views])
        if processing_fails:
            raise RuntimeError("half of a model")

    Upstream.update_weights_from_ipc, Upstream._update_weights = transfer, load
    worker, errors = make(config(aqn={"enabled": True, "targets": ["input_layernorm"]})), []
    try:
        for _ in range(2):  # an error is that of its own sync
            try:
                worker.update_weights_from_ipc(peft_config=None, base_sync_done=True)
            except (AssertionError, RuntimeError) as caught:
                errors.append(f"{type(caught).__name__}: {caught}")
    finally:
        Upstream.update_weights_from_ipc, Upstream._update_weights = real
    return {"log": log, "errors": errors, "held": held}


class Reload:
    """What a worker does with a sync of quantized weights."""

    log: list

    def __init__(self, model, vllm_config, form, num_before):
        Reload.log.append(["reload", form.name, num_before])

    def load(self, weights):
        Reload.log.append(["load", [name for name, _ in weights]])

    def finish(self):
        Reload.log.append(["finish"])
        sums = {"a": 1, "b": 2 + Reload.log.count(["finish"])}
        manifest = SimpleNamespace(num_bytes=10, num_bytes_bf16=18, checksums=sums)
        return SimpleNamespace(manifest=manifest, num_linears=8, num_checked=4)


def requantized(load_format, adapter):
    """What two syncs of whole models call, and what the trainer is told before and after."""
    Reload.log = log = []
    aqn = {"enabled": True, "targets": ["input_layernorm"]}
    worker = make(config(load_format=load_format, aqn=aqn, adapter=adapter))
    worker._qerl_noise.recapture = lambda *args: log.append(["recapture", *map(str, args)])
    worker._get_zmq_handle = lambda: "handle"
    real = Upstream.update_weights_from_ipc
    Upstream.update_weights_from_ipc = lambda self, **kwargs: log.append(["transfer"])
    Sender.queue, Sender.log = TWO, []
    worker_extension.WatchfulReceiver, worker_extension.InPlaceReload = Sender, Reload
    told = []
    try:
        for _ in range(2):
            told.append(worker.qerl_last_sync())
            worker.update_weights_from_ipc(peft_config=None, base_sync_done=True)
        told.append(worker.qerl_last_sync())
    finally:
        Upstream.update_weights_from_ipc = real
    return {"log": log, "told": told}


def upstream(quant_config):
    """Whether verl's own class takes the model for QAT: it sets a flag, or fails where it patches vLLM."""
    try:
        worker = Upstream(vllm_config=config(quant_config))
    except (ImportError, AttributeError):
        return True
    return worker._is_qat_model or worker._is_modelopt_qat


def cases():
    compressed = SimpleNamespace(quant_format="nvfp4-pack-quantized")
    fp8 = SimpleNamespace(quant_format="float-quantized")
    ours = config(load_format="verl_qerl_nvfp4", digests=DIGEST)
    noisy = config(aqn={"enabled": True, "targets": ["input_layernorm"]}, digests=DIGEST)
    yield "compressed-tensors", construction(compressed)
    yield "modelopt", construction(ModelOptNvFp4Config())
    yield "fp8", construction(fp8)
    yield "bf16", construction(None)
    yield "equal", update(ours, PEFT | {DIGESTS: DIGEST})
    yield "differing", update(ours, PEFT | {DIGESTS: OTHER})
    yield "without digests", update(ours, dict(PEFT))
    yield "second adapter", update(ours, [PEFT | {DIGESTS: DIGEST}, dict(PEFT)])
    yield "base of others", update(config(), PEFT | {DIGESTS: DIGEST})
    yield "bf16 adapter", update(config(), dict(PEFT))
    yield "noise, adapter", update(noisy, dict(PEFT), norm=None)
    yield "noise, whole model", update(noisy, None, base_sync_done=False, norm=3.0)
    yield "noise, whole model before the adapter", update(noisy, dict(PEFT), base_sync_done=False, norm=3.0)
    flat = PEFT | {LAYOUT: LAYOUTS}
    yield "flat", update(config(), flat, sends=FLAT)
    yield "flat, second piece missing", update(config(), flat, sends=FLAT[:1])
    yield "flat, a piece twice", update(config(), flat, sends=[*FLAT, FLAT[0]])
    yield "flat, a strange tensor", update(config(), flat, sends=[*FLAT, NAMED[0]])
    yield "flat, a piece beyond the end", update(config(), flat, sends=[*FLAT, ("verl_qerl_adapter.12", torch.ones(3))])
    yield "room for two adapters on the host", update(config(), flat, sends=FLAT, capacity=2)
    summed = flat | {CHECKSUM: WHOLE}
    yield "checksum", update(config(), [summed, summed], sends=FLAT, told=["sync"])
    yield "another checksum", update(config(), [summed, flat | {CHECKSUM: WHOLE + 1}], sends=FLAT, told=["sync"])
    yield "an adapter that is lost", update(config(), summed, sends=FLAT, told=["sync"], lost="adapter")
    yield "no checksum", update(config(), dict(PEFT), told=["sync"])
    trained = config(norms=True, aqn={"enabled": True, "targets": ["input_layernorm"]})
    with_norms, asked = PEFT | {LAYOUT: SHIFTED}, {"told": ["norms"]}
    yield "norms", update(trained, with_norms, sends=SHIFTS, **asked)
    yield "norms, room for two adapters", update(trained, with_norms, sends=SHIFTS, capacity=2, **asked)
    yield "norms that are lost", update(trained, with_norms, sends=SHIFTS, told=["norms", "sync"], lost="norms")
    yield "norms, engine not told", update(config(), with_norms, sends=SHIFTS, **asked)
    yield "norms that do not come", update(trained, flat, sends=FLAT, **asked)
    yield "whole model, int8", requantized("verl_qerl_int8", adapter=False)
    yield "whole model, bf16", requantized("auto", adapter=False)
    yield "whole model, adapter", requantized("verl_qerl_nvfp4", adapter=True)
    yield "broken bucket", broken_bucket(False)
    yield "broken bucket, broken model", broken_bucket(True)
    yield "clash", [name for name in dir(WorkerExtension) if not name.startswith("__") and hasattr(VllmWorker, name)]
    # Last, since these change vLLM where they succeed.
    yield "upstream", [upstream(compressed), upstream(ModelOptNvFp4Config())]


if __name__ == "__main__":
    print(json.dumps(dict(cases())))
