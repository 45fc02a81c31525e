r"""The reward of the study: whether the answer is right, apart from how it is written.

The answer is what the last `\boxed{}` holds; without a whole one, what math-verify finds at the end of the text (a
"final answer is", the last formula or number). So a right answer in prose is worth as much as a boxed one, and what
GRPO learns is not how to box. `form`, whether there is a box, is recorded beside it and rewards nothing.

verl calls `compute_score` in threads, where math-verify's own time limits (signals) do not work, and sympy can take for
ever: other processes do the arithmetic.
"""

import functools
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from fractions import Fraction
from pathlib import Path
from typing import Any

from verl_qerl.cli.data import last_boxed

sys.path.append(str(Path(__file__).parent))  # verl knows this file by its path; the processes import what is beside it

LONGEST = 300  # characters of an answer, and of the end of a text that is searched for one
SECONDS = 30.0  # math-verify's own limits are 5 s for each part
_NUMBER = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?:\s+[A-Za-z]{2,})*")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """As verl calls it (`reward.custom_reward_function`).

    Returns:
        `score` and `acc` (1 where the answer is right, by which name verl validates), `form` (1 where it is boxed).
    """
    answer = boxed(solution_str)
    right = float(_is_right(solution_str if answer is None else answer, ground_truth, answer is not None))
    return {"score": right, "acc": right, "form": float(answer is not None)}


def boxed(text: str) -> str | None:
    """What the last box holds; None without one, and where it is not closed."""
    try:
        return last_boxed(text)
    except ValueError:
        return None


def number(text: str) -> Fraction | None:
    r"""A plain number, with thousands separators, a currency sign, a per cent sign or a unit in words; or None.

    Per cent is a unit: 50\% is 50, not 0.5. math-verify knows neither `18 dollars` nor `50\%` nor `18.`.
    """
    match = _NUMBER.fullmatch(_bare(text))
    return Fraction(match[1] + match[2].replace(",", "") + (match[3] or "")) if match else None


def _bare(text: str) -> str:
    text = re.sub(r"\\?\$|\\[!,;] ?|\{,\}", lambda sign: "," if sign[0] == "{,}" else "", text).strip()
    return re.sub(r"\s*\\?%$", "", re.sub(r"\.$", "", text))


def _is_right(answer: str, truth: str, is_boxed: bool) -> bool:
    if is_boxed:
        if len(answer) > LONGEST:
            return False
        if answer.strip() == truth.strip():
            return True
        given, wanted = number(answer), number(truth)
        if given is not None and wanted is not None:
            return given == wanted
        answer = f"\\boxed{{{_bare(answer)}}}"
    import equality

    try:
        return _pool().submit(equality.same, answer[-LONGEST - 20 :], _bare(truth)).result(SECONDS)
    except TookTooLong:
        print(f"math-verify took more than {SECONDS:.0f} s: the answer counts as wrong")
        _pool.cache_clear()  # one of its processes is lost
        return False


@functools.cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
