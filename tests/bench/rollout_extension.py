"""Worker extension of bench_rollout.py on several GPUs: their workers know our load formats by importing it."""

import rollout_arms

from verl_qerl.vllm_plugin import register
from verl_qerl.vllm_plugin.worker import NoiseWorkerExtension

register()
rollout_arms.register_dummy_nvfp4()


class Extension(NoiseWorkerExtension):
    """Does what the options of an arm ask for; nothing in stock arms."""
