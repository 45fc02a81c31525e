"""Worker extensions of bench_rollout.py where workers are processes: they know our load formats by importing this."""

import rollout_arms

from verl_qerl.vllm_plugin import register
from verl_qerl.vllm_plugin.worker import RolloutWorkerExtension

register()
rollout_arms.register_dummy_nvfp4()


class Stock:
    """Leaves vLLM's worker as it is."""


class Ours(RolloutWorkerExtension):
    """Does what the options of an arm ask for."""
