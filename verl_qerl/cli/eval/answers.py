r"""Whether a model's answer to a question of mathematics is right, apart from how it is written.

The answer is what the last `\boxed{}` holds; without a whole one, what math-verify finds at the end of the text (a
"final answer is", the last formula or number). So a right answer in prose is worth as much as a boxed one.

Rewards are asked for in threads, where math-verify's own time limits (signals) do not work, and sympy can take for
ever: other processes do the arithmetic.
"""

import importlib.util
import logging
import multiprocessing
import re
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from typing import NamedTuple

from verl_qerl.cli.data.schema import last_boxed
from verl_qerl.cli.interrupts import end_with_the_parent

logger = logging.getLogger(__name__)

LONGEST = 300  # characters of an answer, and of the end of a text that is searched for one
SECONDS = 30.0  # math-verify's own limits are 5 s for each part
_LOCK = threading.Lock()
_shared: list[ProcessPoolExecutor] = []  # one at most
# Words that make another number of the one before them, as no unit does; a unit itself can be squared or cubed.
_OTHER_NUMBER = (
    "(?:hundred|thousand|million|billion|trillion|dozen)s?|hal(?:f|ves)|factorial|pi|and|or|to|over|plus|minus"
    "|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
    "|one|two|three|four|five|six|seven|eight|nine|ten"
)
_UNIT = rf"(?!\s+(?:squared|cubed)\b)(?:\s+(?!(?:{_OTHER_NUMBER})\b)[A-Za-z]{{2,}})*"
_NUMBER = re.compile(rf"(-?)(\d{{1,3}}(?:,\d{{3}})+|\d+)(\.\d+)?{_UNIT}", re.IGNORECASE)


class Verdict(NamedTuple):
    """What is said of one answer.

    Attributes:
        answer: What the box holds, or what was found at the end; None where there is nothing.
    """

    answer: str | None
    right: bool
    boxed: bool


def check_installed() -> None:
    """Require math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "math-verify is not installed: `eval` compares answers with it. Version 0.8 or later is accepted. Run"
            " `pip install 'verl-qerl[eval]'`."
        )


def judge(text: str, truth: str, cut: bool = False) -> Verdict:
    """The verdict on a whole text.

    Args:
        truth: The inside of a box.
        cut: The text reached its limit of tokens; without a box it has no answer, whatever number it ends in.
    """
    answer = boxed(text)
    if answer is not None:
        return Verdict(answer, same(answer, truth), True)
    if cut:
        return Verdict(None, False, False)
    return Verdict(*_find(text[-LONGEST - 20 :], truth), False)


def boxed(text: str) -> str | None:
    """What the last box holds; None without one, and where it is not closed or empty, as in the question's own."""
    try:
        return last_boxed(text).strip() or None
    except ValueError:
        return None


def same(answer: str, truth: str) -> bool:
    """Whether the insides of two boxes are the same; units, currencies and ways to write a number do not count."""
    if answer.strip() == truth.strip():
        return True
    if len(answer) > LONGEST:
        return False
    given, wanted = number(answer), number(truth)
    if given is not None and wanted is not None:
        return given == wanted
    return _find(f"\\boxed{{{_bare(answer)}}}", truth)[1]


def number(text: str) -> Fraction | None:
    r"""A plain number, with thousands separators, a currency sign, a per cent sign or a unit in words; or None.

    Per cent is a unit: 50\% is 50, not 0.5. math-verify knows neither `18 dollars` nor `50\%` nor `18.`.
    """
    match = _NUMBER.fullmatch(_bare(text))
    return Fraction(match[1] + match[2].replace(",", "") + (match[3] or "")) if match else None


def _bare(text: str) -> str:
    text = re.sub(r"\\?\$|\\[!,;] ?|\{,\}", lambda sign: "," if sign[0] == "{,}" else "", text).strip()
    return re.sub(r"\s*\\?%$", "", re.sub(r"\.$", "", text))


def _find(text: str, truth: str) -> tuple[str | None, bool]:
    """What the text gives as its answer, None for nothing, and whether that equals `truth`, the inside of a box."""
    asked, pool = (text, _bare(truth)), _pool()
    try:
        return pool.submit(_verify, *asked).result(SECONDS)
    except TookTooLong:
        logger.warning("math-verify took more than %.0f s: the answer counts as wrong.", SECONDS)
        _leave(pool)  # one of its processes is lost
        return None, False
    except BrokenProcessPool:  # by this answer, or by another that was compared at the same time
        _leave(pool)
    own = _new_pool(1)
    try:
        own.submit(_import_math_verify).result()  # fails, and ends the run, where no answer could
        try:
            return own.submit(_verify, *asked).result(SECONDS)
        except (TookTooLong, BrokenProcessPool):
            logger.warning("math-verify does not get through this answer, which counts as wrong.")
            return None, False
    finally:
        own.shutdown(wait=False, cancel_futures=True)


def _verify(text: str, truth: str) -> tuple[str | None, bool]:
    """`_find`, in a process of the pool; not right after math-verify's time limits.

    Strings go in, strings and truth values come out: sympy would compute a power like 9^(9^9) anew to unpickle it.
    """
    from math_verify import parse, verify

    wanted, given = parse(f"\\boxed{{{truth}}}"), parse(text)
    answer = str(given[-1]) if given and isinstance(given[-1], str) else None
    return answer, bool(wanted and given) and bool(verify(wanted, given))


def _import_math_verify() -> None:
    import math_verify  # noqa: F401


def _pool() -> ProcessPoolExecutor:
    """The processes that all threads share."""
    with _LOCK:
        if not _shared:
            _shared.append(_new_pool(2))
        return _shared[0]


def _leave(pool: ProcessPoolExecutor) -> None:
    """Let the next answer have other processes, unless another thread has seen to it."""
    with _LOCK:
        if pool in _shared:
            _shared.remove(pool)


def _new_pool(processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_the_parent)
