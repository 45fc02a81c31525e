"""Limits in tokens that the longest sequence of a run goes beyond, which ends it when one comes."""

from verl_qerl.algos.options import is_number
from verl_qerl.options.rules import ACTOR, FSDP, ROLLOUT, Run, shown

# Switches of batches that are counted in tokens, and the most tokens of one on a GPU.
_IN_TOKENS = (
    (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
)
_SHARING = "ulysses_sequence_parallel_size"


def check_lengths(run: Run) -> None:
    """Refuse with a ValueError an engine or a micro-batch without room for the longest question and its answer."""
    question, answer, room = run("data.max_prompt_length"), run("data.max_response_length"), f"{ROLLOUT}.max_model_len"
    if not (is_number(question) and is_number(answer)):
        return  # of another program of verl
    longest = question + answer
    if run(room) is not None:
        if run(room) <= question:
            raise ValueError(
                f"{room}={shown(run(room))} does not go together with data.max_prompt_length={question}: a question of"
                " that length leaves no room for an answer, and verl asks it again and again. Accepted is null, or more"
                " than that. Raise the one, or lower the other."
            )
        longest = min(longest, run(room))
    sharing = run(f"{ACTOR}.{_SHARING}") or 1  # the older name, which wins in verl where it is set
    sharing = sharing if sharing != 1 else run(f"{FSDP}.{_SHARING}") or 1
    for switch, limit in _IN_TOKENS:
        tokens = run(limit)
        if run(switch) and is_number(tokens) and tokens * sharing < longest:
            raise ValueError(
                f"{limit}={tokens} does not go together with {switch}=True and sequences of {longest} tokens: verl ends"
                " the run at the first that is longer than a micro-batch. Accepted is as many, or more. Raise it, or"
                " lower data.max_response_length."
            )
