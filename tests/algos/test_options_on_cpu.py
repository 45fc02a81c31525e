from dataclasses import dataclass

import pytest

from verl_qerl.algos.options import read_options


@dataclass(frozen=True)
class Kind:
    size: int = 3
    name: str = "a"


def test_a_dataclass_from_its_options():
    assert read_options(Kind, "node", None, "+node.size=1") == Kind()
    assert read_options(Kind, "node", {}, "+node.size=1") == Kind()
    assert read_options(Kind, "node", {"size": 5}, "+node.size=1") == Kind(5)


def test_an_unknown_option_is_named_with_those_that_are_known():
    message = r"^unknown option node\.sise=5\. Known options are size, name\. Check the spelling\.$"
    with pytest.raises(ValueError, match=message):
        read_options(Kind, "node", {"sise": 5}, "+node.size=1")


@pytest.mark.parametrize("options", [True, 3, "size", ["size"]], ids=str)
def test_something_else_than_options_is_refused(options):
    with pytest.raises(ValueError, match=r"^node=.* is no group of options\. Accepted .*`\+node\.size=1`\. Set them"):
        read_options(Kind, "node", options, "+node.size=1")
