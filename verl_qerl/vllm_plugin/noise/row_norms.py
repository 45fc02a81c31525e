"""A norm of vLLM that takes each token's weight from a table: the clean one, or one with a draw of the noise.

Tables are changed in place, so that captured CUDA graphs and compiled code see it.
"""

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from verl_qerl import upstream
from verl_qerl.algos.aqn import NUM_DRAWS
from verl_qerl.kernels.rollout.elementwise import add_rms_norm, rms_norm
from verl_qerl.vllm_plugin import hosts


class RowRMSNorm(RMSNorm):
    """vLLM's RMSNorm with a table of weights; made by `give_table`.

    Attributes:
        table: [1 + NUM_DRAWS, K] float32. Row 0 is the clean weight, and the storage of `weight`.
        ids: [M] int32, the row of each token of the batch.
    """

    table: torch.Tensor
    ids: torch.Tensor

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalized x; with a residual, the normalized sum and the sum."""
        if residual is None:
            return rms_norm(x, self.table, self.variance_epsilon, self.ids)
        return add_rms_norm(x, residual, self.table, self.variance_epsilon, self.ids)


def is_plain(norm: Any) -> bool:
    """Whether a module is vLLM's RMSNorm, with a weight and over whole rows."""
    return type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None


def give_table(name: str, norm: Any, ids: torch.Tensor) -> torch.Tensor:
    """Make a norm of vLLM a RowRMSNorm, all rows of its table the weight it has.

    Args:
        norm: With a float32 weight, before anything is compiled or captured.
        ids: [M] int32, filled before each step, for at least as many tokens as a step has.

    Returns:
        [NUM_DRAWS, K] float32: the rows with noise, to be written in place.

    Raises:
        ValueError: The norm computes something else than vLLM's RMSNorm.
    """
    if not is_plain(norm):
        raise ValueError(
            f"aqn.draw other than batch does not go together with {name}, which is a {type(norm).__name__} with an"
            " arithmetic of its own. Accepted are norms that are vLLM's RMSNorm over whole rows. Set `+aqn.draw=batch`"
            " or name other norms with `+aqn.targets=[...]`."
        )
    table = norm.weight.data.repeat(1 + NUM_DRAWS, 1)
    norm.weight.data = table[0]
    by_rows = upstream.swap_class(hosts.RMS_NORM, norm, RowRMSNorm)
    by_rows.table, by_rows.ids = table, ids
    return table[1:]
