"""What the noise does: its size beside the norms, the norms that it has reached, and the KL that it alone causes.

The KL is measured in the first step of each stage with noise, and the first after a resume: after a batch is sampled
and before the rollout sleeps, a few of its answers go back to the rollout engine as prompts, once with the noise of the
step and once without. Both scores are one engine's, so kernels and quantization have no part in it. Where answers or
tokens have draws of their own, each turn of an answer is scored with one of these, behind a clean prompt with the turns
before, as it was sampled.

With `aqn.target_kl` the answers of the last step before a stage are scored with more noise: some sigmas, with the draw
of the step to come, until one causes that KL. The stage begins with it, one update of the weights later.
"""

import logging
import statistics
from typing import Any, NamedTuple

import torch
from verl.utils.debug import marked_timer

from verl_qerl.algos.aqn import AQNConfig, stage_of
from verl_qerl.algos.noise_kl import Searched, noise_kl, search_sigma
from verl_qerl.verl_plugin.rollout.engine_scores import Row, UnscoredError, score_answers
from verl_qerl.verl_plugin.trainer.feature import Feature, Run
from verl_qerl.verl_plugin.trainer.noise import switch_noise
from verl_qerl.verl_plugin.trainer.rescoring import evenly, read_fields

logger = logging.getLogger(__name__)

NUM_ANSWERS = 32
MAX_TOKENS = 256  # of each answer: the engine holds the logits of a prompt and its answer at once
# Sigma over the root mean square of a norm's weights, median over norms. At 2e-3 a pretrained Llama of 135M moved by no
# more than bf16 rounds; at 0.06 Qwen2.5-Coder-1.5B lost a twelfth of its right answers, at 0.2 the Llama its language.
USUAL_SIZES = (1e-3, 0.1)
_STEP = 2.0**-23  # of float32, relative: smaller noise may leave every weight of a norm as it is


class _Sample(NamedTuple):
    """Prompts and beginnings of answers, and which of the answers' tokens were sampled: bool [tokens] each."""

    rows: list[Row]
    masks: list[torch.Tensor]


class NoiseEffect(Feature):
    """Looks at the noise while the rollout is awake; in runs with `aqn.enabled`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._sizes: dict[str, float] = {}
        self._measured: int | None = None  # the stage whose KL was measured last
        self._unscored = False  # the engine cannot score what this run samples

    def after_init_end(self) -> None:
        """Now the engine has the weights of which the noise has a size."""
        run = self._run
        if getattr(run.trainer, "processor", None) is not None:
            if run.aqn.target_kl is not None:
                raise ValueError(
                    f"aqn.target_kl={run.aqn.target_kl} does not go together with a model that takes images: the"
                    " rollout scores prompts of text alone. Accepted is null. Leave it out and set"
                    " `+aqn.sigma_start=...`."
                )
            self._give_up("this model takes images, and the rollout scores prompts of text alone")
        (self._sizes, *_) = run.ask_workers("qerl_norm_sizes")
        _tell_sizes(run.aqn, self._sizes)
        self._tell_missing(run.step + 1)

    def before_sample_end(self) -> None:
        """Look at the noise."""
        with marked_timer("look_at_noise", self._run.trainer.timing_raw, color="red"):
            self._look_at_noise()

    def _look_at_noise(self) -> None:
        run = self._run
        step, sigma = run.step, run.sigma(run.step)
        noisy = run.ask_workers("qerl_num_noisy")
        relative = _relative_sizes(run.aqn, sigma, self._sizes) if sigma else {}
        if not sigma or relative["aqn/relative_sigma_min"] >= _STEP:
            _check_reach(sigma, step, noisy, len(self._sizes))
        run.metrics.update(relative | {"aqn/noisy_norms": noisy[0]})
        stage, coming = self._stage(step), self._stage(step + 1)
        measures = sigma > 0 and stage != self._measured and not self._unscored
        searches = run.aqn.target_kl is not None and coming > 0 and coming not in run.searched
        if not measures and not searches:
            return
        try:
            self._score_noise(measures, searches)
        except UnscoredError as error:
            if searches:
                raise
            self._give_up(str(error).partition(".")[0])
        switch_noise(run, sigma, step)

    def _give_up(self, reason: str) -> None:
        self._unscored = True
        logger.warning("aqn/kl is not measured: %s.", reason)

    def _score_noise(self, measures: bool, searches: bool) -> None:
        """Take the KL of the step's noise, and search for the coming stage's; leaves the noise as it comes.

        Raises:
            UnscoredError: See `score_answers`.
        """
        run = self._run
        sigma = run.sigma(run.step)
        sample = _sample_of(run.sampled, run.max_model_len, run.aqn.draw != "batch")
        if not any(mask.any() for mask in sample.masks):  # all masked, or beyond what the engine takes as a prompt
            self._tell_missing(run.step + 1)  # which is asked instead
            return
        run.clear_engines()
        with_noise = self._score_sample(sample, noisy=True) if sigma else None
        if with_noise is not None:
            switch_noise(run, 0.0, 0)
        clean = self._score_sample(sample)
        if measures and with_noise is not None:
            run.metrics["aqn/kl"] = noise_kl(with_noise, with_noise, clean)
            self._measured = self._stage(run.step)
        if searches:
            self._search(sample, clean if with_noise is None else with_noise, clean)

    def _search(self, sample: _Sample, sampled: torch.Tensor, clean: torch.Tensor) -> None:
        """Find the sigma of the coming stage. `sampled`: log-probs by the policy that sampled the answers."""
        run = self._run
        target, step = run.aqn.target_kl, run.step + 1
        assert target is not None

        def measure(sigma: float) -> float:
            switch_noise(run, sigma, step)
            return noise_kl(sampled, self._score_sample(sample, noisy=True), clean)

        _, before = max(run.searched.values(), default=(0, run.aqn.sigma_start))  # the latest
        found = search_sigma(measure, target, before)
        run.searched[self._stage(step)] = step, found.sigma
        _tell_search(found, target, self._stage(step), len(clean))

    def _tell_missing(self, step: int) -> None:
        target, stage = self._run.aqn.target_kl, self._stage(step)
        if target is not None and stage > 0 and stage not in self._run.searched:
            logger.warning(
                "aqn: step %d has no noise, since no sigma was found yet for its stage: aqn.target_kl=%g needs answers"
                " to score, and has this step's.",
                *(step, target),
            )

    def _stage(self, step: int) -> int:
        total = self._run.total_steps
        return stage_of(self._run.aqn, step, total) if 1 <= step <= total else 0

    def _score_sample(self, sample: _Sample, noisy: bool = False) -> torch.Tensor:
        """[T] log-probs of the sampled tokens by the rollout engine as it is."""
        own_draws = noisy and self._run.aqn.draw != "batch"
        scores, _ = score_answers(self._run.servers(), sample.rows, self._run.max_model_len, own_draws)
        return torch.cat([row[mask] for row, mask in zip(scores, sample.masks, strict=True)])


def _sample_of(batch: Any, max_model_len: int, own_draws: bool) -> _Sample:
    """Answers, or their turns, spread over a batch in the TransferQueue, cut to what the engine is to score."""
    names = ["prompts", "responses", "response_mask"]
    fields = read_fields(batch, evenly(batch.keys, NUM_ANSWERS), names)
    rows, masks = [], []
    for prompt, response, mask in zip(*(fields[name].unbind(0) for name in names), strict=True):
        room = max(0, min(MAX_TOKENS, max_model_len - 1 - len(prompt)))
        sampled = mask[:room].bool()
        for start, end in _turns(sampled) if own_draws else [(0, room)]:
            rows.append((prompt.tolist() + response[:start].tolist(), response[start:end].tolist()))
            masks.append(sampled[start:end])
    return _Sample(rows, masks)


def _turns(sampled: torch.Tensor) -> list[tuple[int, int]]:
    """Begin and end of each run of tokens that were sampled."""
    edges = torch.nn.functional.pad(sampled.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _check_reach(sigma: float, step: int, noisy: list[int], total: int) -> None:
    """Require that all norms differ from their clean weights, on every worker, or none where sigma is 0."""
    expected = total if sigma else 0
    found = [count for count in noisy if count != expected]
    if found:
        raise RuntimeError(
            f"the noise {'does not act' if sigma else 'is not gone'}: at the end of sampling step {step} with"
            f" sigma={sigma:g}, {found[0]} of {total} norms differ from their clean weights. Accepted are {expected}."
            " Check that every node has the same verl_qerl."
        )


def _relative_sizes(config: AQNConfig, sigma: float, sizes: dict[str, float]) -> dict[str, float]:
    """The noise beside the root mean square of the weights, over norms; sigma itself where that is its unit."""
    found = [sigma / size if size else float("inf") for size in sizes.values()]
    if config.mode != "additive":
        found = [sigma]
    return {
        "aqn/relative_sigma": statistics.median(found),
        "aqn/relative_sigma_min": min(found),
        "aqn/relative_sigma_max": max(found),
    }


def _tell_sizes(config: AQNConfig, sizes: dict[str, float]) -> None:
    """Log sigma_start beside the norms of each target, and warn where it is unusual."""
    for target in config.norms:
        norms = {name: size for name, size in sizes.items() if name.rpartition(".")[2] == target}
        least, middle, most = sorted(_relative_sizes(config, config.sigma_start, norms).values())
        logger.warning(
            "aqn: sigma_start=%g is %.2g, %.2g, %.2g (min, median, max) of the root mean square of a norm's weights,"
            " over %d norms %s.",
            *(config.sigma_start, least, middle, most, len(norms), target),
        )
    if config.target_kl is not None:  # only the search knows what sigma will be
        return
    middle = _relative_sizes(config, config.sigma_start, sizes)["aqn/relative_sigma"]
    if not USUAL_SIZES[0] <= middle <= USUAL_SIZES[1]:
        logger.warning(
            "aqn.sigma_start=%g in mode %s is %.2g of the norms' weights: %s. Usual is %g to %g. Look at aqn/kl, or let"
            " `+aqn.target_kl=...` find it.",
            *(config.sigma_start, config.mode, middle),
            "so little may do nothing" if middle < USUAL_SIZES[0] else "so much may destroy the model",
            *USUAL_SIZES,
        )


def _tell_search(found: Searched, target: float, stage: int, num_tokens: int) -> None:
    logger.warning(
        "aqn: sigma=%.4g causes KL=%.3g nats per token (%d tokens, %d tries; aqn.target_kl=%g), from which stage %d"
        " begins.",
        *(found.sigma, found.kl, num_tokens, found.tries, target, stage),
    )
    if found.bound is not None:
        logger.warning(
            "aqn.target_kl=%g is out of reach in stage %d: at the bound sigma=%g the noise causes KL=%.3g%s. That sigma"
            " is used. Set another `+aqn.target_kl=...`.",
            *(target, stage, found.bound, found.kl),
            ", which is the rounding of the model's numbers" if found.kl > target else "",
        )
    elif not 0.8 * target <= found.kl <= 1.25 * target:
        logger.warning(
            "aqn.target_kl=%g was not met in stage %d: the nearest of %d tries causes KL=%.3g, with sigma=%.4g.",
            *(target, stage, found.tries, found.kl, found.sigma),
        )
