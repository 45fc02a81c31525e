"""The tables of options beside algorithms are those of the code; tests/options has those of `qerl`."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from qerl_testing import load_beside

from verl_qerl.algos.acr import ACRConfig
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.uaq import UAQConfig
from verl_qerl.formats import get_format
from verl_qerl.formats.ignore import DEFAULT_IGNORE

PACKAGE = Path(__file__).parents[2] / "verl_qerl"
page = load_beside(str(Path(__file__).parents[1] / "options" / "page.py"), "page")
PAGES = (PACKAGE / "verl_plugin" / "README.md", PACKAGE / "algos" / "README.md")


def rows() -> dict[str, str]:
    text = "".join(each.read_text(encoding="utf-8") for each in PAGES)
    return dict(re.findall(r"^\| `([^`=]+)` \| ([^|]+) \|", text, flags=re.M))


@pytest.mark.parametrize("field", fields(AQNConfig), ids=lambda field: field.name)
def test_every_option_of_the_noise_is_listed_with_its_default(field):
    assert rows()[f"+aqn.{field.name}"].strip() == page.spelled(field.default)


@pytest.mark.parametrize("field", fields(ACRConfig), ids=lambda field: field.name)
def test_every_option_of_acr_is_listed_with_its_default(field):
    assert rows()[f"+acr.{field.name}"].strip() == page.spelled(field.default)


@pytest.mark.parametrize("field", fields(UAQConfig), ids=lambda field: field.name)
def test_every_option_of_uaq_is_listed_with_its_default(field):
    assert rows()[f"+uaq.{field.name}"].strip() == page.spelled(field.default)


NODES = [("+aqn.", AQNConfig), ("+acr.", ACRConfig), ("+uaq.", UAQConfig)]


@pytest.mark.parametrize(("node", "options"), NODES, ids=[node for node, _ in NODES])
def test_no_option_is_listed_that_is_gone(node, options):
    listed = {name.removeprefix(node) for name in rows() if name.startswith(node)}
    assert listed == {field.name for field in fields(options)}


def test_the_call_of_vllm_names_the_defaults_of_the_loader():
    text = PAGES[0].read_text(encoding="utf-8")
    found = re.search(r'_config=\{"scale": "(\w+)", "ignore": \["(\w+)"\]\},  # the defaults', text)
    assert found is not None
    assert (found[1], (found[2],)) == (get_format("nvfp4").scale, DEFAULT_IGNORE)
