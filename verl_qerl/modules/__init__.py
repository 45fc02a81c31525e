"""nn.Modules over the kernels."""

from verl_qerl.modules.convert import replace_linears
from verl_qerl.modules.nvfp4_linear import NVFP4Linear

__all__ = ["NVFP4Linear", "replace_linears"]
