"""Started by test_sequence_parallel_on_cpu.py on two ranks: engines whose ranks share sequences, and others.

python sequence_parallel_cases.py <folder of models> <folder for findings> <case> ...

The attention is a reference (reference_flash_attention.py); exchange, slices and sums over ranks are verl's own.
"""

from functools import partial

import reference_flash_attention
import torch
from engine_cases import build, digests, main, whole
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from verl_qerl.algos.acr import ACRConfig
from verl_qerl.verl_plugin.trainer.policy_loss import hand_over
from verl_qerl.verl_plugin.weight_sync.requantize import ROUNDED

# Two micro-batches of 21 and 24 tokens: one is padded for two ranks, and the cut goes through a sequence in both.
PROMPTS, ANSWERS = (3, 5, 2, 4), (9, 4, 12, 6)


def batch(**options):
    """What a data-parallel rank gets from verl's trainer."""
    generator = torch.Generator().manual_seed(5)
    lengths = [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    rows = [torch.randint(0, 64, (length,), generator=generator) for length in lengths]
    old, advantages = ([torch.randn(a, generator=generator) for a in ANSWERS] for _ in range(2))
    ones = [torch.ones(a, dtype=torch.long) for a in ANSWERS]
    fields = {
        "input_ids": rows,
        "position_ids": [torch.arange(length) for length in lengths],
        "prompts": [row[:p] for row, p in zip(rows, PROMPTS, strict=True)],
        "responses": [row[p:] for row, p in zip(rows, PROMPTS, strict=True)],
        "response_mask": ones,
        "loss_mask": ones,
        "old_log_probs": [0.3 * row - 4 for row in old],
        "rollout_log_probs": [0.5 * row - 4 for row in old],
        "advantages": advantages,
    }
    nested = {name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in fields.items()}
    data = TensorDict(nested, batch_size=len(rows))
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 0.7, "global_batch_size": 4}
    tu.assign_non_tensor(data, calculate_entropy=True, **settings | options)
    return data


def loss():
    """verl's, with ACR and the entropy in it."""
    acr = PolicyLossConfig(loss_mode="acr")
    settings = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2, "entropy_coeff": 0.1}
    return partial(hand_over, ACRConfig(), FSDPActorConfig(policy_loss=acr, **settings))


def engine_of(size, padded=False, attention=reference_flash_attention.NAME, settings=(), model="bf16", **options):
    return build(
        model,
        settings={"ulysses_sequence_parallel_size": size, **dict(settings)},
        use_remove_padding=not padded,
        override_config={"attn_implementation": attention},
        **options,
    )


def update(size, head=False, padded=False, batching=None, **options):
    """What a pass without gradients and one with them give.

    `head`: log-probs come from it, else from logits; `batching`: how the batch is divided, two sequences each else.
    """
    engine = engine_of(size, padded, use_fused_kernels=head, **options)
    flags = {"use_remove_padding": not padded, "use_fused_kernels": head, **(batching or {})}
    params, _ = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
    to_rollout = {name: tensor.clone() for name, tensor in params}
    seen = []
    watched = engine.module.get_submodule(
        next(n for n, m in engine.module.named_modules() if n.endswith("embed_tokens"))
    )
    watched.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    with engine.eval_mode():
        scored = engine.infer_batch(batch(**flags))["model_output"]
        rounded = engine.infer_batch(batch(**flags, **{ROUNDED: True}))["model_output"]
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch(**flags), loss())
        grads = {name: whole(p.grad) for name, p in engine.module.named_parameters() if p.grad is not None}
        norm = engine.optimizer_step()
    return {
        "log_probs": scored["log_probs"].values(),
        "rounded": rounded["log_probs"].values(),
        "entropy": scored["entropy"].values(),
        "grads": grads,
        "norm": norm,
        "loss": sum(output["loss"]),
        "tokens": seen[: len(PROMPTS) // 2],
        "checkpointing": engine.module.is_gradient_checkpointing,
        "digests": digests(engine),
        "sent": to_rollout,
    }


def both(**options):
    """Each rank with all sequences, as if it were alone; and the two with half of each micro-batch."""
    return {size: update(size, **options) for size in (1, 2)}


WHOLE = {"qerl": {"format": "int8", "has_adapter": False}, "settings": {"uaq_scale": 2.0}}
WHOLE |= {"lora_only": False, "dtype": None, "lora_rank": 0}
RUNS = {
    "padded": lambda: {1: update(1, padded=True, attention="sdpa")},
    "unpadded": lambda: {1: update(1, attention="sdpa")},
    "logits": lambda: both(),
    "head": lambda: both(head=True),
    "sharded": lambda: both(head=True, model="tied", qerl={"shard": True, "train_norms": True}),
    "kept": lambda: both(enable_gradient_checkpointing=False, fused=False),
    "moe": lambda: both(head=True, model="moe"),
    "whole": lambda: both(**WHOLE),
}

if __name__ == "__main__":
    reference_flash_attention.install()
    main(RUNS)
