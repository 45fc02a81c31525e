"""verl's sampler for runs without an option of ours: it looks for finished answers as often as theirs do."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_qerl.verl_plugin.trainer.polling import POLL_S


class Sampler(ReplayBuffer):
    """verl looks every 2 s, which is no option of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.poll_interval = POLL_S
