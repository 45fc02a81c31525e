"""The class vLLM's workers inherit from: verl's own weight sync or ours of quantized weights, noise, and checks."""

import copy
from typing import Any, cast

import torch
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, vLLMColocateWorkerExtension

from verl_qerl import vllm_plugin
from verl_qerl.checkpoints.digest import check_same_base, model_digest
from verl_qerl.formats import WeightFormat, get_format
from verl_qerl.verl_plugin.config.base_options import CHECKSUM, DIGESTS, LAYOUT
from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatReceiver, adapter_checksum
from verl_qerl.verl_plugin.weight_sync.transfer import WatchfulReceiver
from verl_qerl.vllm_plugin.adapter.buffers import (
    Layout,
    can_place,
    flatten,
    num_elements,
    place_adapter,
    require_placed,
    unflatten,
)
from verl_qerl.vllm_plugin.noise.synced_norms import split_shifts
from verl_qerl.vllm_plugin.weights.loader import base_digests
from verl_qerl.vllm_plugin.weights.reload import LOADING_ERRORS, InPlaceReload, SyncReport, without_frames
from verl_qerl.vllm_plugin.worker import RolloutWorkerExtension, prepare_model


class WorkerExtension(RolloutWorkerExtension, vLLMColocateWorkerExtension):
    """verl's extension for a packed base that is never overwritten, or for linears that every sync brings quantized.

    verl takes every NVFP4 checkpoint for quantization-aware training: it would patch vLLM (with patches that vLLM
    0.24 breaks) and, on an adapter sync, replace the base by uninitialized memory (patches/verl/0003).
    """

    model_runner: Any  # of vLLM's worker, whose base this becomes
    vllm_config: Any
    remove_lora: Any
    _is_qat_model: bool
    _is_modelopt_qat: bool
    _qerl_base_unchecked: bool
    _qerl_format: WeightFormat | None  # of the linears that a sync brings
    _qerl_num_syncs: int = 0
    _qerl_checksum: int | str | None = None  # of what the last sync brought
    _qerl_report: SyncReport | None = None
    _qerl_error: Exception | None = None

    def __new__(cls, vllm_config: Any, **kwargs: Any) -> Any:
        """Create the worker with verl's QAT switched off."""
        worker = vLLMColocateWorkerExtension.__new__(cls, vllm_config=_without_nvfp4(vllm_config), **kwargs)
        if worker._is_qat_model or worker._is_modelopt_qat:
            raise RuntimeError("verl's QAT is on in a worker of ours. This is a defect of verl_qerl: report it.")
        has_adapter = vllm_config.lora_config is not None
        form = vllm_plugin.NAMES.get(str(vllm_config.load_config.load_format))
        worker._qerl_base_unchecked = has_adapter and form is not None
        worker._qerl_format = None if has_adapter or form is None else get_format(form)
        prepare_model(worker, vllm_config)
        return worker

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive an adapter or a whole model from the trainer; an adapter goes straight into vLLM's buffers.

        Where the engine holds quantized linears and no adapter, a whole model comes, its linears quantized.

        Raises:
            ValueError: The actor's base weights are not those of this worker, or its first adapter comes without their
                digests: then the actor is not ours, and trains on a dense base. Or the adapter is not one of this
                model's, or arrived otherwise than the actor sent it, or is not what the engine holds afterwards. Or as
                `InPlaceReload.finish`.
            RuntimeError: The actor has ended in the middle of a sync.
        """
        if self._qerl_format is not None:
            self._qerl_reload(self._qerl_format, use_shm)
            return
        expected = peft_config.pop(DIGESTS, None) if peft_config else None
        if peft_config is not None and base_sync_done:
            # After the transfer: an error before it would leave the sender waiting for ever.
            sent = peft_config.pop(CHECKSUM, None)
            layout, flat = self._qerl_receive(peft_config.pop(LAYOUT, None), use_shm)
            checksum = adapter_checksum(flat)
            if sent is not None:
                _require_same(sent, checksum, flat)
            if expected is not None or self._qerl_base_unchecked:
                check_same_base(expected or {}, base_digests(self.model_runner.get_model()))
                self._qerl_base_unchecked = False
            self._qerl_place(layout, flat, peft_config)
            self._qerl_num_syncs, self._qerl_checksum = self._qerl_num_syncs + 1, checksum
            return
        try:
            super().update_weights_from_ipc(
                peft_config=cast(dict, peft_config), base_sync_done=base_sync_done, use_shm=use_shm
            )
        finally:
            error, self._qerl_error = self._qerl_error, None
            if error is not None:  # of a bucket; what verl's processing of half of a model raised follows from it
                raise error
        self._qerl_num_syncs, self._qerl_checksum = self._qerl_num_syncs + 1, None
        if self._qerl_noise is not None:
            self._qerl_noise.recapture(self.vllm_config.model_config.dtype)

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: Any, base_sync_done: bool) -> None:
        """Load a bucket; an error is kept for later, since the sender waits for an answer to every bucket."""
        if self._qerl_error is None:
            try:
                super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
            except LOADING_ERRORS as error:
                self._qerl_error = without_frames(error)

    def qerl_last_sync(self) -> dict[str, Any]:
        """What the engine holds since the last sync, by which the trainer compares workers, and that sync's metrics.

        Returns:
            `number` of syncs so far and the `checksum` of what the last one brought, once it was found in the engine;
            None of a whole model in bf16, which verl loads. Of quantized weights `sync_*` too.
        """
        found = {"number": self._qerl_num_syncs, "checksum": self._qerl_checksum}
        report = self._qerl_report
        if report is None:
            return found
        return found | {
            "sync_bytes": report.manifest.num_bytes,
            "sync_bytes_bf16": report.manifest.num_bytes_bf16,
            "sync_linears": report.num_linears,
            "sync_checked_linears": report.num_checked,
        }

    def _qerl_reload(self, form: WeightFormat, use_shm: bool) -> None:
        reload = InPlaceReload(self.model_runner.get_model(), self.vllm_config, form, self._qerl_num_syncs)
        receiver = WatchfulReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: reload.load(weights))
        report = self._qerl_report = reload.finish()
        self._qerl_num_syncs += 1
        self._qerl_checksum = model_digest(report.manifest.checksums)
        if self._qerl_noise is not None:
            self._qerl_noise.recapture()

    def _qerl_receive(self, layout: Any, use_shm: bool) -> tuple[Layout, torch.Tensor]:
        """Everything the trainer sends, as one tensor on the device; verl overwrites the buckets that it comes in."""
        receiver = WatchfulReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        dtype = self.model_runner.lora_manager._adapter_manager.lora_config.lora_dtype
        named: dict[str, torch.Tensor] = {}
        if layout is None:  # verl's own engine names every tensor
            receiver.receive_weights(
                on_bucket_received=lambda weights, is_last: named.update((name, one.clone()) for name, one in weights)
            )
            return flatten(named, dtype)
        layout = tuple((name, (rows, columns)) for name, (rows, columns) in layout)
        flat = FlatReceiver(num_elements(layout), dtype, self.device)
        receiver.receive_weights(on_bucket_received=flat.add)
        return layout, flat.whole()

    def _qerl_place(self, layout: Layout, flat: torch.Tensor, peft_config: dict) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        layout, flat, shifts = split_shifts(layout, flat)
        if self._qerl_norms is not None:
            self._qerl_norms.check(shifts)
        elif shifts:
            raise ValueError(
                f"the actor trains {len(shifts)} norms and this engine was not told: additional_config.verl_qerl has no"
                " train_norms=true. The trainer puts it there. Set +qerl.base.train_norms=true on verl's command alone."
            )
        if can_place(manager):
            place_adapter(manager, VLLM_LORA_INT_ID, layout, flat, peft_config)
            require_placed(manager, VLLM_LORA_INT_ID, flat)
        else:
            # With room for several adapters on the host vLLM may load an earlier state from there.
            self.remove_lora(VLLM_LORA_INT_ID)
            super()._update_weights(list(unflatten(layout, flat).items()), peft_config=peft_config, base_sync_done=True)
        if self._qerl_norms is not None:
            self._qerl_norms.place(shifts)
            self._qerl_norms.require_placed(shifts)


def _require_same(sent: int, came: int, flat: torch.Tensor) -> None:
    if flat.dtype != torch.bfloat16:
        raise ValueError(
            f"this engine takes adapters in {flat.dtype}, in which they cannot be compared with the actor's. Accepted"
            " is bfloat16. Leave engine_kwargs.vllm.lora_dtype out."
        )
    if sent != came:
        raise ValueError(
            f"the adapter arrived otherwise than the actor sent it: checksum={came}, sent was {sent}. Equal ones are"
            " needed. Update the GPU's driver or set NCCL_P2P_DISABLE=1 if this comes again."
        )


def _without_nvfp4(vllm_config: Any) -> Any:
    quant_config = vllm_config.quant_config
    is_nvfp4 = getattr(quant_config, "quant_format", None) == "nvfp4-pack-quantized"
    if not is_nvfp4 and type(quant_config).__name__ != "ModelOptNvFp4Config":
        return vllm_config
    hidden = copy.copy(vllm_config)
    hidden.quant_config = None
    return hidden
