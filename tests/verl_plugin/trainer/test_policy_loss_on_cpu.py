"""ACR as verl calls it: registered, fed with the rollout's log-probs, and equal to verl's losses where it must be."""

from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import load_beside, run_config
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from verl_qerl.algos.acr import ACRConfig
from verl_qerl.verl_plugin.trainer import policy_loss
from verl_qerl.verl_plugin.trainer.policy_loss import ActorLoss, acr_policy_loss, hand_over

featured = load_beside(__file__, "featured")
nested = load_beside(__file__, "transfer_queue_fakes").nested

ACR = "actor_rollout_ref.actor.policy_loss.loss_mode=acr"
# The losses of three algorithms as verl's options spell them.
SETTINGS = {
    "ppo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "token-mean"},
    "one-eps": {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None, "loss_agg_mode": "token-sum"},
    "grpo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "seq-mean-token-mean"},
    "dapo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "loss_agg_mode": "token-mean"},
    "dr-grpo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "seq-mean-token-sum-norm"},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def actor_config(loss_mode="acr", **options):
    options = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2} | options
    return FSDPActorConfig(**options, policy_loss=PolicyLossConfig(loss_mode=loss_mode))


def tokens(size=(6, 40)):
    """Arguments of a policy loss: many ratios leave the range, some sit on its bounds, some tokens are masked."""
    generator = torch.Generator().manual_seed(0)
    old, advantages = (torch.randn(size, generator=generator) for _ in range(2))
    log_prob = old + 0.4 * torch.randn(size, generator=generator)
    old[:, :8] = 0.0
    log_prob[:, :8] = torch.tensor([0.8, 1.2, 1.28, 1.0, 3.0, 10.0, 0.9, 1.1]).log()
    advantages[0, :8] = -1.0
    mask = torch.rand(size, generator=generator) < 0.8
    return {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}


def call(loss, arguments, setting, loss_mode="acr", options=None, **extra):
    """(loss, gradient, metrics) of one call as verl makes it."""
    config = actor_config(loss_mode, **setting)
    if options is not None:
        config.verl_qerl_acr = (options, None)
    log_prob = arguments["log_prob"].clone().requires_grad_()
    arguments = {**arguments, "log_prob": log_prob}
    value, metrics = loss(**arguments, loss_agg_mode=config.loss_agg_mode, config=config, **extra)
    value.backward()
    return value.detach(), log_prob.grad, metrics


@each_setting
@pytest.mark.parametrize("max_ratio", [1, 2.0, 1e9])
def test_equal_policies_give_the_vanilla_loss_bit_for_bit(setting, max_ratio):
    arguments = tokens()
    vanilla = call(core_algos.compute_policy_loss_vanilla, arguments, setting, "vanilla")
    behav = arguments["old_log_prob"]
    ours = call(acr_policy_loss, arguments, setting, options=ACRConfig(max_ratio), rollout_log_probs=behav)
    assert torch.equal(ours[0], vanilla[0])
    assert torch.equal(ours[1], vanilla[1])
    assert {name: ours[2][name] for name in vanilla[2]} == pytest.approx(vanilla[2], abs=1e-6)
    assert ours[2]["actor/acr_widened_frac"] == 0
    assert ours[2]["actor/acr_ratio"] == 1
    assert 0.1 < ours[2]["actor/pg_clipfrac"] < 0.9  # or the tokens would prove little


@each_setting
def test_untruncated_it_is_verls_own_importance_sampling(setting):
    arguments = tokens()
    behav = arguments["old_log_prob"] + 0.5 * torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    weights = (arguments["old_log_prob"] - behav).exp()
    vanilla = core_algos.compute_policy_loss_vanilla
    expected = call(vanilla, arguments, setting, "vanilla", rollout_is_weights=weights)
    ours = call(acr_policy_loss, arguments, setting, options=ACRConfig(1e9), rollout_log_probs=behav)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    # Truncated, the weights are verl's and the range is not.
    truncated = call(vanilla, arguments, setting, "vanilla", rollout_is_weights=weights.clamp(max=1.5))
    widened = call(acr_policy_loss, arguments, setting, options=ACRConfig(1.5), rollout_log_probs=behav)
    freed = truncated[1] != widened[1]
    assert 0 < freed.sum() < 20
    assert (truncated[1][freed] == 0).all()
    assert (widened[1][freed] < 0).all()  # A > 0: descent makes the token likelier


def micro_batch(**changes):
    """A rank's answers of 3 and 2 tokens; the rollout was 4 times less likely to draw the first token."""
    fields = {
        "prompts": nested([torch.zeros(1, dtype=torch.long)] * 2),
        "responses": nested([torch.arange(3), torch.arange(2)]),
        "response_mask": nested([torch.tensor([1, 1, 0]), torch.tensor([1, 1])]),
        "old_log_probs": nested([torch.full((3,), -1.0), torch.full((2,), -1.0)]),
        "rollout_log_probs": nested([torch.tensor([0.25, 1.0, float("nan")]).log() - 1, torch.full((2,), -1.0)]),
        "ref_log_prob": nested([torch.full((3,), -1.0), torch.full((2,), -1.0)]),
        "advantages": nested([torch.ones(3), -torch.ones(2)]),
    } | changes
    data = TensorDict({name: value for name, value in fields.items() if value is not None}, batch_size=2)
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=16, global_batch_size=2)
    return data


def model_output():
    """Log-probs of theta, one ahead of the tokens: 1.5 times the old probability everywhere."""
    row = (torch.tensor(1.5).log() - 1).expand(4)
    return {"log_probs": nested([row, row[:3]])}


def test_verls_loss_reaches_ours_with_the_log_probs_of_the_rollout():
    loss_fn = partial(hand_over, ACRConfig(2.0), actor_config())  # what the trainer sends to the actor
    loss, metrics = loss_fn(model_output=model_output(), data=micro_batch(), dp_group=None)
    # Widened to 2.4, weight 2; clipped at 1.2; A < 0 twice. 16 tokens in the batches of two ranks.
    assert loss.item() == pytest.approx((-2 * 1.5 - 1.2 + 1.5 + 1.5) / 16 * 2)
    assert metrics["actor/acr_widened_frac"].aggregate() == 0.25
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(loss.item())


def test_kl_stays_verls():
    config = actor_config(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="kl")
    loss, metrics = hand_over(ACRConfig(2.0), config, model_output(), micro_batch())
    kl = 4 * torch.tensor(1.5).log().item() / 16 * 2
    assert metrics["kl_loss"].aggregate() == pytest.approx(kl)
    assert loss.item() == pytest.approx(-1.2 / 16 * 2 + 0.5 * kl)


def test_the_configuration_of_the_actor_is_left_alone():
    config = actor_config()
    hand_over(ACRConfig(), config, model_output(), micro_batch())
    assert not hasattr(config, "verl_qerl_acr")


def test_a_batch_without_the_rollouts_log_probs_is_refused():
    with pytest.raises(
        ValueError, match=r"^the batch holds no rollout_log_probs, .* Set .*calculate_log_probs=True\.$"
    ):
        hand_over(ACRConfig(), actor_config(), model_output(), micro_batch(rollout_log_probs=None))
    with pytest.raises(ValueError, match=r"^policy_loss\.loss_mode=acr got rollout_log_probs=None\."):
        call(acr_policy_loss, tokens(), {})  # as from a trainer that is not ours


def test_verls_weights_on_top_are_refused():
    weights = nested([torch.ones(3), torch.ones(2)])
    with pytest.raises(ValueError, match=r"got the weights of algorithm\.rollout_correction\.rollout_is\."):
        hand_over(ACRConfig(), actor_config(), model_output(), micro_batch(rollout_is_weights=weights))


CORRECTION = "algorithm.rollout_correction"
BAD = {
    (ACR, "+acr.c=2"): r"^unknown option acr\.c=2\. Known options are max_ratio\.",
    ("+acr.max_ratio=2",): r"^acr=\{'max_ratio': 2\} does not go .*loss_mode=vanilla: it has no effect\. .* Set .*=acr",
    (
        ACR,
        "actor_rollout_ref.rollout.calculate_log_probs=False",
    ): r"calculate_log_probs=False does not go together with .*=acr: .* Accepted is True\. Set .*log_probs=True\.$",
    (ACR, f"{CORRECTION}.rollout_is=token"): r"rollout_is=token does not go .* count it twice\. Accepted is null\.",
    (ACR, f"{CORRECTION}.rollout_is=sequence"): r"rollout_is=sequence does not go together",
    (ACR, f"{CORRECTION}.rollout_is_threshold=4"): r"it would not be read: C is \+acr\.max_ratio\. Accepted is 2\.0\.",
    (ACR, f"{CORRECTION}.bypass_mode=True"): r"bypass_mode=True does not go .* so that their ratio is 1 and ACR is",
    (ACR, "distillation.enabled=True"): r"^distillation\.enabled=True does not go together",
    (ACR, "trainer.use_v1=False"): r"^trainer\.use_v1=False does not go together",
}


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[-1])
def test_bad_input_gives_its_sentence(overrides):
    config = run_config(*overrides)
    with pytest.raises(ValueError, match=BAD[overrides]):
        Trainer(config)
    with pytest.raises(ValueError, match=BAD[overrides]):  # before Ray starts
        validate_config(config=config, use_reference_policy=False, use_critic=False)


class Base(featured.Base):
    def __init__(self, config):
        super().__init__(config)
        self.actor_rollout_wg = SimpleNamespace(set_loss_fn=self.log.append)


Trainer = featured.trainer_of(ActorLoss, base=Base)


def test_the_trainer_gives_the_actor_its_loss():
    config = run_config(ACR, "+acr.max_ratio=4", "actor_rollout_ref.actor.clip_ratio_high=0.28")
    trainer = Trainer(config)
    trainer.on_init_end()
    loss_fn, then = trainer.log
    assert then == "sync"
    assert loss_fn.func is hand_over
    assert loss_fn.args == (ACRConfig(4), omega_conf_to_dataclass(config.actor_rollout_ref.actor))
    assert loss_fn.args[1].clip_ratio_high == 0.28


@pytest.mark.parametrize("overrides", [(), ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")], ids=str)
def test_options_compose_from_the_command_line(overrides):
    rejection = (f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0")
    for options, found in (((), ACRConfig()), (("+acr.max_ratio=8",), ACRConfig(8)), (rejection, ACRConfig())):
        trainer = Trainer(run_config(ACR, *options, *overrides))
        trainer.on_init_end()
        assert trainer.log[0].args[0] == found


@pytest.mark.parametrize("overrides", [(), ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")], ids=str)
def test_other_losses_are_left_to_verl(overrides):
    trainer = Trainer(run_config(*overrides))
    trainer.on_init_end()
    assert trainer.log == ["sync"]


def test_registers_once():
    registered = core_algos.get_policy_loss_fn("acr")
    assert registered is acr_policy_loss
    policy_loss.install(core_algos)
    assert core_algos.get_policy_loss_fn("acr") is registered
