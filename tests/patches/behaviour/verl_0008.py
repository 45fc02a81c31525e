"""A policy loss with a parameter rollout_log_probs gets the batch's, padded like the rest."""

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

found = []


@register_policy_loss("taking")
def taking(*, log_prob, rollout_log_probs=None, **kwargs):
    found.append(rollout_log_probs)
    return log_prob.sum(), {}


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


fields = {
    "prompts": nested([0], [0]),
    "responses": nested([1, 2], [3]),
    "response_mask": nested([1, 1], [1]),
    "old_log_probs": nested([-1.0, -1.0], [-1.0]),
    "rollout_log_probs": nested([-2.0, -3.0], [-4.0]),
    "advantages": nested([1.0, 1.0], [1.0]),
}
batch = TensorDict(fields, batch_size=2)
tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=3, global_batch_size=2)
policy_loss = PolicyLossConfig(loss_mode="taking")
config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=policy_loss)
ppo_loss(config, {"log_probs": nested([-1.0] * 3, [-1.0] * 2)}, batch)
assert found[0] is not None, "the policy loss got no rollout_log_probs"
assert torch.equal(found[0], torch.tensor([[-2.0, -3.0], [-4.0, 0.0]]))
