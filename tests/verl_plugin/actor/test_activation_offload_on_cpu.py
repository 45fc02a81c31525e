"""verl's activation offload around a packed base, with verl's own code and a CPU in the GPU's place."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

CASES = ("all, kept", "all, checkpointed", "some, kept", "some, checkpointed")


@pytest.fixture(scope="module")
def found(fresh_json):
    script = Path(__file__).with_name("activation_offload_cases.py")
    return fresh_json(str(script), "cpu")


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_it(found, case):
    assert found[case]["floats"] > 4 * 48 * 128  # at least what goes into the layers
    assert found[case]["error"] == 0


@pytest.mark.parametrize("case", CASES)
def test_the_base_stays_where_it_is(found, case):
    """Linears without an adapter among it: `some` adapts two of seven."""
    assert found[case]["packed"] == 0
