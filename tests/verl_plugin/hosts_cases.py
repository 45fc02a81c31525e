"""Started by test_inert_on_cpu.py: what verl has in its registries, after its driver has looked at a run.

python hosts_cases.py <options of the run>
"""

import importlib
import json
import os
import sys
from types import ModuleType

before = dict(os.environ)
import verl  # noqa: E402  (its plugins come with it)
import verl.utils  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from verl.trainer.ppo import core_algos, v1  # noqa: E402
from verl.utils import model, torch_functional  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

REQUIRED = (
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.lora_rank=8",
    "data.train_batch_size=8",
)


def bare_package(name: str) -> ModuleType:
    """A package whose own `__init__.py` is not run: that of verl's vLLM rollout imports vLLM."""
    package = ModuleType(name)
    package.__path__ = [os.path.join(os.path.dirname(verl.__file__), *name.split(".")[1:])]
    package.get_vllm_max_lora_rank = lambda rank: rank
    return package


def function(found) -> list[str]:
    """Its name, and the file it is really in: a wrapper takes the name of what it wraps."""
    return [found.__module__, found.__qualname__, os.path.basename(found.__code__.co_filename)]


def classes(table: dict) -> dict[str, str]:
    return {str(key): f"{found.__module__}.{found.__qualname__}" for key, found in table.items()}


vllm_rollout = "verl.workers.rollout.vllm_rollout"
sys.modules[vllm_rollout] = sys.modules[f"{vllm_rollout}.utils"] = bare_package(vllm_rollout)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=[*REQUIRED, *sys.argv[1:]])
checking = function(verl.utils.validate_config)
verl.utils.validate_config(config=config, use_reference_policy=False, use_critic=False)
importlib.import_module("verl.workers.engine")
transfer = importlib.import_module(f"{vllm_rollout}.bucketed_weight_transfer")

engines = {kind: EngineRegistry._engines[kind]["fsdp2"] for kind in ("language_model", "value_model")}
found = {
    "trainers": classes(v1.trainer_base.TRAINER_REGISTRY),
    "engines": {kind: classes(table) for kind, table in engines.items()},
    "replicas": classes(RolloutReplicaRegistry._registry),
    "rollouts": {str(key): name for key, name in _ROLLOUT_REGISTRY.items()},
    "policy losses": sorted(core_algos.POLICY_LOSS_REGISTRY),
    "validate_config": checking,
    "sender": function(transfer.BucketedWeightSender._init_socket),
    "critic": function(model.load_valuehead_model),
    "log probs": function(torch_functional.logprobs_from_logits_v2),
    "entropy": function(torch_functional.entropy_from_logits),
    "environment": {name: value for name, value in os.environ.items() if before.get(name) != value},
    "meta_path": [getattr(finder, "__qualname__", type(finder).__qualname__) for finder in sys.meta_path],
    "of workers": dict(config.ray_kwargs.ray_init.runtime_env.get("env_vars", {})),
    "our modules": sorted(name for name in sys.modules if name.startswith("verl_qerl")),
}
print(json.dumps(found))
