"""verl's sender of weights to vLLM, at a socket that is this run's alone."""

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
