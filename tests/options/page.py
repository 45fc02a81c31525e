"""The tables of options in verl_plugin/README.md, made of schema and rules and written in place.

    python tests/options/page.py

fills what stands between `<!-- options NODE -->` or `<!-- rules -->` and `<!-- end -->`. test_page_on_cpu.py keeps it
so.
"""

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from verl_qerl.options.rules import RULES
from verl_qerl.options.schema import Qerl

PAGE = Path(__file__).parents[2] / "verl_qerl" / "verl_plugin" / "README.md"
BLOCK = re.compile(r"(<!-- (?:options (\w+)|rules) -->\n).*?(<!-- end -->)", flags=re.S)


def filled(text: str) -> str:
    """The page with every block made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{options(block[2]) if block[2] else rules()}\n\n{block[3]}", text)


def options(node: str) -> str:
    """A row for each option of a node but the format, which `+rollout` sets."""
    rows = [_row(node, each) for each in fields(getattr(Qerl, node)) if (node, each.name) != ("base", "format")]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def rules() -> str:
    """A row for each kind of runs and reason; `actor_rollout_ref.` is left out of the names."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for when, need, why, _ in RULES:
        labels = kinds.setdefault((need.name.removeprefix("actor_rollout_ref."), need.accepted, why), [])
        labels += [when.label] if when.label not in labels else []
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, accepted, why), labels in kinds.items():
        rows.setdefault((", ".join(labels), why), []).append(f"`{name}`: {accepted}")
    lines = [f"| {labels} | {'; '.join(needs)} | {why} |" for (labels, why), needs in rows.items()]
    return "\n".join(["| with | accepted is | because |", "|---|---|---|", *lines])


def spelled(value: Any) -> str:
    """As it is written on a command line."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _row(node: str, option: Field[Any]) -> str:
    return f"| `+qerl.{node}.{option.name}` | {spelled(option.default)} | {option.metadata['meaning']} |"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
