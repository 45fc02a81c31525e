"""math-verify's verdict on a text; runs in a process of its own.

Strings go in, and strings and truth values come out: sympy would compute a power like 9^(9^9) anew to unpickle it.
"""

from math_verify import parse, verify


def find(text: str, truth: str) -> tuple[str | None, bool]:
    """What the text gives as its answer, None for nothing, and whether that equals `truth`, the inside of a box.

    False after math-verify's time limits.
    """
    wanted, given = parse(f"\\boxed{{{truth}}}"), parse(text)
    answer = str(given[-1]) if given and isinstance(given[-1], str) else None
    return answer, bool(wanted and given) and bool(verify(wanted, given))
