"""Log-probs straight from the output head: what the engine does for `model.use_fused_kernels` on a packed base.

verl's own version reads `lm_head.weight` from outside, which FSDP2 has sharded by then where embeddings are not tied,
and computes a gradient of the frozen head. Here the head itself is called, so that FSDP2 gathers it.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from verl.models.transformers.dense_common import CausalLMOutputForPPO

from verl_qerl import upstream
from verl_qerl.kernels.actor.log_probs import linear_log_probs
from verl_qerl.verl_plugin import hosts


class ChunkedHead(nn.Linear):
    """nn.Linear that gives the log-probs of labels, when there are any, instead of logits."""

    fused: bool = False

    def forward(
        self, input: torch.Tensor, labels: torch.Tensor | None = None, temperature: float = 1.0, entropy: bool = False
    ) -> Any:
        """[..., D] -> logits [..., V]; with labels [...]: (log-probs, entropies), both [...] float32."""
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        with torch.autocast(device, enabled=False):
            return linear_log_probs(input.to(dtype), self.weight.to(dtype), labels, temperature, entropy, self.fused)


class _LogProbsModel:
    """Put before the class of a causal language model; without `temperature` a call is that class's own."""

    def forward(
        self: Any,
        *args: Any,
        temperature: float | None = None,
        shift_labels: torch.Tensor | None = None,
        calculate_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        if temperature is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        kwargs = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        hidden = self.model(*args, **kwargs).last_hidden_state
        labels = torch.roll(kwargs["input_ids"], -1, -1) if shift_labels is None else shift_labels
        log_probs, entropy = self.lm_head(hidden, labels, float(temperature), calculate_entropy)
        return CausalLMOutputForPPO(log_probs=log_probs, entropy=entropy)


def install_chunked_head(model: nn.Module, backend: str | None, fused: bool = False) -> None:
    """Let `model` give log-probs in the way that verl asks for with `use_fused_kernels`.

    Args:
        model: A causal language model of transformers, before PEFT and FSDP2; its class and that of its head change.
        backend: `model.fused_kernel_options.impl_backend`.

    Raises:
        ValueError: Another backend than torch is asked for, the head is no plain linear, or its logits are changed.
    """
    if backend not in (None, "torch"):
        raise ValueError(
            f"model.fused_kernel_options.impl_backend={backend} is not supported on a packed base. Accepted is torch."
            " Leave the option out."
        )
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or head.bias is not None or not hasattr(model, "model"):
        raise ValueError(
            f"{type(model).__name__} has no plain lm_head: model.use_fused_kernels=True. Accepted is a head that is a"
            " linear without bias, in bf16. Set actor_rollout_ref.model.use_fused_kernels=False."
        )
    for name, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1), ("logit_scale", 1)):
        if getattr(model.config, name, None) not in (None, neutral):
            raise ValueError(
                f"{type(model).__name__} changes its logits ({name}={getattr(model.config, name)}):"
                " model.use_fused_kernels=True. Accepted is a head whose logits are used as they are. Set"
                " actor_rollout_ref.model.use_fused_kernels=False."
            )
    upstream.swap_class(hosts.HEAD, head, ChunkedHead).fused = fused
    kind = type(model)
    with_log_probs = type(kind.__name__, (_LogProbsModel, kind), {"__module__": kind.__module__})
    upstream.swap_class(hosts.MODEL, model, with_log_probs)
