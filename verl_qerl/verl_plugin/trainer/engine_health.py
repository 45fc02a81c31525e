"""Says that a rollout engine has ended, where verl goes on with what is left of the answers or names an option."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from verl_qerl.verl_plugin.trainer.mismatch import gate_options

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # mixed into whichever trainers verl has

_ANSWER_S = 60.0


class EngineEndedError(RuntimeError):
    """A rollout engine has ended, and with it the run."""


class EngineHealthMixin(_Trainer):
    """Asks the engines after each rollout and when one fails; does nothing unless one of our options is set."""

    if TYPE_CHECKING:

        def _servers(self) -> list[Any]: ...

    def on_sample_end(self) -> None:
        """No update from the answers that a dead engine left: verl takes groups that failed for empty ones."""
        self._require_engines()
        super().on_sample_end()

    def _step_once(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained():
            return super()._step_once(*args, **kwargs)

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained():
            return super()._validate(*args, **kwargs)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except EngineEndedError:
            raise
        except Exception as error:
            self._require_engines(error)
            raise

    def _require_engines(self, cause: Exception | None = None) -> None:
        if gate_options(self.config) is None:
            return
        asks = [getattr(server, "qerl_ended", None) for server in self._servers()]
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
                f"vLLM's engine has ended in {ended} of {len(answers)} rollout replicas; no update is made from"
                " what is left of this step's answers. Its own error is in the log above (EngineCore, or Worker)."
                " Remove the cause and start again; trainer.resume_mode=auto takes the last checkpoint."
            ) from cause
