"""Started by conftest.py, on one rank or more: trains adapters with verl's FSDP2 engine and saves real checkpoints.

python train_checkpoint.py <folder of models> <folder for checkpoints> <case> ...

A case is <engine>-<model>-<full or lora>; the engine `int8` has its base in that format, `uaq` trains all weights,
`norms` is ours with norms trained.
Beside each checkpoint `<case>.pt` holds what the engine computes.
"""

import os
import sys

import torch
import torch.distributed as dist
import verl  # noqa: F401  (its plugins come with it, ours among them)
from qerl_testing import TOKENS, log_probs
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.modules.convert import packed_weights
from verl_qerl.verl_plugin.actor.engine import QerlFSDPEngine
from verl_qerl.verl_plugin.config.base_options import QerlFSDPEngineConfig

MODELS, OUT, *CASES = sys.argv[1:]


def build(kind, model, contents):
    torch.manual_seed(1)
    model_config = HFModelConfig(
        path=f"{MODELS}/{model}",
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        lora_rank=0 if kind == "uaq" else 8,
        lora_alpha=16,
    )
    settings = {"strategy": "fsdp2", "use_torch_compile": False, "model_dtype": "bf16"}
    if kind in ("ours", "norms", "int8"):
        qerl = {"format": kind} if kind == "int8" else {"scale": "minmax", "train_norms": kind == "norms"}
        cls, config = QerlFSDPEngine, QerlFSDPEngineConfig(**settings, qerl=qerl)
    elif kind == "uaq":
        cls, config = QerlFSDPEngine, QerlFSDPEngineConfig(**settings | {"model_dtype": "fp32"}, uaq_scale=1.5)
    else:
        cls, config = FSDPEngineWithLMHead, FSDPEngineConfig(**settings)
    optimizer = FSDPOptimizerConfig(lr=2e-3 if kind == "uaq" else 2e-2, total_training_steps=10, lr_warmup_steps=0)
    engine = cls(model_config, config, optimizer, CheckpointConfig(save_lora_only=contents == "lora"))
    engine.initialize()
    return engine


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def run(case):
    engine = build(*case.split("-"))
    before = log_probs(engine.module, TOKENS)
    for _ in range(4):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.module(TOKENS, labels=TOKENS).loss.backward()
            engine.optimizer_step()
    engine.save_checkpoint(f"{OUT}/{case}/global_step_4/actor", global_step=4)
    trained = {name: whole(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    found = {"adapter": trained, "before": before, "log_probs": log_probs(engine.module, TOKENS)}
    found["digests"] = {name: weight_digest(weight) for name, weight in packed_weights(engine.module)}
    if dist.get_rank() == 0:
        torch.save(found, f"{OUT}/{case}.pt")


if __name__ == "__main__":
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    dist.init_process_group("gloo", init_method=f"file://{OUT}/store{world_size}", rank=rank, world_size=world_size)
    for case in CASES:
        run(case)
    dist.destroy_process_group()
