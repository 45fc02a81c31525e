"""Options of a configuration node as a frozen dataclass, which checks their names and values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

_Node = TypeVar("_Node", bound="Options")


class Accepts(NamedTuple):
    """Which values an option takes."""

    told: str
    test: Callable[[Any], bool]


def one_of(*choices: str) -> Accepts:
    """One of these words."""
    return Accepts(", ".join(choices), choices.__contains__)


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_names(value: Any) -> bool:
    """Whether a value is a list of strings, maybe an empty one."""
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


SWITCH = Accepts("true, false", lambda value: isinstance(value, bool))


def option(default: Any, accepts: Accepts, meaning: str = "") -> Any:
    """A field of Options: its default, which values it takes, and what it is for in the documentation."""
    return field(default=default, metadata={"accepts": accepts, "meaning": meaning})


def refusal(name: str, value: Any, accepted: str) -> ValueError:
    """Of a value that an option does not take."""
    is_text = isinstance(value, str) and (value[:1].isdigit() or value.lower() in ("true", "false", "null"))
    hint = " That is text; of a variable of the environment take ${oc.decode:${oc.env:NAME}}." if is_text else ""
    return ValueError(f"{name}={value!r} is no value of this option. Accepted: {accepted}.{hint} Correct the option.")


@dataclass(frozen=True)
class Options:
    """A node of options.

    Attributes:
        NODE: Where it stands in a configuration, for the messages.
    """

    NODE: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            accepts = each.metadata.get("accepts")
            if accepts is not None and not accepts.test(getattr(self, each.name)):
                raise self._refused(each.name, accepts.told)

    def _refused(self, name: str, accepted: str) -> ValueError:
        return refusal(f"{self.NODE}.{name}", getattr(self, name), accepted)

    @classmethod
    def from_mapping(cls: type[_Node], options: Any) -> _Node:
        """Read a node of a configuration; None gives the defaults.

        Raises:
            ValueError: An option is unknown or its value is not accepted, or the node has a switch `enabled` that is
                not set beside the others.
        """
        known = [each.name for each in fields(cls)]
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"{cls.NODE}={options!r} is no group of options. Accepted are options such as `+{cls.NODE}.{known[0]}="
                "...`. Set them one by one."
            )
        given = dict(options or {})
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"unknown option {cls.NODE}.{name}={value!r}. Known options are {', '.join(known)}. Check the"
                    " spelling."
                )
        found = cls(**given)
        if given and "enabled" in known and "enabled" not in given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"{cls.NODE}.{name}={value} has no effect while {cls.NODE.upper()} is off. Accepted is the option"
                f" beside `+{cls.NODE}.enabled=true`. Add it, or leave both out."
            )
        return found
