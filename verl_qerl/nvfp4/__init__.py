"""The NVFP4 format: constants, reference arithmetic, checkpoints, digests."""

from verl_qerl.nvfp4.format import BLOCK_SIZE, PackedWeight
from verl_qerl.nvfp4.reference import DEFAULT_SCALE, SCALE_CHOICES, dequantize, quantize, quantize_group

__all__ = ["BLOCK_SIZE", "DEFAULT_SCALE", "SCALE_CHOICES", "PackedWeight", "dequantize", "quantize", "quantize_group"]
