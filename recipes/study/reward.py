"""The reward of the study: whether the answer is right, boxed or not, by the code that `eval` scores with.

What GRPO learns is so not how to box. `form`, whether there is a box, is recorded beside it and rewards nothing.
"""

from typing import Any

from verl_qerl.cli.eval.answers import boxed, judge

__all__ = ["boxed", "compute_score"]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """As verl calls it (`reward.custom_reward_function`).

    Returns:
        `score` and `acc` (1 where the answer is right, by which name verl validates), `form` (1 where it is boxed).
    """
    verdict = judge(solution_str, ground_truth)
    right = float(verdict.right)
    return {"score": right, "acc": right, "form": float(verdict.boxed)}
