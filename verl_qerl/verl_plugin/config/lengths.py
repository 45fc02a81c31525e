"""Limits in tokens that the longest sequence of a run goes beyond, which ends it when one comes."""

from verl_qerl.algos.options import is_number
from verl_qerl.options.rules import ACTOR, ROLLOUT, Run, shown
from verl_qerl.verl_plugin.config.sequence_parallel import actor_size

# Switches of batches that are counted in tokens, and the most tokens of one on a GPU.
_IN_TOKENS = (
    (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
)


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
    sharing = actor_size(run) or 1
    for switch, limit in _IN_TOKENS:
        tokens = run(limit)
        if run(switch) and is_number(tokens) and tokens * sharing < longest:
            raise ValueError(
                f"{limit}={tokens} does not go together with {switch}=True and sequences of {longest} tokens: verl ends"
                " the run at the first that is longer than a micro-batch. Accepted is as many, or more. Raise it, or"
                " lower data.max_response_length."
            )
