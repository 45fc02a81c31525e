"""verl's sender of weights to vLLM, at a socket that is this run's alone, and to an engine that runs."""

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_qerl.verl_plugin.run_name import of_this_run


class QerlServerAdapter(ServerAdapter):
    """ServerAdapter whose workers are those of `rollout.QerlServer`, which names the socket likewise."""

    zmq_handle: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Disaggregated, the servers are verl's own (vllm_pd_replica.py), and so is their name for it.
        if not self.config.disaggregation.enabled:
            self.zmq_handle = of_this_run(self.zmq_handle)

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """As verl's, which waits without a limit for an engine that has ended to take the weights.

        Raises:
            RuntimeError: It has ended.
        """
        # Servers of verl's own, which disaggregation has, cannot tell.
        ask = getattr(self.server_handle, "qerl_ended", None) if self._ensure_server_handle() else None
        if ask is not None and await ask.remote():
            raise RuntimeError(
                "no weights are sent: vLLM's engine has ended. One that runs is needed to take them. Its own error is"
                " in the log above (EngineCore, or Worker); remove the cause and start again."
            )
        await super().update_weights(*args, **kwargs)
