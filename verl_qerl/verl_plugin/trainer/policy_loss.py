"""ACR under verl's name for it: `actor_rollout_ref.actor.policy_loss.loss_mode=acr`.

verl hands a policy loss everything but the log-probs of the rollout, which its batch holds (patches/verl/0008). So the
trainer gives the actor a loss function of ours, by the method verl has for it: it lays them beside the options in a
copy of the actor's configuration and calls verl's own loss, which looks up ours. Sums over the batch, entropy and KL
stay verl's.
"""

import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass

from verl_qerl.algos.acr import ACRConfig, ClipRange, LogProbs, acr_loss
from verl_qerl.verl_plugin.trainer.feature import Feature

NAME = "acr"


def acr_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss of a micro-batch and its metrics, as verl calls it for `loss_mode=acr`; see `algos.acr`.

    Args:
        old_log_prob: Log-probs of the proximal policy; all tensors are [batch, tokens].
        response_mask: 1 where a token counts.
        loss_agg_mode: How the tokens' losses become one number, by verl's `agg_loss`.
        config: verl's ActorConfig.
        rollout_log_probs: Log-probs of the rollout's policy; by default those that `hand_over` left in `config`.
        rollout_is_weights: verl's rollout correction, which must be off.

    Raises:
        ValueError: The rollout's log-probs are missing, or its weights are there.
    """
    from verl.trainer.ppo.core_algos import agg_loss  # whose import runs our hook, which imports this module

    options, handed = getattr(config, "verl_qerl_acr", (ACRConfig(), None))
    behav = handed if rollout_log_probs is None else rollout_log_probs
    if behav is None:
        raise ValueError(
            "policy_loss.loss_mode=acr got rollout_log_probs=None. Accepted are the log-probs of the rollout."
            " Set actor_rollout_ref.rollout.calculate_log_probs=True and use verl's V1 trainer."
        )
    if rollout_is_weights is not None:
        raise ValueError(
            "policy_loss.loss_mode=acr got the weights of algorithm.rollout_correction.rollout_is. Accepted is"
            " rollout_is=null, since ACR weighs by itself. Leave the option out."
        )
    log_probs = LogProbs(log_prob, old_log_prob, behav)
    bounds = (config.clip_ratio_low, config.clip_ratio_high)
    low, high = (config.clip_ratio if bound is None else bound for bound in bounds)
    clip = ClipRange(low, high, config.clip_ratio_c)
    matrix, metrics = acr_loss(log_probs, advantages, response_mask, clip, options.max_ratio)
    loss = agg_loss(loss_mat=matrix, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, metrics


def hand_over(options: ACRConfig, config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Call verl's `ppo_loss`, whose policy loss finds the rollout's log-probs in its configuration.

    Raises:
        ValueError: The batch holds no log-probs of the rollout.
    """
    from verl.workers.utils.losses import ppo_loss  # imports verl's workers, which import the module we hook

    if "rollout_log_probs" not in data:
        raise ValueError(
            "the batch holds no rollout_log_probs, which policy_loss.loss_mode=acr needs. Accepted is a rollout that"
            " sends them. Set actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    padded = data.select("rollout_log_probs").to_padded_tensor()["rollout_log_probs"]  # as ppo_loss pads the others
    config = copy.copy(config)
    config.verl_qerl_acr = (options, padded)
    return ppo_loss(config, model_output, data, dp_group)


class ActorLoss(Feature):
    """Gives the actor its loss function, where the policy loss is ACR."""

    def before_init_end(self) -> None:
        """Before the first batch."""
        options = ACRConfig.from_mapping(self._run.option(NAME))
        actor = omega_conf_to_dataclass(self._run.config.actor_rollout_ref.actor)
        self._run.trainer.actor_rollout_wg.set_loss_fn(partial(hand_over, options, actor))


def install(module: ModuleType) -> None:
    """Register the loss with verl's `core_algos`; a second call does nothing."""
    if NAME not in module.POLICY_LOSS_REGISTRY:
        module.register_policy_loss(NAME)(acr_policy_loss)
