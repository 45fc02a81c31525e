"""Linears of an engine that computes with the actor's packed base (`qerl.base.share`) and holds none of its own.

The parameters stay on the meta device while the model is made; after loading they are views of the actor's memory,
which sleep mode knows nothing of: a sleeping engine keeps them, and has nothing to copy to the host.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.kernels.rollout.repacking import Repacked, undo_repack
from verl_qerl.modules.placement.lending import Borrowed, borrow, meeting_place
from verl_qerl.vllm_plugin.options import STOCK_LINEAR, asked_of_vllm, rollout_options
from verl_qerl.vllm_plugin.weights.linear import Everywhere, hold_repacked, multiply, plan_for
from verl_qerl.vllm_plugin.weights.plans import why_not

logger = logging.getLogger(__name__)

OPTION = "share_base"  # of model_loader_extra_config
_BORROWED = "verl_qerl_borrowed"


def is_borrowing(vllm_config: Any) -> bool:
    """Whether an engine is to compute with the actor's base."""
    load_config = getattr(vllm_config, "load_config", None)
    options = getattr(load_config, "model_loader_extra_config", None)
    return bool(options.get(OPTION)) if isinstance(options, Mapping) else False


def borrowed_by(model: torch.nn.Module) -> Borrowed | None:
    """The base that a loaded model computes with, if it is another process's."""
    return getattr(model, _BORROWED, None)


class BorrowedNVFP4(CompressedTensorsW4A4Fp4):
    """Weight-only NVFP4 over tiles that lie in another process's memory.

    Raises:
        ValueError: The engine is spread over GPUs, told to use Marlin, or on a GPU that our kernels do not take.
    """

    def __init__(self) -> None:
        # vLLM's __init__ chooses a kernel. The rest of it is these three attributes.
        config = get_current_vllm_config_or_none()
        options = rollout_options(config)
        asked = asked_of_vllm(config)
        num_ranks = config.parallel_config.world_size_across_dp if config is not None else 1
        problem = None
        if num_ranks != 1:
            problem = f"the rollout has {num_ranks} GPUs, each with a part of the base"
        elif options.linear == "stock":
            problem = f"{STOCK_LINEAR} has a layout of its own"
        elif asked:
            problem = f"{asked} asks for kernels of vLLM, whose layouts are others"
        elif torch.cuda.is_available():
            problem = why_not()
        if problem:
            raise ValueError(
                f"qerl.base.share=true is not possible: {problem}. One Hopper GPU a rollout replica is"
                " accepted, with linear=auto. Leave +qerl.base.share out."
            )
        self.use_a16, self.group_size = True, 16
        self.kernel = BorrowedKernel(NvFp4LinearLayerConfig())

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create parameters of vLLM's shapes on the meta device, without memory."""
        with torch.device("meta"):
            super().create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put views of the borrowed memory in the place of the empty parameters."""
        del layer.weight_packed
        self.kernel.process_weights_after_loading(layer)


class BorrowedKernel(Everywhere, NvFp4LinearKernel):
    """`linear.W4A16Kernel` over tiles that `attach` gave the layer; `BorrowedNVFP4` refuses GPUs that it is not for."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Hold the tiles; a ValueError if our kernels do not take this shape."""
        tiles: Repacked = layer.qerl_borrowed
        del layer.qerl_borrowed
        plan = ""
        if tiles[0].is_cuda:
            try:
                plan = plan_for(layer.output_size_per_partition, layer.input_size_per_partition, layer, tiles[1])
            except ValueError as error:
                raise ValueError(
                    f"qerl.base.share=true is not possible: a linear of {error} Every linear must fit."
                    " Leave +qerl.base.share out."
                ) from error
        hold_repacked(layer, tiles, plan)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N]."""
        return multiply(layer, x, bias)


def attach(model: torch.nn.Module, members: Mapping[str, list[str]], device: torch.device) -> Borrowed:
    """Map the actor's base and give each linear of `model` its tiles.

    Args:
        model: vLLM's, its quantized linears empty.
        members: Linear of `model` -> the linears of a checkpoint that it consists of, for all that are quantized.

    Raises:
        RuntimeError: The base cannot be mapped; see `borrow`.
        ValueError: The actor's base belongs to another model.
    """
    # The name that our server gave this run, as the two ends of a weight sync have it.
    job, replica = os.environ.get("VERL_RAY_JOB_ID", "0"), os.environ.get("VERL_REPLICA_RANK", "0")
    borrowed = borrow(meeting_place(job, int(replica)), device)
    flat = borrowed.base.flat
    there = {group.members: group for group in borrowed.base.groups}
    here = {tuple(parts): name for name, parts in members.items()}
    for parts, name in here.items():
        layer: Any = model.get_submodule(name)
        group, shape = there.get(parts), (layer.output_size_per_partition, layer.input_size_per_partition)
        if group is None or (sum(group.rows), group.columns) != shape:
            raise _other_model(f"the rollout's linear {name!r} of {shape} is not in the actor's base")
        layer.qerl_borrowed = group.tiles(flat)
    lost = sorted(set(there) - set(here))
    if lost:
        raise _other_model(f"the actor's base has {lost[0]}, which the rollout lacks")
    logger.warning("verl_qerl: the rollout computes with the packed base of process %d", borrowed.pid)
    setattr(model, _BORROWED, borrowed)
    return borrowed


def digests_of(borrowed: Borrowed) -> dict[str, str]:
    """Linear of a checkpoint -> digest, of the bytes that are mapped."""
    found = {}
    for group in borrowed.base.groups:
        for name, tiles in zip(group.members, group.member_tiles(borrowed.base.flat), strict=True):
            found[name] = weight_digest(undo_repack(*tiles))
    return found


def _other_model(what: str) -> ValueError:
    return ValueError(
        f"qerl.base.share=true is not possible: {what}. The same linears on both sides are needed. Load"
        " both from the same model.path with the same `ignore`, or leave +qerl.base.share out."
    )
