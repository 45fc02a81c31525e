"""Greedy answers of two engines, beside each other."""

from typing import NamedTuple

Answer = list[tuple[int, float]]  # tokens and their log-probs


class Compared(NamedTuple):
    """What two engines answered to the same prompts.

    Attributes:
        differences: Of log-probs, up to the first token that differs: two of random weights nearly as probable, and
            what follows is another text.
        agreed: Share of these tokens that are the same.
    """

    differences: list[float]
    agreed: float


def compare(answers: list[Answer], others: list[Answer]) -> Compared:
    """Answers of one engine and of another, of the same lengths."""
    differences, agreed = [], 0
    for one, other in zip(answers, others, strict=True):
        for (token, log_prob), (its_token, its_log_prob) in zip(one, other, strict=True):
            differences.append(abs(log_prob - its_log_prob))
            if token != its_token:
                break
            agreed += 1
    return Compared(differences, agreed / len(differences))
