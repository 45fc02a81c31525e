"""Tables of the READMEs that come from result files, written in place.

    python tests/bench/readme_tables.py

fills what stands between `<!-- KIND FILE... -->` and `<!-- end -->` in README.md and tests/bench/results/README.md;
files are relative to the README. KIND is `rollout speed` (a row for each arm: times as fast as stock bf16 + LoRA of the
same file), `rollout all` (rollout_report.tables), `recovery` (bench_recovery.py's, a row for each method) or `steps`
(bench_step.table).
test_readme_tables_on_cpu.py keeps them so.
"""

import json
import re
from pathlib import Path
from typing import Any

import bench_step
from rollout_report import ARMS, STOCK, label, tables

ROOT = Path(__file__).parents[2]
READMES = (ROOT / "README.md", ROOT / "tests" / "bench" / "results" / "README.md")
LABELS = {
    "bf16_lora_ours": "bf16, our LoRA path",
    "nvfp4_lora_stock": "NVFP4, stock (Marlin)",
    "fp8_lora_stock": "FP8, stock",
    "nvfp4_lora_ours": "**NVFP4, verl_qerl**",
    "nvfp4_lora_ours_noise": "NVFP4, verl_qerl, noise",
    "nvfp4_lora_ours_sequence": "NVFP4, verl_qerl, noise of each sequence",
    "nvfp4_lora_ours_token": "NVFP4, verl_qerl, noise of each token",
}
_BLOCK = re.compile(r"(<!-- (rollout speed|rollout all|recovery|steps) ([^>]+?) -->\n).*?(<!-- end -->)", flags=re.S)


def filled(readme: Path, text: str) -> str:
    """`text` of `readme` with every block made anew from its files."""

    def fill(block: re.Match[str]) -> str:
        data = [json.loads((readme.parent / name).read_text(encoding="utf-8")) for name in block[3].split()]
        make = {"rollout speed": speed, "rollout all": rollouts, "recovery": recovery, "steps": steps}[block[2]]
        made = make(data)
        return f"{block[1]}\n{made}\n\n{block[4]}"

    return _BLOCK.sub(fill, text)


def speed(files: list[dict[str, Any]]) -> str:
    """A row for each model and arm of `files`: decode steps, and tokens per second of long-tailed rollouts, if any.

    Raises:
        ValueError: A file has several prompts or contexts of a batch.
    """
    rows = [row for data in files for row in data["rows"]]
    batches = sorted({row["batch"] for row in rows if row["context"] != "realistic"})
    columns = [*batches, *(["realistic"] if any(row["context"] == "realistic" for row in rows) else [])]
    names = ["long-tailed rollout" if column == "realistic" else str(column) for column in columns]
    lines = [f"| sequences at once | {' | '.join(names)} |", "|---|" + "---|" * len(columns)]
    for data in files:
        values = measured(data["rows"])
        for model in sorted({row["model"] for row in data["rows"]}):
            base = {column: values.get((model, STOCK, column)) for column in columns}
            cells = [absolute(base[column], column) for column in columns]
            name = label(model, data)
            lines.append(f"| {name}: bf16, stock | {' | '.join(cells)} |")
            for arm in (arm for arm in ARMS if arm in LABELS):
                cells = [times(values.get((model, arm, column)), base[column], column) for column in columns]
                if any(cell != "-" for cell in cells):
                    lines.append(f"| {name}: {LABELS[arm]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rollouts(files: list[dict[str, Any]]) -> str:
    """Everything of `files`."""
    return "\n\n".join(map(tables, files))


def recovery(files: list[dict[str, Any]]) -> str:
    """A table for each model of `files`."""
    parts = []
    for run in (run for data in files for run in data["runs"]):
        layers = run["options"]["layers"]
        some = f", the first {layers} layers quantized" if layers else ""
        counts = f"{run['tokens']:,} tokens"
        if any("gptq" in row["method"] for row in run["rows"]):
            counts += f", gptq calibrated on {run['calibration_tokens']:,} others"
        lines = [f"{run['model']}{some}; {counts}; {run['gpu']}, commit {run['commit']}:", ""]
        columns = [
            "bits",
            "weight error",
            "output error",
            "KL",
            "perplexity (95 %)",
            "change of NLL",
        ]
        lines += [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for row in run["rows"]:
            low, high = row["perplexity_interval"]
            perplexity = f"{row['perplexity']:.3f} ({low:.3f} to {high:.3f})"
            cells = [f"{row['bits']:.2f}", *["-"] * 3, perplexity, "-"]
            if "kl" in row:
                cells[1:3] = (f"{row[name]:.4f}" for name in ("weight_error", "output_error"))
                cells[3] = plus_minus(row, "kl")
                cells[5] = plus_minus(row, "change")
            lines.append(f"| {row['method']} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def steps(files: list[dict[str, Any]]) -> str:
    """A row for each arm."""
    return "\n\n".join(bench_step.table(data["rows"]) for data in files)


def plus_minus(row: dict[str, Any], name: str) -> str:
    """A value with its standard error."""
    return f"{row[name]:.4f} +- {row[f'{name}_error']:.4f}"


def measured(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int | str], float]:
    """ms per decode step by (model, arm, batch), and tokens per second by (model, arm, "realistic")."""
    found: dict[tuple[str, str, int | str], float] = {}
    for row in rows:
        whole = row["context"] == "realistic"
        key = (row["model"], row["arm"], "realistic" if whole else row["batch"])
        if key in found:
            raise ValueError(f"{key} was measured twice, with several prompts or contexts: a row has room for one.")
        found[key] = row["tokens_per_s"] if whole else row["decode_ms_per_step"]
    return found


def absolute(value: float | None, column: int | str) -> str:
    """Of the baseline, with its unit; `-` where it was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f} tokens/s" if column == "realistic" else f"{value:.2f} ms"


def times(value: float | None, base: float | None, column: int | str) -> str:
    """How many times as fast as the baseline; `-` where one of the two was not measured."""
    if value is None or base is None:
        return "-"
    return f"{value / base if column == 'realistic' else base / value:.2f}x"


def main() -> None:
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        readme.write_text(filled(readme, text), encoding="utf-8")


if __name__ == "__main__":
    main()
