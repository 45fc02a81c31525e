"""Started by test_engine_whole_on_cpu.py as engine_cases.py is: engines without an adapter, which train all weights."""

import os
from pathlib import Path
from unittest import mock

import torch
from engine_cases import MODELS, OUT, build, digests, logits, main, step, whole
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import fsdp_utils
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl.algos.uaq import read_record
from verl_qerl.formats import get_format
from verl_qerl.formats.reference import dequantize
from verl_qerl.verl_plugin.actor import engine as ours
from verl_qerl.verl_plugin.config.base_options import QerlFSDPEngineConfig
from verl_qerl.verl_plugin.weight_sync import merged_adapter
from verl_qerl.verl_plugin.weight_sync.merged_adapter import adapted_weights
from verl_qerl.verl_plugin.weight_sync.requantize import ROUNDED


def requantized():
    """Engines whose weights are all trained: what they send, and that a quantized directory is refused."""
    found = {}
    for model, form in (("bf16", "int8"), ("tied", "nvfp4")):
        qerl = {"format": form, "has_adapter": False}
        engine = build(model, qerl=qerl, lora_only=False, dtype=None, lora_rank=0)
        dtypes = {p.dtype for p in engine.module.parameters() if p.requires_grad}
        params, peft_config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
        found[model] = {"dtypes": dtypes, "peft": peft_config, "sent": dict(params), "packed": digests(engine)}
        step(engine)
        found[model]["later"] = dict(engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)[0])
    try:
        build("nvfp4", qerl=qerl, lora_only=False, dtype=None, lora_rank=0)
    except ValueError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def train_all(scale, model="bf16", qerl=None):
    """An engine that trains every weight, in float32 as verl does by default."""
    torch.manual_seed(1)
    override = {"attn_implementation": "sdpa"}
    model_config = HFModelConfig(
        path=f"{MODELS}/{model}", load_tokenizer=False, use_remove_padding=False, override_config=override
    )
    settings = {"strategy": "fsdp2", "use_torch_compile": False, "uaq_scale": scale}
    ours_too = qerl and QerlFSDPEngineConfig(**settings, model_dtype="fp32", qerl=qerl | {"has_adapter": False})
    config = ours_too or QerlFSDPEngineConfig(**settings)
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    found = ours.QerlFSDPEngine(model_config, config, optimizer, CheckpointConfig())
    found.initialize()
    return found


def sent_weights(engine):
    return {name: whole(tensor) for name, tensor in engine.get_per_tensor_param(base_sync_done=True)[0]}


def uaq():
    """Scaled once after loading; a checkpoint holds scaled weights and says so."""
    plain, engine = train_all(None), train_all(2.0)
    found = {"logits": [logits(e.module) for e in (plain, engine)], "sent": [sent_weights(e) for e in (plain, engine)]}
    tied = [logits(train_all(scale, "tied").module) for scale in (None, 2.0)]
    found["tied"] = tied
    paths = [f"{OUT}/whole-{name}" for name in ("plain", "scaled")]
    object.__setattr__(engine.model_config, "path", os.path.relpath(engine.model_config.path))
    for e, path in zip((plain, engine), paths, strict=True):
        step(e)
        e.save_checkpoint(path, global_step=1)
    found["saved"] = [sent_weights(e) for e in (plain, engine)]
    found["base"] = read_record(Path(paths[1]))["base"]
    again = train_all(2.0)
    again.load_checkpoint(paths[1], del_local_after_load=False)
    found["resumed"] = sent_weights(again)
    found["refused"] = []
    for scale, path in ((1.5, paths[1]), (None, paths[1]), (2.0, paths[0])):
        try:
            train_all(scale).load_checkpoint(path, del_local_after_load=False)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


def resumed():
    """Checkpoints of an adapter, and one of all weights that takes the place of one."""
    folders = [f"{OUT}/adapter-{lora_only}" for lora_only in (True, False)]
    for lora_only, folder in zip((True, False), folders, strict=True):
        build("bf16", lora_only=lora_only).save_checkpoint(folder, global_step=1)
    plain, engine = train_all(None), train_all(None, qerl={"format": "int8"})
    before, errors = {**sent_weights(engine), "plain": logits(plain.module)}, []
    for loading in (engine, plain):
        for folder in folders:
            try:
                loading.load_checkpoint(folder, del_local_after_load=False)
            except ValueError as error:
                errors.append(str(error))
    now = {**sent_weights(engine), "plain": logits(plain.module)}
    step(engine)
    engine.save_checkpoint(folders[0], global_step=1)
    again = train_all(None, qerl={"format": "int8"})
    again.load_checkpoint(folders[0], del_local_after_load=False)
    plain.save_checkpoint(folders[1], global_step=1)  # takes the place of the other
    plain.load_checkpoint(folders[1], del_local_after_load=False)
    return {"errors": errors, "weights": [before, now], "saved": [sent_weights(engine), sent_weights(again)]}


def rounded():
    """Log-probs that are asked for with rounded weights are those of a model that has such weights."""
    _Stock = FSDPEngineWithLMHead
    original, _Stock.forward_backward_batch = _Stock.forward_backward_batch, lambda self, data: logits(self.module)
    plain, asked = (tu.get_tensordict({}, {ROUNDED: flag}) for flag in (False, True))
    found = {}
    for form in ("int8", "nvfp4"):
        engine = train_all(None, qerl={"format": form})
        with_weights = AutoModelForCausalLM.from_pretrained(f"{MODELS}/bf16", dtype=torch.bfloat16)
        for model in (engine.module, with_weights):  # far apart, or a shared scale would do what their own do
            for name, parameter in model.named_parameters():
                if name.endswith(("k_proj.weight", "up_proj.weight")):
                    parameter.data.mul_(2**14)
        for layer in with_weights.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            groups = ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
            for group in (*groups, [attention.o_proj], [mlp.down_proj]):
                weights = {str(at): linear.weight.data for at, linear in enumerate(group)}
                packed = get_format(form).quantize_group(weights)
                for at, linear in enumerate(group):
                    linear.weight.data = dequantize(packed[str(at)])
        outputs = [engine.forward_backward_batch(data) for data in (plain, asked, plain)]
        found[form] = [logits(with_weights), *outputs]
    _Stock.forward_backward_batch = original
    return found


def merged():
    """What engines send whose adapter is merged: ours, what verl's would have sent, and what is left of the model."""
    found = {}
    for dtype in ("fp32", "bf16"):
        engine = build("bf16", packed=False, dtype=dtype, lora={"merge": True})
        sent_weights(engine)
        step(engine)  # what is sent then is the adapter after it
        before = {name: whole(tensor) for name, tensor in engine.module.state_dict().items()}
        with mock.patch.object(fsdp_utils, "backup_base_model_weights", side_effect=AssertionError):
            sent = sent_weights(engine)
        found[dtype] = {"sent": sent, "before": before}
        found[dtype]["after"] = {name: whole(tensor) for name, tensor in engine.module.state_dict().items()}
        found[dtype]["stock"] = {n: whole(t) for n, t in FSDPEngineWithLMHead._merged_lora_per_tensor_param(engine)}
    layer = next(module for module in engine.module.modules() if isinstance(module, LoraLayer))
    for change in ({"lora_bias": {"default": True}}, {"lora_variant": {"default": None}}, {"merged_adapters": [""]}):
        with mock.patch.multiple(layer, **change):
            found[next(iter(change))] = adapted_weights(engine.module)
    with mock.patch.object(engine.module, "state_dict", return_value={}):
        found["other names"] = adapted_weights(engine.module)
    with mock.patch.object(merged_adapter, "fsdp_version", return_value=1):  # which needs a GPU
        found["fsdp1"] = adapted_weights(engine.module)
    return found


RUNS = {"requantized": requantized, "uaq": uaq, "resumed": resumed, "rounded": rounded, "merged": merged}

if __name__ == "__main__":
    main(RUNS)
