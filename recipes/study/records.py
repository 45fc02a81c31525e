"""What is kept of a run: its steps as columns, and what its test questions were answered."""

import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reward

# Metrics of verl and ours that are kept, by their beginnings.
KEPT = (
    "critic/score/mean",
    "actor/entropy",
    "actor/pg_",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/lr",
    "actor/acr_",
    "rollout_corr/rollout_log_ppl",  # mean over answers of -log p per token: the rollout's entropy
    "rollout_corr/k3_kl",
    "qerl/",
    "aqn/",
    "response_length/mean",
    "response_length/clip_ratio",
    "timing_s/",
    "actor/perf/max_memory_allocated_gb",
    "perf/throughput",
    "val-core/",
)
SETTLED_S = 3  # verl writes answers beside the training; a file that has not grown for so long is whole


class Records:
    """Of one attempt of a run, read while it goes on.

    Args:
        folder: metrics.jsonl (verl's `file` logger), rollouts/ and validation/ (its dumps of answers, a file a step).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[int, dict[str, float]] = {}
        self.validation: dict[str, dict[str, Any]] = {}

    def read(self, ended: bool = False) -> dict[str, list[Any]]:
        """Columns of all steps that are there: `step`, and a value or None of each metric.

        Args:
            ended: No file grows any more.
        """
        for path in self._whole("rollouts", ended):
            if answers := _lines(path):
                self._groups[int(path.stem)] = groups(answers)
                path.unlink()  # a step is megabytes
        for path in self._whole("validation", ended):
            if path.stem not in self.validation and (answers := _lines(path)):
                self.validation[path.stem] = answered(answers)
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for line in _lines(self._folder / "metrics.jsonl"):
            steps[line["step"]] |= {key: value for key, value in line["data"].items() if _is_kept(key, value)}
        for step, shares in self._groups.items():
            if step in steps:
                steps[step] |= shares
        return columns(steps)

    def _whole(self, kind: str, ended: bool) -> list[Path]:
        paths = sorted((self._folder / kind).glob("*.jsonl"))
        return [path for path in paths if ended or time.time() - path.stat().st_mtime > SETTLED_S]


def groups(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Shares of one step: of groups without a gradient (all answers right, or all wrong), and of answers with a box."""
    scores = defaultdict(list)
    for answer in answers:
        scores[answer["uid"].rsplit("_", 2)[0]].append(answer["score"])
    return {
        "study/all_right": sum(min(group) > 0 for group in scores.values()) / len(scores),
        "study/all_wrong": sum(max(group) <= 0 for group in scores.values()) / len(scores),
        "study/form": sum(reward.boxed(answer["output"]) is not None for answer in answers) / len(answers),
    }


def answered(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A validation: `samples` of each question, `right` ones as a digit a question, in alphabetic order.

    `form` is the share of answers with a box, `boxed_right` of these the share that is right.

    A question that the test set has twice counts as two.
    """
    right: dict[str, list[float]] = defaultdict(list)
    for answer in sorted(answers, key=lambda answer: answer["input"]):
        right[answer["input"]].append(answer["score"])
    samples = min(len(scores) for scores in right.values())
    every = [scores[: len(scores) // samples * samples] for scores in right.values()]  # where one lacks an answer
    asked = [scores[at : at + samples] for scores in every for at in range(0, len(scores), samples)]
    boxed = [answer["score"] > 0 for answer in answers if answer["form"]]
    return {
        "samples": samples,
        "right": "".join(str(sum(score > 0 for score in scores)) for scores in asked),
        "form": round(len(boxed) / len(answers), 4),
        "boxed_right": round(sum(boxed) / len(boxed), 4) if boxed else None,
    }


def columns(steps: dict[int, dict[str, float]]) -> dict[str, list[Any]]:
    """Rows as columns: far smaller, as no name is repeated."""
    order = sorted(steps)
    keys = sorted({key for row in steps.values() for key in row})
    table: dict[str, list[Any]] = {key: [_short(steps[step].get(key)) for step in order] for key in keys}
    return {"step": order} | table


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _is_kept(key: str, value: object) -> bool:
    return isinstance(value, int | float) and key.startswith(KEPT)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that is being written, what is whole."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found
