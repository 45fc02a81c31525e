"""Checks that a linear of vLLM holds the weight that was sent, whatever layout its kernel stores.

Every kernel has its own layout, sharded and fused. So the linear is applied to the rows of a unit matrix, which gives
back the weight. With one number in a row nothing is summed, and dynamic quantization of activations maps that number to
the largest one of the format, so the result is the weight up to rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

_ROWS = 1024  # of the unit matrix at a time
# bf16 rounds the answer by 2**-8 at most, and the scale of the activations is a float32. The nearest other weight is
# one code of INT8 away, 1 / 127, of which the rounding leaves 0.00399: still above.
_RELATIVE, _ABSOLUTE = 1.01 * 2.0**-8, 1e-30


@torch.no_grad()
def holds(linear: Any, members: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel of `linear` multiplies by these weights.

    Args:
        linear: A linear of vLLM whose weights have been processed.
        members: The dense weights [N_i, K] float32 of the linears of a checkpoint that it consists of, in order, whole.
    """
    expected = _shard(linear, members)
    K = expected.shape[1]
    for start in range(0, K, _ROWS):
        end = min(start + _ROWS, K)
        unit = torch.zeros(end - start, K, dtype=torch.bfloat16, device=expected.device)
        unit[torch.arange(end - start), torch.arange(start, end)] = 1
        found = linear.quant_method.apply(linear, unit, None).float()
        wanted = expected[:, start:end].t()
        # Not `>`: NaN must not pass.
        if not bool(((found - wanted).abs() <= wanted.abs() * _RELATIVE + _ABSOLUTE).all()):
            return False
    return True


def _shard(linear: Any, members: Sequence[torch.Tensor]) -> torch.Tensor:
    """The part of the weights that this rank holds."""
    rank, size = linear.tp_rank, linear.tp_size
    if size == 1:
        return torch.cat(list(members))
    if isinstance(linear, RowParallelLinear):
        return torch.cat([member.chunk(size, dim=1)[rank] for member in members])
    parts = []
    for i, member in enumerate(members):
        copies = linear.num_kv_head_replicas if isinstance(linear, QKVParallelLinear) and i > 0 else 1
        parts.append(member.chunk(size // copies)[rank // copies])
    return torch.cat(parts)
