"""A quantized checkpoint as the dense one that it stands for, to be quantized anew.

Also those that neither actor nor rollout computes with as they are: NVFP4 with global scales of its own in each linear
of a fused group, and FP8 with a scale for a whole weight or for blocks of it (DeepSeek's, compressed-tensors').
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_qerl.checkpoints.described import check_arguments, described
from verl_qerl.checkpoints.source import Source, stored_tensors
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import get_format, reference
from verl_qerl.formats.ignore import is_linear_weight
from verl_qerl.formats.nvfp4_layout import from_tensors, is_activation_scale
from verl_qerl.formats.tensor_spec import TensorSpec

_CODES = ("weight_packed", "weight")
# Tensors that only a quantized weight has.
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_packed")
_CODES_PER_BYTE = {"nvfp4": 2, "mxfp4": 2}


@dataclass(frozen=True)
class DenseSource(Source):
    """The checkpoint `origin`, its quantized weights [N, K] in bf16: code times scale in float32, rounded once.

    Attributes:
        modules: Names of the modules that `origin` holds quantized.
    """

    origin: Source
    modules: frozenset[str]

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Source.tensors`. Memory: the parts of a weight that are waiting for each other.

        Raises:
            CheckpointFormatError: A weight lacks a tensor, or has one that is not known.
        """
        wanted: dict[str, set[str]] = {}
        for name in self.origin.files:
            module, _, part = name.rpartition(".")
            if module in self.modules and part != "bias" and not is_activation_scale(name):
                wanted.setdefault(module, set()).add(part)
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in stored_tensors(self.origin, device):
            module, _, part = name.rpartition(".")
            if part in wanted.get(module, ()):
                held = waiting.setdefault(module, {})
                held[part] = tensor
                if set(held) == wanted[module]:
                    yield f"{module}.weight", _dense(self.origin, module, waiting.pop(module))
            elif not is_activation_scale(name):
                yield name, tensor


def dense_source(source: Source) -> DenseSource:
    """The dense checkpoint that a quantized one stands for; only headers are read.

    Raises:
        CheckpointFormatError: Its blocks are others than the format has here, or a weight has no codes.
    """
    form = source.format or ""
    if form in _CODES_PER_BYTE:
        check_arguments(str(source.path), source.config, get_format(form).config(), form)
    modules = {name.rpartition(".")[0] for name in source.files if name.endswith(_SCALES)}
    specs = {}
    for name, spec in source.specs.items():
        module, _, part = name.rpartition(".")
        if module not in modules or part == "bias":
            if not is_activation_scale(name):
                specs[name] = spec
        elif part in _CODES:
            N, K = spec.shape
            specs[f"{module}.weight"] = TensorSpec("BF16", (N, K * _CODES_PER_BYTE.get(form, 1)))
    lost = sorted(name for name in modules if f"{name}.weight" not in specs)
    if lost:
        raise CheckpointFormatError(
            f"{source.path} holds scales and no codes of {lost[0]!r}. Both are needed. Download the model again."
        )
    files = {name: source.files.get(name, "") for name in specs}
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    return DenseSource(source.path, config, "bf16", files, specs, source, frozenset(modules))


def _dense(source: Source, module: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if source.format == "nvfp4":
        return reference.dequantize(from_tensors(module, parts, source.layout))
    scale_name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    codes_name = "weight_packed" if source.format == "mxfp4" else "weight"
    if set(parts) != {codes_name, scale_name}:
        raise CheckpointFormatError(
            f"{module!r} of {source.path} is stored as {', '.join(sorted(parts))}. Accepted are {codes_name} and"
            f" {scale_name}. Quantize the original bf16 model."
        )
    if source.format == "mxfp4":
        return get_format("mxfp4").dequantize(parts)
    codes, scale = parts["weight"], parts[scale_name].float()
    return (codes.float() * _spread(source, module, scale, codes.shape)).bfloat16()


def _spread(source: Source, module: str, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales of a whole weight, of its channels or of its blocks, as they multiply codes [N, K]."""
    N, K = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if tuple(scale.shape) in ((N,), (N, 1)):
        return scale.reshape(N, 1)
    block = _block(described(source.config))
    if block and tuple(scale.shape) == (-(-N // block[0]), -(-K // block[1])):
        return scale.repeat_interleave(block[0], dim=0)[:N].repeat_interleave(block[1], dim=1)[:, :K]
    raise CheckpointFormatError(
        f"{module!r} of {source.path} has scales {tuple(scale.shape)} for a weight {(N, K)}, blocks {block}. Accepted"
        " are one, one a row, or one a block. Quantize the original bf16 model."
    )


def _block(found: dict[str, Any]) -> list[int] | None:
    if found.get("weight_block_size"):
        return found["weight_block_size"]
    groups = (found.get("config_groups") or {}).values()
    return next((size for group in groups if (size := (group.get("weights") or {}).get("block_structure"))), None)


def left_dense(source: DenseSource, ignore: Sequence[str]) -> list[str]:
    """The linears that the quantized checkpoint left as they are and `ignore` does not name."""
    return sorted(
        name.removesuffix(".weight")
        for name, spec in source.specs.items()
        if is_linear_weight(name, spec.shape, ignore) and name.removesuffix(".weight") not in source.modules
    )
