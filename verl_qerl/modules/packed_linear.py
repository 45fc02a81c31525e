"""A frozen linear whose weight stays packed, whatever the format.

The codes are called `weight`, as bitsandbytes does: PEFT then treats the module as the nn.Linear it is (`all-linear`,
device placement, state-dict keys), and needs no wrapper class of its own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn

from verl_qerl.formats import PackedWeight, WeightFormat
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format
from verl_qerl.kernels.actor.linear import frozen_linear

_BUFFERS = ("weight", "weight_scale", "weight_decode_scale")  # in the order of `PackedWeight.tensors`


class PackedLinear(nn.Linear):
    """y = x W^T + bias, W packed and frozen, gradients for x.

    The packed tensors are uint8 buffers, so that no `.to(dtype)` reaches them: FSDP2 of torch 2.11 refuses integer
    parameters. Every rank holds all of them. They are not persistent: a checkpoint names the base, it does not copy it.

    Attributes:
        persistent: Whether `state_dict` holds the packed tensors.
        weight: [N, ...] uint8, the bytes of the codes.
        weight_scale: [N, ...] uint8, those of the scales.
        weight_decode_scale: [4] uint8, those of the global scale, where the format has one.
        bias: [N] floating point, frozen, or None.
    """

    form: ClassVar[WeightFormat]
    weight: torch.Tensor  # type: ignore[assignment]
    weight_scale: torch.Tensor
    weight_decode_scale: torch.Tensor
    persistent = False

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self._allocate(device)

    def _allocate(self, device: torch.device | str) -> None:
        for name, spec in zip(_BUFFERS, self.form.held(self.out_features, self.in_features), strict=False):
            self.register_buffer(name, torch.zeros(_in_bytes(spec), dtype=torch.uint8, device=device), persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str = "linear") -> Any:
        """An unfilled module of the same size, on the device of `linear`; the bias is taken over.

        Raises:
            ValueError: in_features is not a multiple of the block size.
        """
        cls.form.check_in_features(name, linear.in_features)
        return cls(linear.in_features, linear.out_features, linear.bias, linear.weight.device)

    def leave_out_of_checkpoints(self) -> None:
        """Leave the packed tensors out of `state_dict` from now on."""
        self.persistent = False

    def fill(self, packed: PackedWeight) -> None:
        """Take over the tensors of a packed weight of this format and size (no copy; its device becomes ours)."""
        for name, spec, tensor in zip(_BUFFERS, self.form.held(*packed.shape), packed.tensors, strict=False):
            setattr(self, name, (tensor if spec.shape else tensor.reshape(1)).view(torch.uint8))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The buffers of bytes."""
        return tuple(getattr(self, name) for name in _BUFFERS[: len(self.form.parts)])

    def held(self) -> tuple[torch.Tensor, ...]:
        """`PackedWeight.tensors`, over the module's own storage."""
        specs = self.form.held(self.out_features, self.in_features)
        return tuple(
            data.view(DTYPES[spec.dtype]).view(spec.shape) for data, spec in zip(self.tensors(), specs, strict=True)
        )

    def packed(self) -> PackedWeight:
        """The weight, over the module's own storage."""
        return PackedWeight(self.form, self.held())

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`: rounded once more where the format has a float32 scale (INT8, FP8)."""
        return dequantize_format(self.form, self.held(), dtype)

    @classmethod
    def decode_siblings(cls, linears: Sequence[Any], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The weights of linears of this class with one input, up to three, as `decode` gives each."""
        return [linear.decode(dtype) for linear in linears]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], in the dtype of the input or of an active autocast."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return frozen_linear(input, self.decode, None if self.bias is None else self.bias.to(input.dtype))

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the format."""
        return f"{super().extra_repr()}, {self.form.name}"


def _in_bytes(spec: TensorSpec) -> tuple[int, ...]:
    *rows, last = spec.shape or (1,)
    return (*rows, last * DTYPES[spec.dtype].itemsize)
