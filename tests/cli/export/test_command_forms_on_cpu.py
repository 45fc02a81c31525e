"""Which form of export fits which base and which training; the refusals (test_command_on_cpu.py has whole exports)."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_qerl.cli.export.command import FORMS, check_base, check_trained


def base(form: str = "nvfp4", is_packed: bool = True):
    return SimpleNamespace(name="base", format=form, is_packed=is_packed)


def accepted(check) -> set[str]:
    def is_accepted(form: str) -> bool:
        try:
            check(form)
        except ValueError:
            return False
        return True

    return {form for form in FORMS if is_accepted(form)}


@pytest.mark.parametrize(
    ("found", "forms"),
    [
        (base(), set(FORMS)),
        (base(is_packed=False), set(FORMS) - {"base-and-adapter"}),
        (base("int8"), {"peft", "merged-bf16"}),
    ],
    ids=["packed", "not packed", "int8"],
)
def test_what_a_base_goes_into(found, forms):
    assert accepted(lambda form: check_base(form, found)) == forms


@pytest.mark.parametrize(
    ("norms", "factors", "forms"),
    [
        ({}, {"q": 1}, set(FORMS)),
        ({"n": 1}, {"q": 1}, set(FORMS) - {"peft"}),
        ({}, {}, set(FORMS) - {"peft", "base-and-adapter"}),
    ],
    ids=["adapter", "with norms", "all weights"],
)
def test_what_a_training_goes_into(norms, factors, forms):
    trained, adapter = SimpleNamespace(folder=Path("run"), norms=norms), SimpleNamespace(factors=factors)
    assert accepted(lambda form: check_trained(form, trained, adapter)) == forms
