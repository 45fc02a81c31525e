"""An agent loop of a registered class is made without hydra's conversion of its arguments."""

import asyncio

import hydra
import named_vllm  # noqa: F401
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as module

asked = []
stock = hydra.utils.instantiate
hydra.utils.instantiate = lambda *args, **kwargs: asked.append(args) or stock(*args, **kwargs)


class Loop:
    """Of one answer, which is its tokenizer."""

    def __init__(self, tokenizer, **_):
        self.tokenizer = tokenizer

    async def run(self, sampling_params, **_):
        return self.tokenizer


async def keep(output, validate, **_):
    return output


module.Loop = Loop
module._agent_loop_registry["plain"] = {"_target_": f"{module.__name__}.Loop"}
worker = module.AgentLoopWorker.__new__(module.AgentLoopWorker)
names = ("llm_client", "processor", "hf_model_type", "dataset_cls")
vars(worker).update(dict.fromkeys(names), tools=[], config=OmegaConf.create({"data": {}}), tokenizer="the tokenizer")
worker._agent_loop_postprocess = keep
trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
found = asyncio.run(worker._run_agent_loop({}, trajectory, agent_name="plain", trace=False))
if found != "the tokenizer":
    raise RuntimeError(f"the agent loop was made of something else: {found!r}")
assert not asked, "hydra lays the arguments of every trajectory's agent loop into a configuration"
