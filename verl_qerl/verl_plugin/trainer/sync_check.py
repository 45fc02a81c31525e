"""After each weight sync all rollout workers must hold what the actor sent, in this sync and not in an earlier one.

A worker looks itself at what a sync left in its engine, and counts the syncs that passed: an adapter and trained norms
are read back, quantized weights have checksums and `vllm_plugin.weights.reload` asks the kernels, a packed base never
changes after its digests were compared. Here the workers are asked: one that skipped a sync, or took other weights than
the rest, would sample from another policy and only the KL of later steps would tell.
"""

import time
from typing import Any

from verl_qerl.verl_plugin.trainer.feature import Feature, Run


class SyncCheck(Feature):
    """Asks the rollout workers after each sync, where they are ours."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._num_syncs = 0
        self._start = 0.0

    def after_init_end(self) -> None:
        """Ask the workers."""
        self._check_sync()

    def before_step_end(self) -> None:
        """The sync begins."""
        self._start = time.perf_counter()

    def after_step_end(self) -> None:
        """Ask the workers; say what a quantized sync has sent, and how long it took."""
        took_s = time.perf_counter() - self._start
        report = self._check_sync()
        if self._run.requantizes:
            found = {f"qerl/{name}": value for name, value in report.items() if name.startswith("sync_")}
            self._run.metrics.update({**found, "qerl/sync_s": took_s})

    def _check_sync(self) -> dict[str, Any]:
        """The answer of all workers.

        Raises:
            RuntimeError: They differ, or one has not taken the weights of this sync.
        """
        reports = self._run.ask_workers("qerl_last_sync")
        numbers = sorted({report.get("number", 0) for report in reports})
        if not reports or numbers[0] <= self._num_syncs:
            raise RuntimeError(
                f"the weights of step {self._run.step} did not reach all of {len(reports)} rollout workers: they"
                f" have taken {numbers} syncs, and {self._num_syncs} came before. Each must take every one. Look for an"
                " error of a worker in the log above, and check that every node has the same verl_qerl installed."
            )
        if any(report != reports[0] for report in reports):
            raise RuntimeError(
                f"the rollout workers hold different weights after a sync: {reports}. All must have received the"
                " same. Check that every node has the same verl_qerl installed."
            )
        self._num_syncs = numbers[0]
        return reports[0]
