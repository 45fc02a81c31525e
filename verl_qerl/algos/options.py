"""Options of a configuration node -> a frozen dataclass, which checks their values itself."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Options = TypeVar("Options")


def read_options(kind: type[Options], node: str, options: Any, example: str) -> Options:
    """Build `kind` from the options that a run sets; None gives the defaults.

    Args:
        kind: A dataclass.
        node: Where the options stand, for the messages: `aqn`.
        options: A mapping, or None.
        example: How one is set: `+aqn.enabled=true`.

    Raises:
        ValueError: The node holds no options, or one that `kind` does not know or refuses.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"{node}={options!r} is no group of options. Accepted are options such as `{example}`. Set them one by one."
        )
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name, value in (options or {}).items():
        if name not in known:
            raise ValueError(
                f"unknown option {node}.{name}={value!r}. Known options are {', '.join(known)}. Check the spelling."
            )
    return kind(**(options or {}))


def read_switched(kind: type[Options], node: str, options: Any) -> Options:
    """`read_options` for a node that `enabled` switches on.

    Raises:
        ValueError: Also where options are set, and `enabled` is not.
    """
    example = f"+{node}.enabled=true"
    found = read_options(kind, node, options, example)
    if options and "enabled" not in options:
        name, value = next(iter(options.items()))
        raise ValueError(
            f"{node}.{name}={value} has no effect while {node.upper()} is off. Accepted is the option beside"
            f" `{example}`. Add it, or leave both out."
        )
    return found
