"""The tables of options in the documentation are those of the code."""

from page import BLOCK, PAGE, filled

from verl_qerl.options.schema import NODES


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run python tests/options/page.py"


def test_every_node_and_the_rules_have_a_table():
    found = [block[2] for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(found, key=str) == sorted([*NODES, None], key=str)
