"""The summary, table and picture of bench_noise.py.

Of each base, mode, draw and sigma: means over the draws, their standard errors from a bootstrap over questions and
draws, and the standard deviation between draws. Changes are against the same base without noise in the same files, by
the same questions.
"""

from pathlib import Path
from typing import Any

import noise_plan
import numpy as np
import result_file

RESAMPLES = 1000
FIGURES = ("entropy", "accuracy", "pass", "length", "boxed")
Key = tuple[str, str, str, float]


def report(files: list[Path], out: Path) -> int:
    """Merge files, print the table, write the summary and the picture beside it."""
    lines = [line for file in files for line in noise_plan.read_lines(file)]
    rows = [line for line in lines if "setting" in line]
    answers = {line["options"]["answers"] for line in lines if "options" in line}
    if not rows or len(answers) != 1:
        raise ValueError(
            f"{len(rows)} rows with {sorted(answers)} answers to a question in {[str(file) for file in files]}."
            " Accepted are files of one and the same number of answers. Name others."
        )
    found = summary(rows, answers.pop())
    runs = [line for line in lines if "options" in line]
    result_file.write(out, {"op": "noise", "runs": runs, "rows": found})
    print("\n".join(table(found)))
    draw(found, out.with_suffix(".png"))
    return 0


def summary(rows: list[dict[str, Any]], answers: int) -> list[dict[str, Any]]:
    """A row for each base, mode, draw and sigma.

    Args:
        rows: Of noise_engine.py; the same questions in all.
        answers: To each question.

    Raises:
        ValueError: Rows have other numbers of questions.
    """
    draws: dict[Key, dict[int, dict[str, Any]]] = {}
    for row in rows:
        setting = noise_plan.setting_of(row)
        draws.setdefault((setting.base, setting.mode, setting.draw, setting.sigma), {})[setting.index] = row
    if len({len(row["questions"]["right"]) for row in rows}) != 1:
        raise ValueError("rows have different numbers of questions. Merge those of one number alone.")
    found = {key: _resampled([of_key[i] for i in sorted(of_key)], answers) for key, of_key in draws.items()}
    first = sorted(found, key=lambda key: (key[0], key[1] != noise_plan.NO_NOISE, *key[1:]))
    return [_row(key, draws[key], found, answers) for key in first]


def _row(key: Key, rows: dict[int, dict[str, Any]], found: dict[Key, Any], answers: int) -> dict[str, Any]:
    base, mode, draw, sigma = key
    row: dict[str, Any] = {"base": base, "mode": mode, "draw": draw, "sigma": sigma, "draws": len(rows)}
    row |= {"questions": len(rows[min(rows)]["questions"]["right"]), "answers": answers}
    each = [_figures(_counts(rows[i]), answers) for i in sorted(rows)]
    without = found.get((base, noise_plan.NO_NOISE, "batch", 0.0))
    for at, name in enumerate(FIGURES):
        values = np.array([one[at] for one in each])
        row[name] = {"mean": values.mean(), "standard_error": found[key][:, at].std(), "each": values.tolist()}
        row[name]["spread"] = values.std(ddof=1) if len(values) > 1 else None
        if without is not None and sigma:
            change = found[key][:, at] - without[:, at]
            row[name] |= {"change": change.mean(), "change_standard_error": change.std()}
    row["kl"] = {"mean": np.mean([rows[i]["kl"] for i in rows]), "each": [rows[i]["kl"] for i in sorted(rows)]}
    return _plain(row)


def _plain(value: Any) -> Any:
    """With five digits of each number."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _counts(row: dict[str, Any]) -> np.ndarray:
    """[4, questions]: tokens, -log p, right answers, boxes."""
    return np.array([row["questions"][name] for name in ("tokens", "minus_log_p", "right", "boxed")], dtype=float)


def _figures(counts: np.ndarray, answers: int) -> np.ndarray:
    """FIGURES of counts [4, questions] or, for many samples at once, [4, samples, questions]; the last axis goes."""
    tokens, minus_log_p, right, boxes = counts
    number = right.shape[-1] * answers
    entropy = minus_log_p.sum(-1) / tokens.sum(-1)
    shares = (right.sum(-1) / number, (right > 0).mean(-1), tokens.sum(-1) / number, boxes.sum(-1) / number)
    return np.stack([entropy, *shares], axis=-1)


def _resampled(rows: list[dict[str, Any]], answers: int) -> np.ndarray:
    """[RESAMPLES, figures]: means over drawn draws of what drawn questions give.

    Every setting gets the same questions, so that differences are of the same ones.
    """
    counts = [_counts(row) for row in rows]
    size = counts[0].shape[-1]
    questions = np.random.default_rng(0).integers(size, size=(RESAMPLES, size))
    each = np.stack([_figures(count[:, questions], answers) for count in counts], axis=1)
    chosen = np.random.default_rng(1).integers(len(rows), size=(RESAMPLES, len(rows)))
    return np.take_along_axis(each, chosen[:, :, None], axis=1).mean(axis=1)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: mean, standard error, and between draws the standard deviation."""
    answers = rows[0]["answers"]
    heads = ["base", "mode, draw", "sigma", "draws", "entropy", "its change", "accuracy", "its change"]
    heads += [f"pass@{answers}", "its change", "tokens", "no box", "KL of the noise"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["base"], _kind(row) if row["sigma"] else "-", f"{row['sigma']:g}"]
        cells.append(str(row["draws"]))
        for name in ("entropy", "accuracy", "pass"):
            cells += [_cell(row[name]), _change(row[name])]
        cells += [f"{row['length']['mean']:.0f}", f"{1 - row['boxed']['mean']:.3f}", f"{row['kl']['mean']:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(figure: dict[str, Any]) -> str:
    spread = "" if figure["spread"] is None else f" ({figure['spread']:.3f})"
    return f"{figure['mean']:.3f} +- {figure['standard_error']:.3f}{spread}"


def _change(figure: dict[str, Any]) -> str:
    return f"{figure['change']:+.3f} +- {figure['change_standard_error']:.3f}" if "change" in figure else "-"


_FURTHEST = {"entropy": 0.12, "accuracy": 0.12, "pass": 0.15}  # shown of a change; what is further stands at the edge


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """A panel for each figure: its change against the base without noise, over the KL that the noise causes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    noisy = [row for row in rows if row["sigma"]]
    kinds = list(dict.fromkeys(_named(row) for row in noisy))
    figure, axes = plt.subplots(1, len(_FURTHEST), sharex=True, figsize=(15, 4.5))
    for name, axis in zip(_FURTHEST, axes, strict=True):
        for row in noisy:
            _point(axis, row, name, f"C{kinds.index(_named(row))}")
        axis.axhline(0, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_ylim(-_FURTHEST[name], _FURTHEST[name])
        axis.set_xlabel("KL of the noise, nats per token")
        axis.set_title("change of " + (f"pass@{rows[0]['answers']}" if name == "pass" else name))
    for color, kind in enumerate(kinds):
        axes[0].errorbar([], [], [], fmt="o", color=f"C{color}", capsize=3, label=kind)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _named(row: dict[str, Any]) -> str:
    return f"{row['base']}: {_kind(row)}"


def _kind(row: dict[str, Any]) -> str:
    return f"{row['mode']}, {row['draw']}"


def _point(axis: Any, row: dict[str, Any], name: str, color: str) -> None:
    """One setting: mean and standard error of its change; an arrow at the edge where it lies beyond."""
    found, edge = row[name], _FURTHEST[name]
    if "change" not in found:
        return
    kl, change = row["kl"]["mean"], found["change"]
    if abs(change) > edge:
        axis.annotate(f"{change:+.2f}", (kl, edge if change > 0 else -edge), color=color, ha="right", va="center")
        return
    axis.errorbar([kl], [change], [found["change_standard_error"]], fmt="o", color=color, capsize=3)
    axis.annotate(f"{row['sigma']:g}", (kl, change), xytext=(4, 4), textcoords="offset points", fontsize=7, color=color)
