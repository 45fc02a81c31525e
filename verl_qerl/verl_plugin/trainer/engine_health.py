"""Ends a run whose rollout engine has ended; verl would go on with the remaining answers, or blame an option."""

import ray
from ray.exceptions import RayError

from verl_qerl.verl_plugin.trainer.feature import Feature

_ANSWER_S = 60.0


class EngineEndedError(RuntimeError):
    """A rollout engine has ended, and with it the run."""


class EngineHealth(Feature):
    """Asks the engines after each rollout, before more is sampled for it, and when a step, sync or validation fails."""

    def before_refill(self) -> None:
        """No group in the place of one that a dead engine failed, which would fail too: verl never stops."""
        self.require_engines()

    def before_sample_end(self) -> None:
        """No update from the answers that a dead engine left: verl takes groups that failed for empty ones."""
        self.require_engines()

    def on_error(self, error: Exception) -> None:
        """Name the engine as the cause if it has ended."""
        if not isinstance(error, EngineEndedError):
            self.require_engines(error)

    def require_engines(self, cause: Exception | None = None) -> None:
        """Ask every engine.

        Raises:
            EngineEndedError: One has ended, or does not answer.
        """
        asks = [getattr(server, "qerl_ended", None) for server in self._run.servers()]
        calls = [ask.remote() for ask in asks if ask is not None]  # servers of verl's own have none
        try:
            answers = ray.get(calls, timeout=_ANSWER_S) if calls else []
        except RayError as error:
            raise EngineEndedError(
                f"a rollout server does not answer any more ({type(error).__name__}). Its last words are in the log"
                " above. Remove their cause and start again; trainer.resume_mode=auto takes the last checkpoint."
            ) from (cause or error)
        ended = sum(answers)
        if ended:
            raise EngineEndedError(
                f"vLLM's engine has ended in {ended} of {len(answers)} rollout replicas; no update is made without it."
                " Its own error is in the log above (EngineCore, or Worker). Remove the cause and start again;"
                " trainer.resume_mode=auto takes the last checkpoint."
            ) from cause
