"""Started by test_engine_on_cpu.py, on one rank or more: builds engines on tiny models and saves what it found.

python engine_cases.py <folder of models> <folder for findings> <case> ...
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import verl  # noqa: F401  (its plugins come with it, ours among them)
from peft import LoraConfig, get_peft_model
from qerl_testing import foreach_copy_as_cuda, set_linear
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl import verl_plugin
from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.experts import ADAPTED
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.adapted_linear import fuse_adapters
from verl_qerl.modules.convert import packed_weights
from verl_qerl.modules.packed_linear import PackedLinear
from verl_qerl.verl_plugin.actor import engine as ours
from verl_qerl.verl_plugin.actor import frozen_base
from verl_qerl.verl_plugin.config.base_options import CHECKSUM, DIGESTS, LAYOUT, QerlFSDPEngineConfig
from verl_qerl.verl_plugin.weight_sync import flat_adapter
from verl_qerl.vllm_plugin.adapter.buffers import num_elements, unflatten

verl_plugin.activate()
MODELS, OUT, *CASES = sys.argv[1:]
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
torch._foreach_copy_ = foreach_copy_as_cuda
flat_adapter.PIECE_BYTES = 20000  # several, the last one short
SMALLEST_LINEAR = 64 * 128  # k_proj of the models of conftest.py


def build(
    model,
    cls=ours.QerlFSDPEngine,
    qerl=None,
    lora_only=True,
    packed=True,
    dtype="bf16",
    settings=(),
    fused=True,
    **options,
):
    """An engine on `model`, initialized, its adapters made to act; with `fused` false they stay PEFT's own layers."""
    torch.manual_seed(1)
    defaults = {"lora_rank": 8, "use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"}}
    model_config = HFModelConfig(path=f"{MODELS}/{model}", load_tokenizer=False, **(defaults | options))
    settings = {"strategy": "fsdp2", "use_torch_compile": False, "model_dtype": dtype, **dict(settings)}
    config = QerlFSDPEngineConfig(**settings, qerl=qerl or {}) if packed else FSDPEngineConfig(**settings)
    checkpoint = CheckpointConfig(save_lora_only=lora_only)
    found = cls(model_config, config, FSDPOptimizerConfig(lr=1e-3, total_training_steps=10), checkpoint)
    with nullcontext() if fused else mock.patch.object(frozen_base, "fuse_adapters"):
        found.initialize()
    for name, parameter in found.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return found


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def adapters(engine):
    return {name: whole(p) for name, p in engine.module.named_parameters() if p.requires_grad}


def logits(module):
    with torch.no_grad():
        return module(TOKENS).logits.float()


def digests(engine):
    return {name: weight_digest(weight) for name, weight in packed_weights(engine.module)}


def reference(engine, model, fused=True):
    """LoRA on the dequantized weights, as we or PEFT compute it, with the engine's adapters as FSDP2 casts them."""
    dense = AutoModelForCausalLM.from_pretrained(f"{MODELS}/{model}", dtype=torch.bfloat16, attn_implementation="sdpa")
    for name, weight in packed_weights(engine.module):
        set_linear(dense, name, dequantize(weight))
    targets = list(ADAPTED) if model == "moe" else "all-linear"
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=targets)
    module = get_peft_model(dense, config)
    trained = adapters(engine)
    for name, parameter in module.named_parameters():
        if name in trained:
            parameter.data = trained.pop(name).bfloat16()
    assert all("layernorm" in name for name in trained), f"PEFT names them otherwise: {list(trained)}"
    if fused:
        fuse_adapters(module)
    return module


def module_types(engine):
    return {name: type(module).__name__ for name, module in engine.module.named_modules()}


def layout(engine):
    """Kinds of modules and tensors, and the digests."""
    module = engine.module
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        "types": module_types(engine),
        "trainable": {name: p.dtype for name, p in module.named_parameters() if p.requires_grad},
        "frozen": {name: p.dtype for name, p in module.named_parameters() if not p.requires_grad},
        "dense": [name for name, t in tensors if t.is_floating_point() and t.numel() >= SMALLEST_LINEAR],
        "packed": sorted(name for name, m in module.named_modules() if isinstance(m, PackedLinear)),
        "meta": [name for name, t in tensors if t.is_meta],
        "digests": digests(engine),
    }


def base(model, **qerl):
    """Everything about an engine that is not trained."""
    engine = build(model, qerl=qerl)
    found = layout(engine)
    expected = reference(engine, model if model in ("tied", "moe") else "bf16")
    found |= {"logits": logits(engine.module), "expected": logits(expected)}
    with engine.disable_adapter(), expected.disable_adapter():
        found |= {"base": logits(engine.module), "expected base": logits(expected)}
    found |= sent(engine)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.25)
    return found | {f"later {key}": value for key, value in sent(engine).items()}


def sent(engine):
    """What the rollout gets, and what verl would send."""
    params, config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
    pieces = list(params)
    receiver = flat_adapter.FlatReceiver(num_elements(config[LAYOUT]), torch.float32, torch.device("cpu"))
    receiver.add(pieces, is_last=True)
    expected, _ = FSDPEngineWithLMHead.get_per_tensor_param(engine, layered_summon=True, base_sync_done=True)
    return {
        "sent": unflatten(config[LAYOUT], receiver.whole()),
        "pieces": len(pieces),
        "verl sends": {name: tensor.clone() for name, tensor in expected},
        "sent digests": config.get(DIGESTS),
        "sent rank": config["r"],
        "announced": config[CHECKSUM] == flat_adapter.adapter_checksum(receiver.whole()),
        "like verl's": sorted(config.keys() - {LAYOUT, DIGESTS, CHECKSUM}),
    }


def step(engine):
    """One update of the adapters; returns the norm of the gradient."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.module(TOKENS).logits.float().square().mean().backward()
        return engine.optimizer_step()


def optimizer_state(engine):
    states = engine.optimizer.state_dict()["state"].values()
    return [{key: whole(value) for key, value in state.items()} for state in states]


def resume(lora_only, first=None, second=None):
    """Two steps, a checkpoint after the first; the second again in a fresh engine that loaded it.

    `first` and `second`: options of the base of the two engines.
    """
    path = f"{OUT}/checkpoint-{'lora' if lora_only else 'full'}-{bool(first)}"
    engine = build("bf16", lora_only=lora_only, qerl=first)
    before = adapters(engine)
    found = {"norm": step(engine)}
    engine.save_checkpoint(path, global_step=1)
    saved, state = adapters(engine), optimizer_state(engine)
    found["moved"] = all(not torch.equal(before[name], saved[name]) for name in saved)
    step(engine)
    again = build("bf16", lora_only=lora_only, qerl=second)
    for parameter in (p for p in again.module.parameters() if p.requires_grad):
        torch.nn.init.zeros_(parameter)
    again.load_checkpoint(path, del_local_after_load=False)
    found["restored"] = {name: torch.equal(p, saved[name]) for name, p in adapters(again).items()}
    pairs = zip(optimizer_state(again), state, strict=True)
    found["optimizer"] = [all(torch.equal(a[key], b[key]) for key in b) for a, b in pairs]
    step(again)
    end = adapters(engine)
    found["same next step"] = all(torch.equal(p, end[name]) for name, p in adapters(again).items())
    file = Path(path) / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    found["keys"] = list(torch.load(file, weights_only=False))
    found["digests"] = digests(again) == digests(engine)
    return found


def stock():
    """Without our options the class does what verl's does."""
    engines = [build("bf16", cls=cls, packed=False) for cls in (ours.QerlFSDPEngine, FSDPEngineWithLMHead)]
    sent = [engine.get_per_tensor_param(layered_summon=True, base_sync_done=True) for engine in engines]
    return {
        "types": [module_types(engine) for engine in engines],
        "dtypes": [{name: p.dtype for name, p in engine.module.named_parameters()} for engine in engines],
        "logits": [logits(engine.module) for engine in engines],
        "sent": [sorted(peft_config) for _, peft_config in sent],
    }


TRITON = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}}


def options():
    """Options of the base reach it; what cannot be is refused."""
    engine = build("bf16", fused=False)
    found = {
        "peft": [logits(engine.module), logits(reference(engine, "bf16", fused=False))],
        "kinds": {False: set(module_types(engine).values()), True: set(module_types(build("bf16")).values())},
        "minmax": digests(build("bf16", qerl={"scale": "minmax"})),
        "ignore": sorted(digests(build("bf16", qerl={"ignore": ["lm_head", "re:.*mlp"]}))),
    }
    broadcast = dist.broadcast_object_list

    def broadcast_another(objects, src, **kwargs):
        if isinstance(objects[0], dict) and all(isinstance(value, str) for value in objects[0].values()):
            objects[0] = dict.fromkeys(objects[0], "0")
        else:
            broadcast(objects, src, **kwargs)

    dist.broadcast_object_list = broadcast_another
    moe = {"model": "moe", "use_liger": True}
    for name, arguments in {"liger": moe, "triton": TRITON, "another base on rank 0": {}}.items():
        try:
            build(**({"model": "bf16"} | arguments))
        except ValueError as error:
            found[name] = str(error)
    dist.broadcast_object_list = broadcast
    return found


def liger():
    """What a package that stands for Liger is asked, and the model at that time."""
    asked = []

    def patch(model, **kwargs):
        kinds = {type(module) for module in model.modules()}
        asked.append((kwargs, any(issubclass(kind, PackedLinear) for kind in kinds), hasattr(model, "peft_config")))

    package = "liger_kernel.transformers.monkey_patch"
    sys.modules[package] = SimpleNamespace(_apply_liger_kernel_to_instance=patch)
    sys.modules |= {"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.transformers": ModuleType("transformers")}
    build("bf16", use_liger=True)
    build("bf16")
    return asked


def registry():
    table = EngineRegistry._engines["language_model"]
    before = {name: dict(table[name]) for name in ("fsdp", "fsdp2")}
    found = {"cpu": EngineRegistry.get_engine_cls("language_model", "fsdp2") is ours.QerlFSDPEngine}
    ours.install(sys.modules["verl.workers.engine"])
    found["once"] = before == {name: dict(table[name]) for name in before}
    found["stock"] = table["fsdp2"]["cuda"] is FSDPEngineWithLMHead
    for vendor in ("nvidia", "other"):
        os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": vendor}
        found[vendor] = EngineRegistry.get_engine_cls("language_model", "fsdp").__name__
    return found


def log_probs(model):
    """Log-probs, entropies and the gradients of their sum: from the head, and from whole logits."""
    inputs = {"input_ids": TOKENS, "use_cache": False, "return_dict": True}
    labels = TOKENS.roll(-1, -1)
    found = {}
    for fused in (True, False):
        engine = build(model, use_fused_kernels=fused)
        with engine.train_mode(), torch.autocast("cpu", torch.bfloat16):
            engine.optimizer_zero_grad()
            if fused:
                out = engine.module(**inputs, temperature=0.7, calculate_entropy=True)
                values, entropy = out.log_probs, out.entropy
                assert engine.module(**inputs).logits.shape == (*TOKENS.shape, 64)
            else:
                log_p = (engine.module(**inputs).logits.float() / 0.7).log_softmax(-1)
                values, entropy = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
            (values + 0.1 * entropy).sum().backward()
            grads = {name: whole(p.grad) for name, p in engine.module.named_parameters() if p.grad is not None}
        found[fused] = {"log_probs": values.detach(), "entropy": entropy.detach(), "grads": grads}
    return found


SHARDED = {"shard": True}
RUNS = {
    "log-probs": lambda: log_probs("bf16"),
    "log-probs tied": lambda: log_probs("tied"),
    "sharded": lambda: base("bf16", **SHARDED),
    "sharded tied": lambda: base("tied", **SHARDED),
    "sharded full": lambda: resume(False, SHARDED, SHARDED),
    "sharded, then not": lambda: resume(True, SHARDED, None),
    "bf16": lambda: base("bf16"),
    "tied": lambda: base("tied"),
    "nvfp4": lambda: base("nvfp4"),
    "moe": lambda: base("moe"),
    "lora": lambda: resume(lora_only=True),
    "full": lambda: resume(lora_only=False),
    "stock": stock,
    "options": options,
    "registry": registry,
    "liger": liger,
}


def main(runs):
    """Run the cases that the command line names, of one rank, and save what they found."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    dist.init_process_group("gloo", init_method=f"file://{OUT}/store", rank=rank, world_size=world_size)
    torch.save({case: runs[case]() for case in CASES}, f"{OUT}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(RUNS)
