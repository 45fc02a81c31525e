"""A quantized checkpoint as the dense one that it stands for, to be quantized anew.

Also those that neither actor nor rollout computes with as they are: NVFP4 with global scales of its own in each linear
of a fused group, and FP8 with a scale for a whole weight or for blocks of it (DeepSeek's, compressed-tensors').
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl_qerl.checkpoints.quantization_config import check_arguments, described
from verl_qerl.checkpoints.source import Source, whole_weights
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, WeightFormat, reference
from verl_qerl.formats.nvfp4_layout import is_activation_scale
from verl_qerl.formats.tensor_spec import TensorSpec

_CODES = ("weight_packed", "weight")
# Tensors that only a quantized weight has.
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_packed")


@dataclass(frozen=True)
class DenseSource(Source):
    """The checkpoint `origin`, its quantized weights [N, K] in bf16: code times scale in float32, rounded once.

    Attributes:
        modules: Names of the modules that `origin` holds quantized.
    """

    origin: Source
    modules: frozenset[str]

    def tensors(self, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """See `Source.tensors`. Memory: the parts of incomplete weights.

        Raises:
            CheckpointFormatError: A weight lacks a tensor, or has one that is not known.
        """
        for name, item in whole_weights(self.origin, self.modules, device, drops_activation_scales=True):
            if isinstance(item, torch.Tensor):
                yield name, item
            else:
                yield f"{name}.weight", _dense(self.origin, name, item)


def dense_source(source: Source) -> DenseSource:
    """The dense checkpoint that a quantized one stands for; only headers are read.

    Raises:
        CheckpointFormatError: Its blocks are others than the format has here, or a weight has no codes.
    """
    form = _in_blocks(source)
    if form:
        check_arguments(str(source.path), source.config, form)
    modules = {name.rpartition(".")[0] for name in source.files if name.endswith(_SCALES)}
    specs = {}
    for name, spec in source.specs.items():
        module, _, part = name.rpartition(".")
        if module not in modules or part == "bias":
            if not is_activation_scale(name):
                specs[name] = spec
        elif part in _CODES:
            N, K = spec.shape
            specs[f"{module}.weight"] = TensorSpec("BF16", (N, K * (form.codes_per_byte if form else 1)))
    lost = sorted(name for name in modules if f"{name}.weight" not in specs)
    if lost:
        raise CheckpointFormatError(
            f"{source.path} holds scales and no codes of {lost[0]!r}. Both are needed. Download the model again."
        )
    files = {name: source.files.get(name, "") for name in specs}
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    return DenseSource(source.path, config, None, "bf16", files, specs, source, frozenset(modules))


def _dense(source: Source, module: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if form := _in_blocks(source):
        return reference.dequantize(form.from_tensors(f"{module!r} of {source.path}", parts, source.layout))
    scale_name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    if set(parts) != {"weight", scale_name}:
        raise CheckpointFormatError(
            f"{module!r} of {source.path} is stored as {', '.join(sorted(parts))}. Accepted are weight and"
            f" {scale_name}. Quantize the original bf16 model."
        )
    scale = parts[scale_name].float()
    return (parts["weight"].float() * _spread(source, module, scale, parts["weight"].shape)).bfloat16()


def _in_blocks(source: Source) -> WeightFormat | None:
    """The format of a source whose blocks are the format's own; those of INT8 and FP8 may be any."""
    form = FORMATS.get(source.format or "")
    return form if form and form.block_size > 1 else None


def _spread(source: Source, module: str, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales of a whole weight, of its channels or of its blocks, as they multiply codes [N, K]."""
    N, K = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if tuple(scale.shape) in ((N,), (N, 1)):
        return scale.reshape(N, 1)
    block = _block(described(source.config))
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if is_block and tuple(scale.shape) == (-(-N // block[0]), -(-K // block[1])):
        return scale.repeat_interleave(block[0], dim=0)[:N].repeat_interleave(block[1], dim=1)[:, :K]
    raise CheckpointFormatError(
        f"{module!r} of {source.path} has scales {tuple(scale.shape)} for a weight {(N, K)}, blocks {block}. Accepted"
        " are one, one a row, or one a block. Quantize the original bf16 model."
    )


def _block(found: dict[str, Any]) -> Any:
    if found.get("weight_block_size"):
        return found["weight_block_size"]
    groups = (found.get("config_groups") or {}).values()
    return next((size for group in groups if (size := (group.get("weights") or {}).get("block_structure"))), None)
