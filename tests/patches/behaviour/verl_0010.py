"""The mask by which the engine counts the tokens of the loss is the one that rejection left."""

from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


mask = nested([1, 1, 1], [1, 1])
store = {
    "uid": NonTensorStack("a", "a"),
    "response_mask": mask,
    "loss_mask": mask,
    "rm_scores": nested([0.0, 0.0, 1.0], [0.0, 0.0]),
    "old_log_probs": nested([-1.0, -1.0, -1.0], [-1.0, -1.0]),
    "rollout_log_probs": nested([-4.0, -1.0, -1.0], [-1.0, -1.0]),
}
trainer_base.tq = SimpleNamespace(
    kv_batch_get=lambda keys, partition_id, select_fields: TensorDict(
        {name: store[name] for name in select_fields if name in store}, len(keys)
    ),
    kv_batch_put=lambda keys, partition_id, fields: store.update(fields.items()),
)
correction = {"rollout_is": None, "rollout_rs": "token_k3", "rollout_rs_threshold": 1.0}
algorithm = {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0}
config = {"algorithm": algorithm | {"rollout_correction": correction}, "actor_rollout_ref": {"rollout": {"n": 2}}}
batch = KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0"], tags=[{}, {}])
trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=OmegaConf.create(config)), batch, metrics={})
kept, counted = ([row.tolist() for row in store[name].unbind()] for name in ("response_mask", "loss_mask"))
if kept != [[0, 1, 1], [1, 1]]:
    raise RuntimeError(f"rejection itself has changed: {kept}")
assert counted == kept, f"the mean of the loss is over {counted} where {kept} are kept"
