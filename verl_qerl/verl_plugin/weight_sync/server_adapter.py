"""verl's sender of weights to vLLM, over a socket that only this run uses, and only while the engine runs."""

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import SENDING
from verl_qerl.verl_plugin.weight_sync.run_name import of_this_run
from verl_qerl.verl_plugin.weight_sync.transfer import requiring

_ANSWER_S = 60.0
_ENDED = (
    "vLLM's engine has ended. One that runs is needed to take the weights. Its own error is in the log above"
    " (EngineCore, or Worker); remove the cause and start again."
)


class QerlServerAdapter(ServerAdapter):
    """ServerAdapter whose workers are those of `rollout.QerlServer`, which names the socket likewise."""

    zmq_handle: str
    _receiving: Any = None  # what vLLM's workers answer when they have received all

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        upstream.install(SENDING)
        # Disaggregated, the servers are verl's own (vllm_pd_replica.py), and so is their name for it.
        if not self.config.disaggregation.enabled:
            self.zmq_handle = of_this_run(self.zmq_handle)

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Send the weights; verl's own method waits without a limit for an engine that has ended.

        Raises:
            RuntimeError: It has ended, or a worker has; and whatever the workers raise.
        """
        # Servers of verl's own, which disaggregation has, cannot tell.
        ask = getattr(self.server_handle, "qerl_ended", None) if self._ensure_server_handle() else None
        if ask is not None and await ask.remote():
            raise RuntimeError(f"no weights are sent: {_ENDED}")

        def require_receiver() -> None:  # the sender keeps this thread, and with it the loop
            if self._receiving is not None and ray.wait([self._receiving], timeout=0)[0]:
                ray.get(self._receiving)
            if ask is not None and ray.get(ask.remote(), timeout=_ANSWER_S):
                raise RuntimeError(f"a weight sync breaks off: {_ENDED}")

        with requiring(require_receiver):
            await super().update_weights(*args, **kwargs)

    async def _execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        found = await super()._execute_method(method, *args, **kwargs)
        if method == "update_weights_from_ipc":
            self._receiving = found
        return found
