"""A frozen linear whose weight stays packed, whatever the format.

The codes are called `weight`, as bitsandbytes does: PEFT then treats the module as the nn.Linear it is (`all-linear`,
device placement, state-dict keys), and needs no wrapper class of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from verl_qerl.formats.nvfp4_weight import Packed


class PackedLinear(nn.Linear):
    """y = x W^T + bias, W packed and frozen, gradients for x.

    The packed tensors are uint8 buffers, so that no `.to(dtype)` reaches them: FSDP2 of torch 2.11 refuses integer
    parameters. Every rank holds all of them. They are not persistent: a checkpoint names the base, it does not copy it.

    Attributes:
        block_size: Of the format; in_features must be a multiple of it.
        kind: Name of the format, for messages.
        dense: A copy of the weight, [N, K] bfloat16, that `decode` and `forward` read instead; None: there is none.
        persistent: Whether `state_dict` holds the packed tensors.
        weight: [N, ...] uint8, the codes.
        bias: [N] floating point, frozen, or None.
    """

    block_size = 1
    kind = ""
    weight: torch.Tensor  # type: ignore[assignment]
    persistent = False
    dense: torch.Tensor | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a dense weight
        self.in_features = in_features
        self.out_features = out_features
        for name, shape in self.byte_shapes(out_features, in_features).items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device), persistent=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Any:
        """An unfilled module of the same size, on the device of `linear`; the bias is taken over.

        Raises:
            ValueError: in_features is not a multiple of the block size.
        """
        if linear.in_features % cls.block_size:
            raise ValueError(
                f"in_features={linear.in_features} is not a multiple of {cls.block_size}. {cls.kind} cannot hold this"
                " weight. Leave the module out of the match."
            )
        return cls(linear.in_features, linear.out_features, linear.bias, linear.weight.device)

    @classmethod
    def byte_shapes(cls, N: int, K: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each buffer of bytes, for a weight [N, K]; `weight` among them."""
        raise NotImplementedError

    def fill(self, packed: Any) -> None:
        """Take over the tensors of a packed weight (no copy; its device becomes the module's).

        Raises:
            ValueError: The shapes or formats differ.
        """
        raise NotImplementedError

    def packed(self) -> Packed:
        """The weight, over the module's own storage."""
        raise NotImplementedError

    def decode_packed(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`, from the packed tensors."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """X W^T + bias, [..., N] of x's dtype, from the packed tensors."""
        raise NotImplementedError

    def check_shape(self, packed: Packed) -> None:
        """Refuse a weight of another shape.

        Raises:
            ValueError: The shapes differ.
        """
        if packed.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"the packed weight is {packed.shape}, the linear {(self.out_features, self.in_features)}."
                " Both must be (out_features, in_features). Check that config.json belongs to these weights."
            )

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`."""
        return self.decode_packed(dtype) if self.dense is None else self.dense.to(dtype)

    @classmethod
    def decode_siblings(cls, linears: Sequence[Any], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The weights of linears of this class with one input, up to three, as `decode` gives each."""
        return [linear.decode(dtype) for linear in linears]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], in the dtype of the input or of an active autocast."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        if self.dense is not None:
            return F.linear(input, self.dense.to(input.dtype), bias)
        return self.multiply(input, bias)

    def extra_repr(self) -> str:
        """As nn.Linear's, with the format."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.kind.lower()}"
