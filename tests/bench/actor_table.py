"""The table of what bench_actor.py has measured."""

from collections.abc import Callable
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Markdown: one layer's step (forward and backward) of each arm, and as a multiple of the bf16 base with PEFT."""
    arms = list(dict.fromkeys(row["arm"] for row in report["rows"]))
    torch = report["versions"].get("torch") or report["torch"]  # where older files have it
    lines = [
        f"{report['gpu']}, torch {torch}, {report['commit']}; ms a layer; in brackets, times {arms[0]};"
        " * the host could not launch faster",
        "",
        "| model | tokens | checkpoints | pass | " + " | ".join(arms) + " |",
        "|" + "---|" * (4 + len(arms)),
    ]
    cases = list(dict.fromkeys((row["model"], row["tokens"], row["checkpointing"]) for row in report["rows"]))
    for model, tokens, checkpointing in cases:
        rows = {
            row["arm"]: row
            for row in report["rows"]
            if (row["model"], row["tokens"], row["checkpointing"]) == (model, tokens, checkpointing)
        }
        passes: dict[str, Callable[[dict[str, float]], float]] = {
            "step": lambda row: row["forward_ms"] + row["backward_ms"]
        }
        if not checkpointing:
            passes["log-prob"] = lambda row: row["log_prob_ms"]
        for what, value in passes.items():
            first = value(rows[arms[0]])
            cells = [
                f"{value(rows[arm]):.2f}{waits(rows[arm])} ({value(rows[arm]) / first:.2f})" if arm in rows else "-"
                for arm in arms
            ]
            lines.append(
                f"| {model} | {tokens} | {'yes' if checkpointing else 'no'} | {what} | " + " | ".join(cells) + " |"
            )
    return "\n".join([*lines, "", *(f"{arm}: not run, {why}" for arm, why in report["skipped"].items())])


def waits(row: dict[str, float]) -> str:
    """A mark where the GPU waited for the host in a training pass; files from before `host_ms` have none."""
    return "*" if row.get("host_ms", 0.0) > 0.9 * (row["forward_ms"] + row["backward_ms"]) else ""
