"""The tables of options in the documentation are those of the code."""

from dataclasses import fields

from qerl_testing import load_beside

from verl_qerl.options.schema import Qerl

page = load_beside(__file__, "page")


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python tests/options/page.py"


def test_every_node_and_the_rules_have_a_table():
    found = [block[2] for block in page.BLOCK.finditer(page.PAGE.read_text(encoding="utf-8"))]
    assert sorted(found, key=str) == sorted([*(node.name for node in fields(Qerl)), None], key=str)
