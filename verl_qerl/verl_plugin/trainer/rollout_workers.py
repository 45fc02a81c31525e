"""How the trainer asks the rollout workers, and puts what it has found into the metrics of a step."""

from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # mixed into whichever trainers verl has


class RolloutWorkersMixin(_Trainer):
    """What several mixins of the trainer need; no hooks."""

    def _servers(self) -> list[Any]:
        # The first server of a replica reaches all of its workers.
        return [replica.servers[0] for replica in self.llm_server_manager.get_replicas()]

    def _ask_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """The answer of every worker of every replica."""
        calls = [server.collective_rpc.remote(method, kwargs=kwargs) for server in self._servers()]
        return [answer for answers in ray.get(calls) for answer in answers or ()]

    def _add_metrics(self, found: dict[str, Any]) -> None:
        """To those of the step that ends, after verl's own `on_step_end`, which sets them anew."""
        self._pending_sync_metrics = {**(getattr(self, "_pending_sync_metrics", None) or {}), **found}
