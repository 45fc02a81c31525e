"""vLLM's sampler on `kernels.rollout.sampling` where RL needs it: the whole distribution at a temperature.

Everything else (greedy, top-k, top-p, min-p, penalties, masks, a seed for a request, more log-probs than the drawn
token's) is left to vLLM's, which says once why.
"""

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler

from verl_qerl import upstream
from verl_qerl.kernels.rollout.sampling import draw_tokens
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.options import V2_CHOICE, is_v2

# What of vLLM's own processors changes logits; one without it gives them back as they are.
_ACTS = {LogitBiasLogitsProcessor: "biases", MinPLogitsProcessor: "min_p_count", MinTokensLogitsProcessor: "min_toks"}


class FusedSampler(Sampler):
    """Draws a batch in one pass over its logits (two with log-probs) when `why_stock` finds nothing against it."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool = False, **options: Any
    ) -> SamplerOutput:
        """Draw tokens [R, 1] int32 from logits [R, V]."""
        mode = options.get("logprobs_mode_override") or self.logprobs_mode
        reason = "tokens are speculated" if predict_bonus_token else why_stock(sampling_metadata, mode)
        if reason:
            if not (sampling_metadata.all_greedy or _is_of_no_request(sampling_metadata)):
                say_once(f"vLLM's sampler draws these tokens: {reason}, and the faster one takes no such batch.")
            return super().forward(logits, sampling_metadata, predict_bonus_token, **options)
        asked = sampling_metadata.max_num_logprobs is not None
        # Of the default generator, whose seed is the engine's: every rank draws the same.
        uniform = torch.rand((logits.shape[0], 2), device=logits.device, dtype=torch.float32)
        tokens, log_probs, rank = draw_tokens(logits, sampling_metadata.temperature, uniform, with_rank=asked)
        drawn = tokens.to(torch.int32)[:, None]
        return SamplerOutput(
            sampled_token_ids=drawn,
            logprobs_tensors=LogprobsTensors(drawn, log_probs[:, None], rank) if rank is not None else None,
        )


def why_stock(metadata: Any, mode: str) -> str | None:
    """Why a batch is not for `draw_tokens`, or None.

    Args:
        mode: vLLM's logprobs_mode, which verl sets to processed_logprobs.
    """
    processors = (*metadata.logitsprocs.non_argmax_invariant, *metadata.logitsprocs.argmax_invariant)
    holder = metadata.thinking_budget_state_holder
    reasons = {
        "a request is greedy": not metadata.all_random,
        "top_k or top_p is set": metadata.top_k is not None or metadata.top_p is not None,
        "a request has a seed": bool(metadata.generators),
        "a request has penalties": not metadata.no_penalties,
        "tokens are masked": metadata.allowed_token_ids_mask is not None or bool(metadata.bad_words_token_ids),
        "a logits processor acts": any(getattr(one, _ACTS.get(type(one), "apply")) for one in processors),
        "a budget of thinking acts": holder is not None and holder.has_tracked_requests(),
        "more log-probs than the drawn token's are asked for": bool(
            metadata.max_num_logprobs or metadata.logprob_token_ids
        ),
        f"log-probs are {mode}": metadata.max_num_logprobs is not None and mode != "processed_logprobs",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_of_no_request(metadata: Any) -> bool:
    """Whether vLLM made a batch up, as it does when it starts: batches of requests come with its own processors."""
    processors = metadata.logitsprocs
    return not (processors.argmax_invariant or processors.non_argmax_invariant)


def _why_kept(sampler: Any) -> str | None:
    """Why a sampler is not replaced, and what to do about it; None for one that is."""
    accepted = "Accepted is the Sampler of vLLM's V1 model runner without use_fp64_gumbel."
    if is_v2(sampler):
        return f"the engine is on vLLM's V2 model runner. {accepted} Set {V2_CHOICE}=0"
    if type(sampler) is not Sampler:
        return f"{type(sampler).__name__}. {accepted} Use a model and options that have it"
    return f"use_fp64_gumbel=True. {accepted} Leave it out" if sampler.use_fp64_gumbel else None


def _ours_is_faster(device: torch.device) -> bool:
    return device.type == "cuda"


def use_fused_sampler(runner: Any) -> None:
    """On a GPU, where ours is faster, replace the sampler of vLLM's model runner and compile its kernels.

    A sampler that cannot be replaced stays, which is said once.
    """
    device = runner.device
    if not _ours_is_faster(device):
        return
    sampler: Any = getattr(runner, "sampler", None)
    reason = _why_kept(sampler)
    if reason:
        say_once(f"vLLM's own sampler draws tokens: {reason}.")
        return
    upstream.swap_class(hosts.SAMPLER, sampler, FusedSampler)
    size = runner.model_config.get_vocab_size()
    logits = torch.zeros((1, size), dtype=runner.model_config.dtype, device=device)
    draw_tokens(logits, torch.ones(1, device=device), torch.zeros((1, 2), device=device), with_rank=True)
