"""The result file of bench_rollout.py, and the Markdown tables made from it.

python tests/bench/rollout_report.py tests/bench/results/h200/rollout_7b.json
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rollout_arms

KEY = ("arm", "model", "batch", "rank", "prompt", "context")
ENGINE = ("arm", "model", "rank")
LISTS = {
    "rows": KEY,
    "steps": KEY,
    "profiles": KEY,
    "skipped": KEY,
    "measured": KEY,
    "engines": ENGINE,
    "failures": ENGINE,
}
PLAIN, STOCK = "bf16", "bf16_lora_stock"
_FIRST = (
    "bf16",
    "bf16_lora_stock",
    "bf16_lora_ours",
    "nvfp4_lora_stock",
    "fp8_lora_stock",
    "nvfp4_lora_ours",
)
_WITHOUT = ("nvfp4", "fp8")
# In the order of the tables: the named ones, others of ours, and at last those without an adapter.
ARMS = (*_FIRST, *(arm for arm in rollout_arms.ARMS if arm not in _FIRST + _WITHOUT), *_WITHOUT)


class Report:
    """A result file, written anew after every change.

    Args:
        head: As `result_file.header` gives it.
        append: Keep what the file holds; a row of the same key is replaced.

    Raises:
        ValueError: The file to append to is of another GPU, or of another number of them.
    """

    def __init__(self, path: Path, head: dict[str, Any], append: bool) -> None:
        self._path = path
        self.data: dict[str, Any] = {**head, "runs": [], **{name: [] for name in LISTS}}
        if append and path.exists():
            before = json.loads(path.read_text())
            if before["gpu"] != head["gpu"]:
                raise ValueError(
                    f"{path} was measured on another GPU: {before['gpu']!r}. Rows of one file are compared with each"
                    f" other. Give another --out for {head['gpu']!r}."
                )
            if gpus(before) != gpus(head):
                raise ValueError(
                    f"{path} was measured with models on {gpus(before)} GPUs: --tensor-parallel {gpus(head)}. Rows of"
                    " one file are compared with each other. Give another --out."
                )
            self.data = before | self.data | {name: before.get(name, []) for name in ("runs", *LISTS)}
        # Every run, since rows that are kept may be of an earlier commit.
        self.data["runs"].append({name: head[name] for name in ("commit", "time", "options")})

    def measured(self, name: str, entry: dict[str, Any]) -> None:
        """Add an entry, and under `measured` the commit that it is of: rows have the keys that they have."""
        self.data["measured"] = merged(
            self.data["measured"], {key: entry[key] for key in KEY} | {"commit": self.data["commit"]}, KEY
        )
        self.add(name, entry)

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Put an entry into one of LISTS in place of that of the same key, and write the file."""
        self.data[name] = merged(self.data[name], entry, LISTS[name])
        if name == "rows":  # measured after all
            self.data["skipped"] = without(self.data["skipped"], entry, KEY)
        if name == "engines":
            self.data["failures"] = without(self.data["failures"], entry, ENGINE)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n")
        temporary.replace(self._path)


def without(entries: list[dict], entry: dict, key: tuple[str, ...]) -> list[dict]:
    """`entries` less those that have the key of `entry`."""
    return [other for other in entries if any(other[name] != entry[name] for name in key)]


def merged(entries: list[dict], entry: dict, key: tuple[str, ...]) -> list[dict]:
    """`entries` with `entry` at the place of that of the same key, else at the end."""
    if len(without(entries, entry, key)) == len(entries):
        return [*entries, entry]
    return [entry if all(other[name] == entry[name] for name in key) else other for other in entries]


def one_line(row: dict[str, Any]) -> str:
    """A row to print while it comes."""
    place = f"{row['arm']:17} {row['model']:4} rank {row['rank']:<2} batch {row['batch']:<4} prompt {row['prompt']:<5}"
    fields = {"decode_ms_per_step": "ms/step", "prefill_s": "s prefill", "tokens_per_s": "tokens/s", "peak_gib": "GiB"}
    fields["host_share"] = "of it the host"
    values = [f"{row[name]:>9.5g} {unit}" for name, unit in fields.items() if row.get(name) is not None]
    return f"{place} context {row['context']!s:10} {'  '.join(values)}"


def baseline(rows: list[dict[str, Any]]) -> str:
    """The arm that others are compared with: plain bf16, as a merged adapter decodes, where it was measured."""
    return PLAIN if any(row["arm"] == PLAIN for row in rows) else STOCK


def tables(data: dict[str, Any]) -> str:
    """Markdown: decode, prefill and the realistic rollout, each value with its ratio to the baseline."""
    rows = data["rows"]
    base_arm = baseline(rows)
    parts = []
    for model, rank in sorted({(row["model"], row["rank"]) for row in rows if row["rank"]}, key=by_size):
        # Arms without an adapter stand beside every rank.
        chosen = [row for row in rows if row["model"] == model and row["rank"] in (rank, 0)]
        name = label(model, data)
        fixed = [row for row in chosen if row["context"] != "realistic"]
        for prompt, context in sorted({(row["prompt"], row["context"]) for row in fixed}):
            these = [row for row in fixed if (row["prompt"], row["context"]) == (prompt, context)]
            where = f"{name}, rank {rank}, prompt {prompt}"
            title = f"{where}, context up to {context}: decode, ms per step (times as fast as {base_arm})"
            parts.append(table(title, these, base_arm, "decode_ms_per_step", lambda value, base: base / value))
            title = f"{where}: prefill, s (time of {base_arm} = 1)"
            parts.append(table(title, these, base_arm, "prefill_s", lambda value, base: value / base))
        title = f"{name}, rank {rank}, realistic rollout: new tokens per second (times {base_arm})"
        whole = [row for row in chosen if row["context"] == "realistic"]
        parts.append(table(title, whole, base_arm, "tokens_per_s", lambda value, base: value / base))
    return "\n\n".join(part for part in parts if part)


def label(model: str, data: dict[str, Any]) -> str:
    """A model, and how many GPUs share it in a result file."""
    return f"{model} on {gpus(data)} GPUs" if gpus(data) > 1 else model


def gpus(data: dict[str, Any]) -> int:
    """How many share a model in a result file."""
    return data.get("options", {}).get("tensor_parallel", 1)


def by_size(entry: tuple[str, int]) -> tuple[float, str, int]:
    """Sort key of (model, rank): 7B before 14B, Qwen3-8B between them."""
    model, rank = entry
    size = re.fullmatch(r"(?:.*-)?([\d.]+)B", model)
    return (float(size[1]) if size else 0, model, rank)


def table(title: str, rows: list[dict], base_arm: str, field: str, ratio: Callable[[float, float], float]) -> str:
    """One row per arm, one column per batch; empty where nothing of `field` was measured."""
    values = {(row["arm"], row["batch"]): row[field] for row in rows if row[field] is not None}
    if not values:
        return ""
    batches = sorted({batch for _, batch in values})
    found = dict.fromkeys(arm for arm, _ in values)
    arms = [*(arm for arm in ARMS if arm in found), *(arm for arm in found if arm not in ARMS)]  # some had other names
    lines = [f"| arm, batch | {' | '.join(map(str, batches))} |", "|---|" + "---|" * len(batches)]
    for arm in arms:
        base = {batch: values.get((base_arm, batch)) for batch in batches if arm != base_arm}
        cells = [cell(values.get((arm, batch)), base.get(batch), ratio) for batch in batches]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([title, "", *lines])


def cell(value: float | None, base: float | None, ratio: Callable[[float, float], float]) -> str:
    """The value, and its ratio where there is a baseline."""
    if value is None:
        return "-"
    digits = 0 if value >= 1000 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}" + (f" ({ratio(value, base):.2f})" if base else "")


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
