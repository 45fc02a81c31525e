"""Gradient checkpointing of as few layers as the memory allows.

With checkpointing every decoder layer is computed twice in an update, which is a third of its arithmetic where the base
is frozen. How many layers can keep their activations depends on the GPU and on the tokens of a micro-batch, so it is
decided per micro-batch, from what the first update was seen to take.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from verl_qerl import upstream
from verl_qerl.verl_plugin import hosts

logger = logging.getLogger(__name__)

# Left free: micro-batches of other sizes fragment the allocator's memory.
_SPARE_SHARE, _SPARE_BYTES = 0.05, 2 << 30


class Recompute:
    """Which decoder layers are checkpointed, decided anew for each micro-batch of an update.

    The first update checkpoints all layers but the last, whose activations are measured. From its end on the last
    layers keep theirs, as many as fit into what was left of the GPU at the peak. A micro-batch with more tokens than
    any of the first update takes more than activations (inputs of checkpointed layers, one layer's temporaries,
    logits): that is taken off first. Without a GPU all are checkpointed.

    Args:
        module: A model of transformers with checkpointing enabled, wrapped by FSDP2 or not.
        device: Where the ranks agree.

    Attributes:
        budget: Bytes that activations may take, the same on every rank; None as long as nothing is known.
        bytes_per_token: Bytes of one layer's activations for a token.
        growth: Bytes that everything else takes at most for a token more than `most_tokens`, the same on every rank.
        most_tokens: Tokens of the largest micro-batch of the first update, padding included. Where that differs from
            rank to rank, it is the smallest such number.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._layers, stack = checkpointed_layers(module)
        self._device = device
        self.budget: int | None = None
        self.bytes_per_token = self.growth = 0.0
        self.most_tokens = 0
        self._before = 0
        self._tokens = 0
        self._inside = False
        if stack is not None:
            stack.register_forward_pre_hook(self._choose, with_kwargs=True)
            # Inside of FSDP2's own hooks: what they gather is no activation.
            self._layers[-1].register_forward_pre_hook(self._start)
            self._layers[-1].register_forward_hook(self._stop, prepend=True)

    @contextmanager
    def within(self, mode: AbstractContextManager[Any]) -> Iterator[Any]:
        """The `mode` of verl's engine for one update; the first one that ends well is what the budget follows from."""
        # verl enters the mode of a mini-batch within that of the update.
        decides = not self._inside and self.budget is None and self._layers and torch.cuda.is_available()
        with mode as entered:
            if decides:
                torch.cuda.reset_peak_memory_stats()
                self._inside, self.most_tokens = True, 0
            held = torch.cuda.memory_allocated() if decides else 0
            try:
                yield entered
            finally:
                self._inside = self._inside and not decides
            if decides and self.bytes_per_token and self.most_tokens:
                self._decide(held)

    def _choose(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a pass of the whole stack: mark the layers that it checkpoints."""
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        self._tokens = inputs.shape[0] * inputs.shape[1]
        kept = self.num_kept(self._tokens)
        for at, layer in enumerate(self._layers):
            checkpointed = at < len(self._layers) - kept
            if layer.gradient_checkpointing != checkpointed:
                upstream.set_data(hosts.CHECKPOINTED, layer, gradient_checkpointing=checkpointed)

    def num_kept(self, tokens: int) -> int:
        """Layers that keep their activations in a micro-batch of so many tokens, padding included."""
        if self.budget is None:
            return int(torch.cuda.is_available())  # the one that is measured
        room = max(0.0, self.budget - self.growth * max(0, tokens - self.most_tokens))
        return min(len(self._layers), int(room / (self.bytes_per_token * tokens)))

    def _start(self, layer: nn.Module, args: tuple) -> None:
        self._before = torch.cuda.memory_allocated() if self._measures() else 0

    def _stop(self, layer: nn.Module, args: tuple, output: Any) -> None:
        if self._measures():
            found = (torch.cuda.memory_allocated() - self._before) / self._tokens
            self.bytes_per_token = max(self.bytes_per_token, found)
            self.most_tokens = max(self.most_tokens, self._tokens)

    def _measures(self) -> bool:
        layer = self._layers[-1]
        return self.budget is None and layer.training and torch.is_grad_enabled() and torch.cuda.is_available()

    def _decide(self, held: int) -> None:
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        # All that the update took, as if all of it grew with the tokens. That errs on the safe side: the layer that was
        # measured is in it, and where all weights are trained their gradients too.
        growth = (peak - held) / self.most_tokens
        # The optimizer's state may have come after the peak, and stays.
        peak += max(0, torch.cuda.memory_allocated() - held)
        room = free + torch.cuda.memory_reserved() - peak - _SPARE_BYTES - _SPARE_SHARE * total
        # The least room and tokens and the most of what is taken: what is safe for every rank.
        values = [room, -self.bytes_per_token, -growth, self.most_tokens]
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MIN)  # ranks with other numbers of layers would wait for each other
        self.budget, self.most_tokens = max(0, int(found[0])), int(found[3])
        self.bytes_per_token, self.growth = -float(found[1]), -float(found[2])
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "gradient checkpointing: %.1f GiB are left for activations, %.0f KiB a token and layer. From now on"
                " %d of %d layers keep theirs with %d tokens a micro-batch, and the others are computed again.",
                self.budget / 2**30,
                self.bytes_per_token / 2**10,
                self.num_kept(self._tokens),
                len(self._layers),
                self._tokens,
            )


def checkpointed_layers(module: nn.Module) -> tuple[list[Any], nn.Module | None]:
    """(decoder layers that are checkpointed, the module that calls them in order); ([], None) where there are none."""
    for name, child in module.named_modules():
        if not isinstance(child, nn.ModuleList) or not child:
            continue
        if all(getattr(layer, "gradient_checkpointing", False) is True for layer in child):
            return list(child), module.get_submodule(name.rpartition(".")[0])
    return [], None
