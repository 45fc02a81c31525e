"""The rollout of a full-precision actor, quantized at every weight sync: the actor's side.

Quantization happens here, while verl streams the weights: on the actor's GPU, one linear (or group that shares a scale)
at a time, so that a half or a quarter of bf16's bytes goes through CUDA IPC and the rollout only loads. Every rank of
verl sends whole tensors to the vLLM worker beside it, which takes its tensor-parallel share: scales are those of whole
rows, so any degree of tensor parallelism holds the same weights.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from verl_qerl.checkpoints.experts import number_of_experts
from verl_qerl.checkpoints.groups import linears_among
from verl_qerl.checkpoints.manifest import with_manifest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import quantize_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import WeightFormat
from verl_qerl.formats.reference import dequantize

# Set in a batch whose log-probs are to be those of the rounded weights.
ROUNDED = "verl_qerl_rounded_weights"
_BF16_BYTES = 2


def quantized_for_rollout(
    tensors: Iterable[tuple[str, torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
    form: WeightFormat,
    ignore: tuple[str, ...],
    tied: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is sent in one sync: the actor's tensors with its linears in `form`, and the manifest.

    Args:
        tensors: (name, tensor) of the actor's model, whole.
        shapes: The same names -> shapes.
        tied: Whether lm_head is the embedding, and so not sent twice.

    Raises:
        ValueError: A weight holds NaN or infinite values, or does not fit the format.
    """
    skipped = {"lm_head.weight"} if tied else set()
    linears = linears_among(shapes, ignore, "the actor", form)
    kept = ((name, tensor) for name, tensor in tensors if name not in skipped)
    numel = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in skipped)
    yield from with_manifest(quantize_stream(kept, linears, form), numel * _BF16_BYTES)


def round_group(weights: Mapping[str, torch.Tensor], form: WeightFormat) -> dict[str, torch.Tensor]:
    """The weights that the rollout holds, as dense tensors.

    Args:
        weights: module -> weight [N, K] of a group of linears.

    Returns:
        The same names; rounded to bf16 and to `form` as in a sync, in the dtype of the argument.
    """
    device = next(iter(weights.values())).device.type
    with torch.autocast(device, enabled=False):  # that of a CPU cannot join FP8 tensors
        packed = form.quantize_group({name: weight.to(torch.bfloat16) for name, weight in weights.items()})
        return {name: dequantize(packed[name], weight.dtype) for name, weight in weights.items()}


def check_unquantized(path: str, form: str) -> None:
    """Refuse with a CheckpointFormatError a model that is stored quantized, or has experts, which syncs do not pack."""
    source = open_source(path)
    if experts := number_of_experts(source.config):
        raise CheckpointFormatError(
            f"{path} is a mixture of {experts} experts, and model.lora_rank=0 trains all weights. With +rollout={form}"
            " models without experts are accepted for that. Set model.lora_rank, or leave +rollout out."
        )
    if source.format is not None:
        raise CheckpointFormatError(
            f"{path} is quantized already ({source.format}) and model.lora_rank=0 trains all weights. Unquantized"
            f" weights are needed with +rollout={form}. Point model.path at the original model, or set model.lora_rank."
        )
