"""The actor's side of `qerl.base.share`: one copy of the packed base on a GPU, for the rollout of the same rank."""

import logging

import ray
import torch.nn as nn
from verl.utils.device import get_torch_device, set_expandable_segments

from verl_qerl.modules.placement.lending import Lender, meeting_place
from verl_qerl.modules.placement.shared_base import share_base
from verl_qerl.verl_plugin.weight_sync.run_name import run_name

logger = logging.getLogger(__name__)


def lend_base(module: nn.Module, rank: int) -> Lender:
    """Move the packed base where the rollout can map it, and wait for it to ask; raises as `share_base` and `Lender`.

    Args:
        rank: The actor's rank, which is the number of the rollout replica on its GPU.
    """
    # Expandable segments have no CUDA IPC handle; verl switches them on after the first weight sync.
    set_expandable_segments(False)
    get_torch_device().empty_cache()
    run = run_name() if ray.is_initialized() else "0"
    lender = Lender(share_base(module), meeting_place(run, rank))
    if rank == 0:
        logger.warning("packed base: one copy a GPU, %.2f GiB", lender.base.flat.numel() / 2**30)
    return lender
