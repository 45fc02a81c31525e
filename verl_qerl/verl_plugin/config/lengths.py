"""Sizes of batches that end a run after its start: limits in tokens, and parts that do not divide a whole."""

from verl_qerl.algos.options import is_number
from verl_qerl.options.rules import ACTOR, FSDP_STRATEGIES, ROLLOUT, Run, num_gpus, shown, trains_critic
from verl_qerl.verl_plugin.config.sequence_parallel import actor_size, critic_size

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


def check_micro_batches(run: Run) -> None:
    """Refuse with a ValueError micro-batches that the actor's workers assert not to be.

    Those that count tokens in one of its passes and answers in the other, and, counted in answers, those that do not
    divide a mini-batch.
    """
    (update, _), (log_probs, _) = _IN_TOKENS
    if run(update) is not None and run(log_probs) != run(update):
        raise ValueError(
            f"{log_probs}={run(log_probs)} does not go together with {update}={run(update)}: verl's workers count the"
            f" micro-batches of both alike. Accepted is {run(update)}. Leave {log_probs} out; it follows the other."
        )
    size, mini, n = f"{ACTOR}.ppo_micro_batch_size_per_gpu", run(f"{ACTOR}.ppo_mini_batch_size"), run(f"{ROLLOUT}.n")
    if run(f"{ACTOR}.strategy") not in FSDP_STRATEGIES:
        return  # others share a batch otherwise
    ranks = num_gpus(run) // (actor_size(run) or 1)
    if not run(update) and run(size) and mini and n and mini * n % (run(size) * ranks):
        raise ValueError(
            f"{size}={run(size)} on {ranks} data-parallel ranks does not divide the {mini * n} answers of a mini-batch:"
            f" {ACTOR}.ppo_mini_batch_size={mini} times {ROLLOUT}.n={n}. Accepted is a size that divides the answers of"
            f" each rank. Change one of these, or set {ACTOR}.use_dynamic_bsz=True."
        )


def check_mini_batches(run: Run) -> None:
    """Refuse with a ValueError mini-batches, of the actor or of a critic, that the ranks cannot share alike."""
    sizes, n = {ACTOR: actor_size(run)}, run(f"{ROLLOUT}.n")
    if trains_critic(run):
        sizes["critic"] = critic_size(run)
    for node, size in sizes.items():
        mini, ranks = run(f"{node}.ppo_mini_batch_size"), num_gpus(run) // (size or 1)
        if run(f"{node}.strategy") in FSDP_STRATEGIES and mini and n and mini * n % ranks:
            raise ValueError(
                f"{node}.ppo_mini_batch_size={mini} times {ROLLOUT}.n={n} are {mini * n} answers, which {ranks}"
                " data-parallel ranks cannot share alike. Accepted is a multiple of the ranks. Change one of these."
            )
