"""Started on two ranks by test_nvfp4_linear_fsdp2_on_cpu.py: a packed LoRA model under FSDP2 against itself, whole."""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from qerl_testing import foreach_copy_as_cuda, quantize, random_qwen2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.modules.adapted_linear import fuse_adapters
from verl_qerl.modules.convert import packed_linears, replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear

torch._foreach_copy_ = foreach_copy_as_cuda


def build_model(kind: type[NVFP4Linear] = NVFP4Linear, fused: bool = False) -> torch.nn.Module:
    model = random_qwen2(hidden_size=64, intermediate_size=96)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, linear in replace_linears(model, lambda name: ".layers." in name, kind).items():
        linear.fill(quantize(weights[f"{name}.weight"]))
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if fused:
        fuse_adapters(model)
    return model.train()


def shard(model: torch.nn.Module, reshard: bool = True) -> torch.nn.Module:
    """FSDP2 as verl puts it around the layers and the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def findings(model: torch.nn.Module, row: torch.Tensor) -> dict:
    loss = model(input_ids=row, labels=row).loss
    loss.backward()
    return {
        "loss": loss.item(),
        "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None},
        "digests": {name: weight_digest(linear.packed()) for name, linear in packed_linears(model)},
        "parameters": {name: (p.dtype, tuple(p.to_local().shape)) for name, p in model.named_parameters()},
        "held": sum(t.numel() * t.element_size() for t in local_tensors(model)),
    }


def local_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank holds of every NVFP4Linear, biases left out."""
    modules = [module for _, module in packed_linears(model)]
    parameters = [p.to_local() for module in modules for name, p in module.named_parameters() if name != "bias"]
    return [*parameters, *(buffer for module in modules for buffer in module.buffers())]


def run_whole(model: torch.nn.Module, batch: torch.Tensor) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the rows one by one, and the mean of their gradients."""
    losses, grads = [], []
    for row in batch:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=row[None], labels=row[None]).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return losses, {name: sum(part[name] for part in grads) / len(grads) for name in grads[0]}


def moved(row: torch.Tensor) -> dict:
    """After the way of verl's offload, a state of the adapters alone, and what a state holds."""
    model = shard(build_model(ShardedNVFP4Linear, fused=True))
    model.to("cpu", non_blocking=True)
    for _, linear in packed_linears(model):
        linear.persistent = False
    state = model.state_dict()
    model.load_state_dict(state)
    return {**findings(model, row), "keys": list(state)}


def main(out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    whole = build_model()
    batch = torch.randint(0, 64, (world, 16), generator=torch.Generator().manual_seed(2))
    row = batch[rank : rank + 1]
    result = findings(shard(copy.deepcopy(whole)), row)
    of_parts = {}
    for fused in (False, True):
        of_parts[f"replicated {fused}"] = findings(shard(build_model(fused=fused)), row)
        of_parts[f"sharded {fused}"] = findings(shard(build_model(ShardedNVFP4Linear, fused)), row)
    checkpointed = shard(build_model(ShardedNVFP4Linear, fused=True), reshard=False)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.enable_input_require_grads()
    of_parts["checkpointed"] = findings(checkpointed, row)
    of_parts["again"] = findings(checkpointed, row)
    losses, grads = run_whole(whole, batch)
    digests = {name: weight_digest(linear.packed()) for name, linear in packed_linears(whole)}
    of_parts["moved"] = moved(row)
    torch.save(
        {"parts": of_parts, "sharded": result, "loss": losses[rank], "grads": grads, "digests": digests},
        out / f"{rank}.pt",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
