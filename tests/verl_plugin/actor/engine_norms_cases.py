"""Started by test_engine_norms_on_cpu.py, on one rank or more: engines that train norms besides the adapter.

python engine_norms_cases.py <folder of models> <folder for findings> <case> ...
"""

import torch
import torch.distributed as dist
from engine_cases import OUT, adapters, build, digests, logits, main, optimizer_state, reference, resume, step

from verl_qerl.algos.trained_norms import SHIFT, shifted_norm
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.config.base_options import LAYOUT
from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatReceiver
from verl_qerl.vllm_plugin.adapter.buffers import num_elements
from verl_qerl.vllm_plugin.noise.synced_norms import split_shifts

NORMS = {"train_norms": True}


def shifted(model="bf16", fused=True, **qerl):
    """An engine whose norms have learned something below the resolution of bf16 and above."""
    engine = build(model, qerl=NORMS | qerl, fused=fused)
    shifts = [parameter for name, parameter in engine.module.named_parameters() if name.endswith(SHIFT)]
    for index, parameter in enumerate(shifts):
        parameter.data.add_(0.1 if index % 2 else 1e-3)
    return engine


def expected_model(engine, model, fused=True):
    """LoRA on dequantized weights; the norms in float32, with the weights that the rollout sets, trained."""
    module = reference(engine, model, fused)
    for name, shift in adapters(engine).items():
        if name.endswith(SHIFT):
            norm = module.get_submodule(f"base_model.model.{shifted_norm(name)}")
            norm.weight = torch.nn.Parameter(norm.weight.data.float() + shift.bfloat16().float())
            norm.register_forward_pre_hook(lambda norm, args: (args[0].float(),))
            norm.register_forward_hook(lambda norm, args, out: out.bfloat16())
    return module


def sent(engine):
    """What the rollout gets: names of the adapter, and norm -> its shift."""
    params, config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
    receiver = FlatReceiver(num_elements(config[LAYOUT]), torch.bfloat16, torch.device("cpu"))
    receiver.add(list(params), is_last=True)
    layout, flat, shifts = split_shifts(config[LAYOUT], receiver.whole())
    return [name for name, _ in layout], flat.numel(), shifts, config.get("modules_to_save")


def gradients(module):
    """Norm -> gradient of its weight, or of what shifts it."""
    module(torch.arange(32).view(2, 16)).logits.float().square().mean().backward()
    found = {}
    for name, parameter in module.named_parameters():
        norm = shifted_norm(name) or name.removeprefix("base_model.model.").removesuffix(".weight")
        if parameter.grad is not None and "layernorm" in name:
            grad = parameter.grad
            found[norm] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float()
    return found


def forward(model="bf16", fused=True, **qerl):
    """What an engine with trained norms computes and sends, and what it should."""
    fresh = build(model, qerl=NORMS | qerl, fused=fused)
    untrained = expected_model(fresh, model, fused)
    found = {"untrained": logits(fresh.module), "expected untrained": logits(untrained)}
    found["plain"] = logits(build(model, qerl=qerl, fused=fused).module)
    with untrained.disable_adapter():
        found["expected base"] = logits(untrained)
    engine = shifted(model, fused, **qerl)
    expected = expected_model(engine, model, fused)
    found |= {"logits": logits(engine.module), "expected": logits(expected)}
    with engine.disable_adapter():
        found["base"] = logits(engine.module)
    found["trainable"] = {n: (p.dtype, p.shape) for n, p in engine.module.named_parameters() if p.requires_grad}
    optimized = {id(p): index for index, group in enumerate(engine.optimizer.param_groups) for p in group["params"]}
    found["groups"] = {n: optimized.get(id(p)) for n, p in engine.module.named_parameters() if p.requires_grad}
    found["digests"] = digests(engine)
    found |= {"sent": sent(engine), "held": adapters(engine)}
    found |= {"gradients": gradients(engine.module), "expected gradients": gradients(expected)}
    return found


def load(qerl, folder):
    engine = build("bf16", qerl=qerl)
    before = adapters(engine)
    try:
        engine.load_checkpoint(str(folder), del_local_after_load=False)
    except CheckpointFormatError as error:
        held = adapters(engine)
        return {"error": str(error), "unchanged": all(torch.equal(p, held[name]) for name, p in before.items())}
    return {"error": None, "adapters": adapters(engine), "optimizer": optimizer_state(engine)}


def save():
    """Checkpoints with the option and without, LoRA-only."""
    found = {}
    for name, qerl in (("on", NORMS), ("off", {})):
        engine = build("bf16", qerl=qerl)
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(f"{OUT}/{name}-{dist.get_world_size()}", global_step=2)
        found[name] = {"adapters": adapters(engine), "optimizer": optimizer_state(engine)}
    return found


def restored(ranks):
    return {
        "on, on": load(NORMS, f"{OUT}/on-{ranks}"),
        "on, off": load({}, f"{OUT}/on-{ranks}"),
        "off, on": load(NORMS, f"{OUT}/off-{ranks}"),
    }


RUNS = {
    "bf16": forward,
    "tied": lambda: forward("tied"),
    "moe": lambda: forward("moe"),
    "peft": lambda: forward(fused=False),
    "sharded": lambda: forward(shard=True),
    "lora": lambda: resume(True, NORMS, NORMS),
    "full": lambda: resume(False, NORMS, NORMS),
    "save": save,
    "restored from 1": lambda: restored(1),
    "restored from 2": lambda: restored(2),
}

if __name__ == "__main__":
    main(RUNS)
