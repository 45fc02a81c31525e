"""Whether two answers are the same, by math-verify, in a process of its own.

Strings go in and a truth value comes out: sympy would compute a power like 9^(9^9) anew to unpickle it.
"""

from math_verify import parse, verify


def same(answer: str, truth: str) -> bool:
    """Whether what math-verify finds in `answer` equals `truth`, the inside of a box; False after its time limits."""
    wanted, given = parse(f"\\boxed{{{truth}}}"), parse(answer)
    return bool(wanted and given) and verify(wanted, given)
