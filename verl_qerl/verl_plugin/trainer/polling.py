"""How often the trainer looks for finished answers in TransferQueue.

verl's replay buffer looks every two seconds, which is no option of it (patches/verl/0012 makes it one): a step waits a
second on average for answers that are there. A look takes 3 ms at 864 keys and 29 ms at 9,504 on one core.
"""

from typing import Any

from verl_qerl import upstream
from verl_qerl.verl_plugin import hosts

POLL_S = 0.2
_VERLS_S = 2.0  # which nobody has chosen


def poll_often(buffer: Any) -> None:
    """Shorten the interval; one that a sampler of the user's has chosen stays."""
    if getattr(buffer, "poll_interval", None) == _VERLS_S:
        upstream.set_data(hosts.POLL_INTERVAL, buffer, poll_interval=POLL_S)
