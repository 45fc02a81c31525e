"""Log-probs of given tokens by the rollout's own engine: each sequence goes to a server as a prompt."""

import uuid
from collections.abc import Sequence
from typing import Any

import ray
import torch

from verl_qerl.algos.aqn import FORCED_DRAW, FORCED_FROM, NUM_DRAWS

Row = tuple[list[int], list[int]]  # token ids of a prompt, and of its answer
SCORING = "verl_qerl_scoring_"  # prefix of these requests' ids; our servers admit them while the gate is closed


class UnscoredError(RuntimeError):
    """The engine returned no log-probs of the tokens that it was given, as for prompts with images."""


def score_answers(
    servers: Sequence[Any], rows: Sequence[Row], max_model_len: int, own_draws: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    """Let the rollout's servers score answers, in one forward pass each, at temperature 1 over the whole vocabulary.

    Args:
        servers: Ray handles of verl's vLLM servers, awake.
        max_model_len: Context length of the engines; what does not fit is cut.
        own_draws: Whether each answer is scored with a draw of the noise of its own behind a clean prompt, as it is
            sampled where the engines have several.

    Returns:
        For each row [len(answer)] float32, NaN after a cut, and the version of the weights that scored it.

    Raises:
        UnscoredError: See `answer_log_probs`.
    """
    calls = []
    for at, (prompt, response) in enumerate(rows):
        tokens = (prompt + response)[: max_model_len - 1]  # a prompt must leave room for one token
        # No request of another kind reaches vLLM's prompt log-probs; the token that it samples is dropped.
        params: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "repetition_penalty": 1.0}
        if own_draws:
            params["extra_args"] = {FORCED_DRAW: 1 + at % NUM_DRAWS, FORCED_FROM: len(prompt)}
        server = servers[at % len(servers)]
        name = f"{SCORING}{uuid.uuid4().hex}"
        calls.append(server.generate.remote(prompt_ids=tokens, sampling_params=params, request_id=name))
    outputs = ray.get(calls)
    scores = [answer_log_probs(output.extra_fields, *row) for output, row in zip(outputs, rows, strict=True)]
    return scores, [output.extra_fields.get("global_steps") for output in outputs]


def answer_log_probs(fields: dict[str, Any], prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Log-probs of an answer's tokens from what verl's vLLM server returns for the whole as a prompt.

    Args:
        fields: `extra_fields`: at place j `prompt_ids` and `prompt_logprobs` of token j + 1; the last one is padding.
        response: Token ids, cut where the engine had no more room.

    Returns:
        [len(response)] float32, NaN behind the cut.

    Raises:
        UnscoredError: The server returned nothing, or scored other tokens.
    """
    scored, tokens = fields.get("prompt_ids"), [*prompt, *response]
    if not scored or [ids[0] for ids in scored[:-1]] != tokens[1 : len(scored)]:
        raise UnscoredError(
            f"the rollout did not score the tokens it was given: {len(scored or [])} answers for {len(tokens)} tokens."
            " Accepted are prompts of text alone. Leave out +qerl.gate.mismatch_sample and +aqn.target_kl."
        )
    found = torch.tensor([values[0] for values in fields["prompt_logprobs"][len(prompt) - 1 : -1]])
    return torch.cat([found, torch.full((len(response) - len(found),), torch.nan)])
