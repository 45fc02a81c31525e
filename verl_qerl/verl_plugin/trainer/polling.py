"""How often the trainer looks for finished answers in TransferQueue.

verl's replay buffer looks every two seconds, which is no option of it (patches/verl/0012 makes it one): a step waits a
second on average for answers that are there. A look takes 3 ms at 864 keys and 29 ms at 9,504 on one core.
"""

from typing import TYPE_CHECKING

from verl_qerl.verl_plugin.trainer.mismatch import gate_options

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # mixed into whichever trainers verl has

POLL_S = 0.2
_VERLS_S = 2.0  # which nobody has chosen
# `separate_async` takes a wait that is longer than one interval for a sign that the rollout is too slow.
_MODES = ("sync", "colocate_async")


class PollingMixin(_Trainer):
    """Looks more often; does nothing unless one of our options is set."""

    def _build_replay_buffer(self) -> "ReplayBuffer":
        """As verl's; an interval that a sampler of the user's has chosen stays."""
        buffer = super()._build_replay_buffer()
        ours = self.config.trainer.v1.trainer_mode in _MODES and gate_options(self.config) is not None
        if ours and getattr(buffer, "poll_interval", None) == _VERLS_S:
            buffer.poll_interval = POLL_S
        return buffer
