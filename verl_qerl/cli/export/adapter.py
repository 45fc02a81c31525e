"""The trained adapter: checked against its configuration and its base, and written as PEFT reads it."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.record import write_json
from verl_qerl.checkpoints.writer import write_tensors
from verl_qerl.cli.export.fsdp_checkpoint import Checkpoint
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.modules.plain_adapter import check_plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """y = W x + scaling * B A x on each module.

    Attributes:
        r: Rank; 0 for a run of all weights, which has no factors.
        use_rslora: Whether the scaling is alpha / sqrt(r) (arXiv 2312.03732) and not alpha / r.
        targets: What names exactly these modules, for PEFT's `target_modules`.
        factors: module -> (A [r, in], B [out, r]).
    """

    r: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...]
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)

    @property
    def scaling(self) -> float:
        """What B A is multiplied by; 0 without an adapter."""
        if not self.r:
            return 0.0
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(factor.nbytes for factors in self.factors.values() for factor in factors)

    def delta(self, module: str, device: torch.device) -> torch.Tensor:
        """Scaling * B A of one module, [out, in] float32."""
        A, B = (factor.to(device, torch.float32) for factor in self.factors[module])
        return (B @ A) * self.scaling


def read_adapter(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """The adapter of a checkpoint.

    Args:
        shapes: module -> (out, in) of every matrix of the base.

    Raises:
        CheckpointFormatError: Tensors and configuration disagree, or the base has no place for a factor.
        ValueError: PEFT options that change what the adapter computes and are not known here.
    """
    if not checkpoint.factors:
        return Adapter(0, 0.0, False, (), {})
    options = checkpoint.record.adapter if checkpoint.record else checkpoint.lora_meta
    r, alpha = options.get("r"), options.get("lora_alpha")
    if not isinstance(r, int) or r < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointFormatError(
            f"the checkpoint does not say how its adapter is scaled: r={r!r}, lora_alpha={alpha!r} in "
            f"{checkpoint.folder}. Numbers above 0 are accepted. It lacks lora_train_meta.json or holds a damaged one."
        )
    for module, (A, B) in checkpoint.factors.items():
        _check_factors(module, A, B, r, shapes)
    if checkpoint.record:
        check_plain(options, "Save the model with PEFT itself.")
        _check_targets(checkpoint, options, shapes)  # which takes the base for the right one
    else:
        logger.warning(
            "the adapter is scaled by lora_alpha=%g over r=%d, as lora_train_meta.json of %s has it: verl leaves out"
            " use_rslora there, and cuts lora_alpha to a whole number. If the run went on from an adapter"
            " (model.lora_adapter_path) with the former or a fraction, the scaling is another one.",
            *(alpha, r, checkpoint.folder),
        )
    targets = _shortest_targets(set(checkpoint.factors), shapes)
    return Adapter(r, alpha, bool(options.get("use_rslora", False)), targets, checkpoint.factors)


def write_peft(folder: Path, adapter: Adapter, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, the dtype as trained.

    Args:
        folder: Exists and is empty.
        base: Name or directory of the base, for PEFT's `base_model_name_or_path`.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.r,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapter.targets),
    }
    write_json(folder / "adapter_config.json", config)
    tensors = {}
    for module, (A, B) in adapter.factors.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = A
        tensors[f"base_model.model.{module}.lora_B.weight"] = B
    write_tensors(folder / "adapter_model.safetensors", tensors)


def _shortest_targets(modules: set[str], shapes: Mapping[str, Any]) -> tuple[str, ...]:
    """Last parts such as q_proj where they name no other module, else names in full."""
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    return tuple(leaves) if {name for name in shapes if _is_named(name, leaves)} == modules else tuple(sorted(modules))


def _check_targets(checkpoint: Checkpoint, options: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    targets, excluded = options.get("target_modules"), options.get("exclude_modules")
    try:
        wanted = {name for name in shapes if _is_named(name, targets) and not _is_named(name, excluded)}
    except (TypeError, re.error) as error:
        raise CheckpointFormatError(
            f"the configuration of the adapter names no modules: target_modules={targets!r}, exclude_modules="
            f"{excluded!r} in {checkpoint.folder} ({error}). A list of names or a regular expression is accepted."
            " Export another step."
        ) from error
    differing = sorted(wanted ^ set(checkpoint.factors))
    if differing:
        name = differing[0]
        raise CheckpointFormatError(
            f"adapter and configuration name other targets: {name!r} is {'not ' if name in wanted else ''}in the shards"
            f" and {'' if name in wanted else 'not '}in target_modules={targets!r} ({len(differing)} differ). The same "
            "set is accepted. Take shards and records of one step."
        )


def _is_named(module: str, rules: Any) -> bool:
    """PEFT's rule: a regular expression for the whole name, or a list of names and their endings."""
    if not rules:
        return False
    if isinstance(rules, str):
        return re.fullmatch(rules, module) is not None
    return any(module == rule or module.endswith(f".{rule}") for rule in rules)


def _check_factors(
    module: str, A: torch.Tensor, B: torch.Tensor, r: int, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if A.ndim != 2 or B.ndim != 2 or A.shape[0] != r or B.shape[1] != r:
        raise CheckpointFormatError(
            f"the adapter has another rank than its configuration: {module!r} has A {tuple(A.shape)} and B "
            f"{tuple(B.shape)}, r={r}. A [r, in] and B [out, r] are accepted. Take shards and records of one step."
        )
    if (B.shape[0], A.shape[1]) != shapes.get(module):
        raise CheckpointFormatError(
            f"the adapter does not fit the base: {module!r} changes {(B.shape[0], A.shape[1])}, the base has"
            f" {shapes.get(module, 'no such linear')}. (out, in) must agree. Name the right base with --base"
            " (eval: --model)."
        )
    if not (bool(A.isfinite().all()) and bool(B.isfinite().all())):
        raise CheckpointFormatError(
            f"the adapter of {module!r} holds NaN or infinite values. Finite numbers are accepted. "
            "Export an earlier step."
        )
