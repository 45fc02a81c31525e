"""Fast versions of nvfp4/reference.py. The plain-torch reference runs where there is no CUDA device."""

from verl_qerl.kernels.dequantize import dequantize
from verl_qerl.kernels.linear import nvfp4_linear

__all__ = ["dequantize", "nvfp4_linear"]
