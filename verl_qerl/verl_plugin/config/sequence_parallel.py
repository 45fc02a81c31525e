"""Sequence parallelism as verl has it (Ulysses), and what it needs of the rest of a run.

Ranks that share a sequence exchange tokens for heads inside what transformers calls flash attention: verl replaces that
function and no other. With sdpa or eager each rank would attend to its own part of a sequence, and train on that.
"""

from typing import Any

import torch

from verl_qerl.options.rules import ACTOR, FSDP, Run, trains_critic
from verl_qerl.verl_plugin.config.attention import default_attention

_SIZE = "ulysses_sequence_parallel_size"
_OPTION = f"actor.fsdp_config.{_SIZE}"


def check_sequence_parallel(
    size: int,
    attention: str,
    remove_padding: bool,
    num_ranks: int,
    option: str = _OPTION,
    model: str = "actor_rollout_ref.model",
) -> None:
    """Refuse ranks that would share sequences and could not.

    Args:
        size: Ranks that share a sequence.
        attention: transformers' name for the attention of the model.
        remove_padding: `model.use_remove_padding`.
        num_ranks: Number of ranks that the model is trained on.
        option: The option that sets the size, for messages.
        model: Node of the model in the configuration, for messages.

    Raises:
        ValueError: They could not.
    """
    if size == 1:
        return
    if size < 1 or num_ranks % size:
        raise ValueError(
            f"{option}={size} does not divide the {num_ranks} GPUs of the run. Accepted are divisors of it; 1 shares"
            " no sequence. Set one of them."
        )
    if not remove_padding:
        raise ValueError(
            f"{model}.use_remove_padding={remove_padding} does not go together with {option}={size}: padded sequences"
            f" are not shared. Accepted is True. Set {model}.use_remove_padding=True, or the size to 1."
        )
    if "flash" not in attention or "|" in attention:  # transformers' own rule; what is paged is another function
        raise ValueError(
            f"{model}.override_config.attn_implementation={attention} does not go together with {option}={size}: verl"
            " brings shared sequences together in flash attention alone, and each GPU would attend to its own part."
            " Accepted is flash_attention_2 or another one of that kind. Leave the option out and install flash-attn,"
            " or set the size to 1."
        )


def check_sharing(run: Run) -> None:
    """`check_sequence_parallel` of actor and critic, on the driver; their attention may be one of ours.

    Raises:
        ValueError: Ranks of one of the two would share sequences and could not.
    """
    older_name = run(f"{ACTOR}.{_SIZE}") or 1  # wins in verl where it is set
    sizes = {"actor_rollout_ref.model": (_OPTION, older_name if older_name > 1 else run(f"{FSDP}.{_SIZE}") or 1)}
    if trains_critic(run):
        sizes["critic.model"] = (f"critic.fsdp.{_SIZE}", run(f"critic.fsdp.{_SIZE}") or 1)
    for model, (option, size) in sizes.items():
        check_sequence_parallel(
            size,
            run(f"{model}.override_config.attn_implementation") or default_attention(),
            bool(run(f"{model}.use_remove_padding")),
            (run("trainer.n_gpus_per_node") or 1) * (run("trainer.nnodes") or 1),
            option,
            model,
        )


_Engine: Any = object  # mixed into an engine of verl


class SequenceParallelMixin(_Engine):
    """Mixed into verl's FSDP engines; acts only if the engine's configuration is ours."""

    def _init_device_mesh(self) -> None:
        if hasattr(self.engine_config, "uaq_scale"):
            check_sequence_parallel(
                self.engine_config.ulysses_sequence_parallel_size,
                self.model_config.hf_config._attn_implementation,
                self.model_config.use_remove_padding,
                torch.distributed.get_world_size(),
            )
        super()._init_device_mesh()
