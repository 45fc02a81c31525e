from dataclasses import dataclass
from typing import ClassVar

import pytest

from verl_qerl.algos.options import SWITCH, Accepts, Options, is_names, is_number, one_of, option


@dataclass(frozen=True)
class Kind(Options):
    NODE: ClassVar[str] = "node"

    size: int = option(3, Accepts("a number below 10", lambda value: is_number(value) and value < 10))
    name: str = option("a", one_of("a", "b"))


@dataclass(frozen=True)
class Switched(Options):
    NODE: ClassVar[str] = "node"

    enabled: bool = option(False, SWITCH)
    names: tuple[str, ...] = option((), Accepts("a list of names", is_names))


def test_a_dataclass_from_its_options():
    assert Kind.from_mapping(None) == Kind.from_mapping({}) == Kind() == Kind(3, "a")
    assert Kind.from_mapping({"size": 5}) == Kind(5)
    assert Switched.from_mapping({"enabled": False, "names": ["c"]}) == Switched(False, ["c"])


def test_an_unknown_option_is_named_with_those_that_are_known():
    message = r"^unknown option node\.sise=5\. Known options are size, name\. Check the spelling\.$"
    with pytest.raises(ValueError, match=message):
        Kind.from_mapping({"sise": 5})


@pytest.mark.parametrize("options", [True, 3, "size", ["size"]], ids=str)
def test_something_else_than_options_is_refused(options):
    said = r"^node=.* is no group of options\. Accepted .*`\+node\.size=\.\.\.`\. Set them"
    with pytest.raises(ValueError, match=said):
        Kind.from_mapping(options)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(Kind, "size", 10), (Kind, "size", True), (Kind, "name", "c"), (Switched, "enabled", 1), (Switched, "names", "c")],
    ids=str,
)
def test_a_value_that_is_not_accepted_is_refused_with_those_that_are(kind, name, value):
    said = rf"^node\.{name}={value!r} is no value of this option\. Accepted: .*\. Correct the option\.$"
    with pytest.raises(ValueError, match=said):
        kind(**{name: value})


@pytest.mark.parametrize(("kind", "name", "value"), [(Kind, "size", "5"), (Switched, "enabled", "true")], ids=str)
def test_text_that_looks_like_a_value_is_told_as_that(kind, name, value):
    said = rf"^node\.{name}='{value}' is no value .* That is text; .* take \$\{{oc\.decode:.*\. Correct the option\.$"
    with pytest.raises(ValueError, match=said):
        kind(**{name: value})


def test_options_beside_a_switch_that_nobody_set_have_no_effect():
    said = r"^node\.names=\['c'\] has no effect while NODE is off\. Accepted is .* `\+node\.enabled=true`\. Add it"
    with pytest.raises(ValueError, match=said):
        Switched.from_mapping({"names": ["c"]})
