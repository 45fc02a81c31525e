"""Sequence parallelism as verl has it (Ulysses), and what it needs of the rest of a run.

Ranks that share a sequence exchange tokens for heads inside what transformers calls flash attention: verl replaces that
function and no other. With sdpa or eager each rank would attend to its own part of a sequence, and train on that.
"""

from verl_qerl.options.rules import ACTOR, FSDP, Run, num_gpus, shown, trains_critic
from verl_qerl.verl_plugin.config.attention import default_attention

_SIZE = "ulysses_sequence_parallel_size"


def check_sharing(run: Run) -> None:
    """Refuse with a ValueError GPUs that are to share sequences, of the actor or of a critic, and cannot."""
    _check(run, "actor_rollout_ref.model", f"actor.fsdp_config.{_SIZE}", actor_size(run))
    if trains_critic(run):
        _check(run, "critic.model", f"critic.fsdp.{_SIZE}", critic_size(run))


def actor_size(run: Run) -> int | None:
    """GPUs that share a sequence of the actor, as the run sets them."""
    size = run(f"{ACTOR}.{_SIZE}") or 1  # the older name, which wins in verl where it is set
    return size if size != 1 else run(f"{FSDP}.{_SIZE}")


def critic_size(run: Run) -> int | None:
    """GPUs that share a sequence of the critic, as the run sets them."""
    return run(f"critic.fsdp.{_SIZE}")


def _check(run: Run, model: str, option: str, size: int | None) -> None:
    if size in (None, 1):
        return
    gpus = num_gpus(run)
    if type(size) is not int or size < 1 or gpus % size:
        raise ValueError(
            f"{option}={shown(size)} does not divide the {gpus} GPUs of the run. Accepted are divisors of it; 1 shares"
            " no sequence. Set one of them."
        )
    if not run(f"{model}.use_remove_padding"):
        raise ValueError(
            f"{model}.use_remove_padding=False does not go together with {option}={size}: padded sequences are not"
            f" shared. Accepted is True. Set {model}.use_remove_padding=True, or the size to 1."
        )
    attention = run(f"{model}.override_config.attn_implementation") or default_attention()
    if "flash" not in attention or "|" in attention:  # transformers' own rule; what is paged is another function
        raise ValueError(
            f"{model}.override_config.attn_implementation={attention} does not go together with {option}={size}: verl"
            " brings shared sequences together in flash attention alone, and each GPU would attend to its own part."
            " Accepted is flash_attention_2 or another one of that kind. Leave the option out and install flash-attn,"
            " or set the size to 1."
        )
