"""Started by torchrun from test_nvfp4_linear_fsdp2_on_cpu.py: a packed LoRA model under FSDP2 against itself, whole."""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.modules import replace_linears
from verl_qerl.modules.convert import packed_linears
from verl_qerl.nvfp4.digest import weight_digest
from verl_qerl.nvfp4.reference import quantize


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=1, **sizes)).bfloat16()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, linear in replace_linears(model, lambda name: ".layers." in name).items():
        linear.fill(quantize(weights[f"{name}.weight"]))
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


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


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = build_model()
    model = copy.deepcopy(whole)
    batch = torch.randint(0, 64, (world, 16), generator=torch.Generator().manual_seed(2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    row = batch[rank : rank + 1]
    loss = model(input_ids=row, labels=row).loss
    loss.backward()
    result = {
        "loss": loss.item(),
        "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None},
        "digests": {name: weight_digest(linear.packed()) for name, linear in packed_linears(model)},
        "parameters": {name: (p.dtype, tuple(p.to_local().shape)) for name, p in model.named_parameters()},
    }
    losses, grads = run_whole(whole, batch)
    digests = {name: weight_digest(linear.packed()) for name, linear in packed_linears(whole)}
    torch.save({"sharded": result, "loss": losses[rank], "grads": grads, "digests": digests}, out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
