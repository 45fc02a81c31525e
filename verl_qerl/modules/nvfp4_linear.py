"""A frozen linear whose weight stays packed.

The codes are called `weight`, as bitsandbytes does: PEFT then treats the module as the nn.Linear it is (`all-linear`,
device placement, state-dict keys), and needs no wrapper class of its own.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from verl_qerl.kernels.dequantize import dequantize_nvfp4
from verl_qerl.kernels.linear import nvfp4_linear
from verl_qerl.nvfp4.format import BLOCK_SIZE, PackedWeight


class NVFP4Linear(nn.Linear):
    """y = x W^T + bias, W in NVFP4 and frozen, gradients for x.

    The packed tensors are uint8 buffers, so that no `.to(dtype)` reaches them: FSDP2 of torch 2.11 refuses integer
    parameters. Every rank holds all of them. They are not persistent: a checkpoint names the base, it does not copy it.

    Attributes:
        dense: A copy of the weight, [N, K] bfloat16, that `decode` and `forward` read instead; None: there is none.
        persistent: Whether `state_dict` holds the packed tensors.
        weight: [N, K / 2] uint8, the codes.
        weight_scale: [N, K / 16] uint8, the bytes of float8_e4m3fn.
        weight_decode_scale: [4] uint8, the bytes of one float32.
        bias: [N] floating point, frozen, or None.
    """

    weight: torch.Tensor  # type: ignore[assignment]
    weight_scale: torch.Tensor
    weight_decode_scale: torch.Tensor
    persistent = False
    dense: torch.Tensor | None = None
    _recomputed: torch.Tensor | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a dense weight
        self.in_features = in_features
        self.out_features = out_features
        for name, shape in (
            ("weight", (out_features, in_features // 2)),
            ("weight_scale", (out_features, in_features // BLOCK_SIZE)),
            ("weight_decode_scale", (4,)),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device), persistent=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "NVFP4Linear":
        """An unfilled module of the same size, on the device of `linear`; the bias is taken over.

        Raises:
            ValueError: in_features is not a multiple of 16.
        """
        if linear.in_features % BLOCK_SIZE:
            raise ValueError(
                f"in_features={linear.in_features} is not a multiple of {BLOCK_SIZE}. NVFP4 cannot hold this weight."
                " Leave the module out of the match."
            )
        return cls(linear.in_features, linear.out_features, linear.bias, linear.weight.device)

    def fill(self, packed: PackedWeight) -> None:
        """Take over the tensors of `packed` (no copy; its device becomes the module's).

        Raises:
            ValueError: The shapes differ.
        """
        self.check_shape(packed)
        self.weight = packed.codes
        self.weight_scale = packed.block_scale.view(torch.uint8)
        self.weight_decode_scale = packed.global_decode_scale.reshape(1).view(torch.uint8)

    def check_shape(self, packed: PackedWeight) -> None:
        """Refuse a weight of another shape.

        Raises:
            ValueError: The shapes differ.
        """
        if packed.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"the packed weight is {packed.shape}, the linear {(self.out_features, self.in_features)}."
                " Both must be (out_features, in_features). Check that config.json belongs to these weights."
            )

    def packed(self) -> PackedWeight:
        """The weight as a PackedWeight over the module's own storage."""
        codes, scale, decode_scale = self.tensors()
        return PackedWeight(codes, scale.view(torch.float8_e4m3fn), decode_scale.view(torch.float32).reshape(()))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weight, weight_scale, weight_decode_scale)."""
        return self.weight, self.weight_scale, self.weight_decode_scale

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`."""
        if self.dense is not None:
            return self.dense.to(dtype)
        codes, scale, decode_scale = self.tensors()
        return dequantize_nvfp4(codes, scale, decode_scale.view(torch.float32), dtype)

    def decode_forward(self, dtype: torch.dtype) -> torch.Tensor:
        """As `decode`; within a checkpoint's recomputation, kept for the backward pass that follows at once."""
        weight = self.decode(dtype)
        if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint finds out: a backward pass is running
            self._recomputed = weight
        return weight

    def decode_backward(self, dtype: torch.dtype) -> torch.Tensor:
        """As `decode`, or what the recomputation kept, which is then released."""
        weight, self._recomputed = self._recomputed, None
        return weight if weight is not None and weight.dtype == dtype else self.decode(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], in the dtype of the input or of an active autocast."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        if self.dense is not None:
            return F.linear(input, self.dense.to(input.dtype), bias)
        codes, scale, decode_scale = self.tensors()
        return nvfp4_linear(input, codes, scale, decode_scale.view(torch.float32), bias)

    def extra_repr(self) -> str:
        """As nn.Linear's, with the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, nvfp4"
