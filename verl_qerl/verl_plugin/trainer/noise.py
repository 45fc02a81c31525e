"""Adaptive Quantization Noise in verl's trainer.

Noise is set right before each weight sync: an adapter brings no norms, or trained ones, onto which the worker puts the
noise that is on; their storage stays mapped while the engine sleeps, and verl drops the prefix cache after the sync. So
the rollouts of step t are sampled, from their first token on, with the sigma and the draw of step t.
"""

import logging

import ray
from verl.utils.debug import marked_timer

from verl_qerl.algos.aqn import sigma_at_step, stage_of
from verl_qerl.verl_plugin.trainer.feature import Feature, Run

logger = logging.getLogger(__name__)


class Noise(Feature):
    """Gives the rollout the noise of each step, and takes it away for validation; in runs with `aqn.enabled`."""

    def before_init_end(self) -> None:
        """Noise of the first step, before the first weight sync."""
        self._warn_of_stages()
        set_noise(self._run, self._run.sigma(self._run.step + 1), self._run.step + 1)

    def before_step_end(self) -> None:
        """Noise of the next step (none after the last), before the weight sync."""
        with marked_timer("set_noise", self._run.trainer.timing_raw, color="red"):
            set_noise(self._run, self._run.sigma(self._run.step + 1), self._run.step + 1)

    def after_step_end(self) -> None:
        """The sigma that the step was sampled with."""
        self._run.metrics["aqn/sigma"] = self._run.sigma(self._run.step)

    def before_validate_begin(self) -> None:
        """Validation samples from the clean model."""
        switch_noise(self._run, 0.0, 0)

    def after_validate_end(self) -> None:
        """The noise that was on before comes back, draw included."""
        switch_noise(self._run, self._run.sigma(self._run.step + 1), self._run.step + 1)

    def _warn_of_stages(self) -> None:
        aqn, run_steps = self._run.aqn, self._run.total_steps
        total = aqn.total_steps or run_steps
        if 0 < total < aqn.num_stages:  # none: a run that only validates may have fewer questions than a batch
            logger.warning(
                "aqn.num_stages=%d exceeds the %d steps that the stages are spread over: some are skipped, the last of"
                " them too, and sigma ends at %g instead of sigma_end=%g.",
                *(aqn.num_stages, total, sigma_at_step(aqn, total, total), aqn.sigma_end),
            )
        elif run_steps > 0 and stage_of(aqn, run_steps, run_steps) == 0:
            logger.warning(
                "no step of this run has noise: it ends after %d steps, within the first of aqn.num_stages=%d stages,"
                " which are spread over aqn.total_steps=%d. Leave out aqn.total_steps to spread them over this run.",
                *(run_steps, aqn.num_stages, total),
            )


def set_noise(run: Run, sigma: float, step: int) -> None:
    """Set the norms of every worker of every replica; a weight sync must follow (else use `switch_noise`).

    Args:
        sigma: Standard deviation, 0 for the clean norms.

    Raises:
        RuntimeError: They have not set the same number of norms, at least one, to the same weights.
    """
    asked = {"sigma": sigma, "step": step}
    answers = set(map(tuple, run.ask_workers("qerl_set_noise", **asked)))
    counts = sorted({count for count, _ in answers})
    if len(counts) != 1 or not counts[0]:
        raise RuntimeError(
            f"the rollout workers set {counts} norms. All must set the same number, at least one."
            " Check that every node has the same verl_qerl installed."
        )
    if len(answers) != 1:
        raise RuntimeError(
            f"the rollout workers set {counts[0]} norms to {len(answers)} different sets of weights at"
            f" {asked}. All must sample with the same noise. Check that every node has the same"
            " versions of verl_qerl and numpy."
        )


def switch_noise(run: Run, sigma: float, step: int) -> None:
    """`set_noise` between two syncs: what was computed with other norms is dropped from the prefix cache."""
    set_noise(run, sigma, step)
    ray.get([server.qerl_clear_kv_cache.remote() for server in run.servers()])
