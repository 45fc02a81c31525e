"""The interface of a feature of the trainer: its hooks, and the run that they see."""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from omegaconf import DictConfig

from verl_qerl.algos.aqn import sigma_at_step
from verl_qerl.options import rules
from verl_qerl.options.schema import Gate
from verl_qerl.verl_plugin.config.apply import aqn_options
from verl_qerl.verl_plugin.config.nodes import run_of


class Rescored(NamedTuple):
    """Sequences of one batch and the log-probs that the rollout engine gives to the tokens of their answers.

    Attributes:
        clean: [tokens] float32 for each sequence, without noise; NaN where the engine cut the answer.
        noisy: The same with the noise of the step; None if there is no noise or no feature asked for it.
        stale: [sequences] bool, whether earlier weights sampled the sequence.
        own_draws: Whether each answer was sampled with its own draw of the noise, which scoring cannot repeat.
    """

    keys: list[str]
    clean: list[torch.Tensor]
    noisy: list[torch.Tensor] | None
    stale: torch.Tensor
    own_draws: bool


class Run:
    """A run of verl's trainer: its options, its rollout workers, its metrics, and what features tell each other.

    Attributes:
        trainer: verl's trainer; its constructor has not run yet when features are made.
        gate: Options of the gate; None where no option of ours is set.
        option: Dotted name -> what the run sets, None where it sets nothing.
        syncs_each_step: Whether every step syncs the weights once; `separate_async` makes several updates between two.
        bypasses: Whether verl takes the rollout's log-probs for those of the actor before its update.
        requantizes: Whether all weights are trained and every sync quantizes them.
        searched: Stage -> (first step, sigma) found for `aqn.target_kl`, as `sigma_at_step` takes it.
        rescored: Answers of that batch that the rollout has scored again; None if no feature asked for it.
        actor_scores: What `score_actor` has found of that batch: whether rounded, and keys -> log-probs.
        metrics: What features add to those of the step that is ending.
    """

    def __init__(self, trainer: Any, config: DictConfig, gate: Gate | None) -> None:
        self.trainer, self.config, self.aqn, self.gate = trainer, config, aqn_options(config), gate
        self.option = run_of(config)
        self.syncs_each_step = self.option("trainer.v1.trainer_mode") in rules.SYNC_MODES
        self.bypasses = bool(self.option(rules.BYPASS))
        self.requantizes = rules.REQUANTIZED.beside(self.option) is not None
        self.searched: dict[int, tuple[int, float]] = {}
        self.sampled: Any = None
        self.rescored: Rescored | None = None
        self.actor_scores: dict[tuple[bool | str, ...], torch.Tensor] = {}
        self.metrics: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The current step; between steps and before training, the last one that has ended."""
        return self.trainer.global_steps

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole training, which `trainer.total_epochs` ends too."""
        trainer = self.trainer
        return min(trainer.total_training_steps, trainer.steps_per_epoch * self.config.trainer.total_epochs)

    def sigma(self, step: int) -> float:
        """The noise of a step, 0 outside of training and without noise."""
        inside = 1 <= step <= self.total_steps
        return sigma_at_step(self.aqn, step, self.total_steps, self.searched) if inside else 0.0

    def servers(self) -> list[Any]:
        """The first server of each replica, which reaches all workers of the replica."""
        return [replica.servers[0] for replica in self.trainer.llm_server_manager.get_replicas()]

    def clear_engines(self) -> None:
        """Abort what is in flight before answers are scored: in `colocate_async`, where verl does so before it sleeps.

        Otherwise scoring waits behind these requests, and their tokens are sampled with the noise that is being
        measured. Their clients go on with them after the next weight sync, as when verl aborts them.
        """
        if self.option("trainer.v1.trainer_mode") != rules.COLOCATED:
            return
        self.trainer.checkpoint_manager.abort_replicas()
        # That has paused the engines too. Servers let scoring alone in until verl resumes them.
        ray.get([server.resume_engine_generation.remote() for server in self.servers()])

    @cached_property
    def max_model_len(self) -> int:
        """Context length of the engines; where `rollout.max_model_len` is null, their servers alone know it."""
        (config,) = ray.get([self.servers()[0].get_rollout_config.remote()])
        return config.max_model_len

    def ask_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """The answer of every worker of every replica."""
        calls = [server.collective_rpc.remote(method, kwargs=kwargs) for server in self.servers()]
        return [answer for answers in ray.get(calls) for answer in answers or ()]


class Feature:
    """Something that our options add to verl's trainer; each hook is called by the method of verl that it names."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def before_init_end(self) -> None:
        """Workers and engines are there; the first weight sync follows."""

    def after_init_end(self) -> None:
        """The first weight sync is done."""

    def before_refill(self) -> None:
        """More prompts are sampled than those of the step: in the place of groups that failed or are left out."""

    def before_sample_end(self) -> None:
        """A batch is sampled, and the rollout is still awake."""

    def after_old_log_prob(self, batch: Any, tags: dict[str, dict], metrics: dict[str, Any]) -> None:
        """The actor's log-probs are there, before any update.

        Args:
            tags: Key -> what the replay buffer knows of the answer.
            metrics: The step's metrics, changed in place.
        """

    def before_step_end(self) -> None:
        """The step's update is done; the weight sync for the next step follows."""

    def after_step_end(self) -> None:
        """The weight sync is done."""

    def before_validate_begin(self) -> None:
        """Validation is next."""

    def after_validate_end(self) -> None:
        """Validation is over."""

    def before_save(self, folder: Path) -> None:
        """A checkpoint will be written to `folder`, which may not be there yet."""

    def after_save(self, folder: Path) -> None:
        """The whole checkpoint is written."""

    def before_load(self) -> None:
        """A checkpoint will be looked for, and loaded."""

    def after_load(self) -> None:
        """`run.step` is the step of the checkpoint, 0 without one."""

    def on_error(self, error: Exception) -> None:
        """Training has failed, or its first weight sync; raise a better error if there is one."""
