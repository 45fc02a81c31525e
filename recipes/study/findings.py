"""What the pages say of the runs: texts with names of figures (pages/), and the figures of these names.

A text has `{pass1.mean[nvfp4]:.3f}` where the page has 0.669, and `{pass1.signed[nvfp4 - bf16_merge]}` where it has
-0.022 (-0.036 to -0.009). Words do not change with the figures; tests/recipes/test_study_page_on_cpu.py asks whether
they still hold.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import results
from arms import ANSWERS, BATCH
from claims import CLAIMS, LORA, MARGIN
from measures import (
    KL,
    LONG,
    MEASURES,
    ByArm,
    Runs,
    at_once,
    by_arm,
    compare,
    final_pass1,
    gained,
    last_validation,
    of_arms,
    series,
    with_interval,
)
from paired import Difference, Fit, difference, quantile, verdict

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "README.md", HERE.parents[1] / "README.md")
# Files of the runs that had a GPU to themselves,
ALONE = {
    "int8_acr": ("20261128T191049-acr1.json", "20261128T191048-acr3.json"),
    "bf16_full": ("20261128T191049-full1.json", "20261128T191047-full2.json"),
}
ALONE_AFTER = 11  # from that step on
CUT = 58  # steps that all of these have
IN_TURN = "20261129T201536-turn5.json"  # bf16 whose adapter was sent by our sync and verl's in turn,
VERLS = "20261129T201537-verl4.json"  # and by verl's alone
QUIET = 6  # steps of 60 before noise in ten stages begins
MEMORY = "actor/perf/max_memory_allocated_gb"
PARTS = {"first": slice(10), "last": slice(-10, None)}
_BLOCK = re.compile(r"(<!-- from pages/(\w+)\.md by report\.py -->\n).*?(<!-- end of it -->)", flags=re.S)


def filled(page: str, figures: dict[str, Any]) -> str:
    """`page` with every block made anew from its text."""

    def fill(block: re.Match[str]) -> str:
        text = (HERE / "pages" / f"{block[2]}.md").read_text(encoding="utf-8").format_map(figures)
        return block[1] + re.sub(r"(?<=\d)%", " %", text) + block[3]

    return _BLOCK.sub(fill, page)


class Told(dict[str, dict[int, dict[str, Any]]]):
    """Runs by arm, of which the texts tell."""

    def __missing__(self, arm: str) -> dict[int, dict[str, Any]]:
        raise _not_there(arm)

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        """Of this seed."""
        if seed not in self[arm]:
            raise _not_there(f"{arm} with seed {seed}")
        return self[arm][seed]


def _not_there(run: str) -> ValueError:
    return ValueError(
        f"no run of {run} can be compared, though pages/ tells of it. Runs with {100 * LONG:.0f} % of the longest run's"
        " steps are accepted. Take the file of a longer run away, or change the texts."
    )


class By:
    """What a function says of the name in brackets."""

    def __init__(self, say: Callable[[Any], Any]) -> None:
        self._say = say

    def __getitem__(self, name: str | int) -> Any:
        return self._say(name)


class Measure:
    """One of MEASURES: of an arm its mean, of `arm - other` the difference of all runs at once."""

    def __init__(self, arms: ByArm, name: str, marked: Callable[[dict[str, Any]], bool] | None = None) -> None:
        self._arms, self._name = arms, name
        self.fit = at_once(arms, name, marked)
        self.mean, self.least, self.most = (By(lambda arm, f=f: f(self.of(arm))) for f in (np.mean, np.min, np.max))
        self.deviation = By(lambda arm: np.std(self.of(arm), ddof=1))
        self.signed = By(lambda pair: with_interval(self.difference(pair)))
        self.size = By(lambda pair: _size(self.difference(pair)))
        self.pairs = By(lambda pair: with_interval(self.paired(pair)))
        self.verdict = By(self._verdict)

    def of(self, arm: str) -> list[float]:
        """Its values of the whole runs of an arm, without those that were not asked the test questions."""
        runs = [run for run in self._arms[arm].values() if run["state"] == "done"]
        values = [MEASURES[self._name][1](run, min(len(run["metrics"]["step"]), 60)) for run in runs]
        return [value for value in values if np.isfinite(value)]

    def difference(self, pair: str) -> Difference:
        """Of `arm - other`."""
        return _there(self.fit.difference(*pair.split(" - ")))

    def paired(self, pair: str) -> Difference:
        """Of the seeds that both have."""
        arm, other = pair.split(" - ")
        return _there(compare(self._arms, arm, other, self._name))

    def _verdict(self, pair: str) -> str:
        (kind,) = {one.kind for one in CLAIMS if (f"{one.arm} - {one.other}", one.measure) == (pair, self._name)}
        return verdict(self.difference(pair), kind, MARGIN).strip("*")


def _there(found: Difference | None) -> Difference:
    if found is None:
        raise ValueError(
            "too few runs for a comparison of which pages/ tells. Two or more of each arm, with seeds in common, are"
            " accepted. Copy the files again, or change the texts."
        )
    return found


def _size(given: Difference | None) -> str:
    """`0.022 (0.009 to 0.036)`; a sign where the interval has 0 in it."""
    found = _there(given)
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:{'+' if found.low < 0 else ''}.3f})"


def figures_of(runs: Runs, folder: Path) -> dict[str, Any]:
    """Name -> figure, of the runs that `results.merged` takes from `folder`."""
    arms = Told(by_arm(runs, "gsm8k")[0])
    measures = {name: Measure(arms, name) for name in MEASURES}
    figures: dict[str, Any] = measures | _of_certainty(arms, measures) | _of_runs(runs, arms, measures)
    figures |= _of_boxes(arms) | _of_kl(arms) | _of_young(arms) | _of_acr(runs) | _of_math(runs)
    every = results.every([folder])
    figures |= _of_repeats(every) | _of_syncs(every) | _of_all_weights(every)
    return figures


def _of_runs(runs: Runs, arms: Told, measures: dict[str, Measure]) -> dict[str, Any]:
    tasks = [run["task"] for run in runs.values()]
    cut = [f"{name} ({len(run['metrics']['step'])} steps)" for name, run in runs.items() if run["state"] != "done"]
    compared, ended = measures["area"].fit.arms, measures["pass1"].fit.arms

    def one(name: str) -> dict[str, Any]:
        arm, seed = name.split("/")
        return arms.run(arm, int(seed))

    def of_seed(name: str) -> float:
        measure, _, of = name.partition("/")
        return MEASURES[measure][1](one(of), len(one(of)["metrics"]["step"]))

    return {
        "runs": len(runs),
        "on": By(tasks.count),
        "cut": ", ".join(cut),
        "seeds": By(lambda arm: sum(run["state"] == "done" for run in arms[arm].values())),
        "compared": len(compared),
        "compared_at_end": len(ended),
        "compared_of": By(compared.count),
        "of_seed": By(of_seed),
        "tokens_of_seed": By(lambda name: series(one(name), "response_length/mean")[-10:].mean()),
        "boxed_of_seed": By(lambda name: last_validation(one(name))["form"]),
        "quiet": QUIET,
        "step_of_seed": By(lambda name: np.nanmedian(series(one(name), "timing_s/step"))),
    }


def _had_earlier_rule(run: dict[str, Any]) -> bool:
    """Whether the reward was by the rule before 65594f1; runs that were cut before the questions are later ones."""
    return bool(run["validation"]) and "boxed_right" not in last_validation(run)


def _of_boxes(arms: ByArm) -> dict[str, Any]:
    """Answers to the test questions without a box, and the difference where all runs had the reward rule of 65594f1."""
    counted = [run for run in of_arms(arms) if run["validation"] and not _had_earlier_rule(run)]
    ends = [(final_pass1(run), last_validation(run)) for run in counted]
    later = {arm: {n: run for n, run in seeds.items() if not _had_earlier_rule(run)} for arm, seeds in arms.items()}
    share = sum(end - found["form"] * found["boxed_right"] for end, found in ends) / sum(1 - f["form"] for _, f in ends)

    def forms(arm: str) -> list[tuple[float, float]]:
        return [(final_pass1(run), last_validation(run)["form"]) for run in arms[arm].values() if run["validation"]]

    return {
        "later_rule": _size(
            _of_nvfp4_and((LORA, "int8_lora", "fp8_lora"), counted, final_pass1).difference("others", "nvfp4")
        ),
        "by_later_rule": Measure(later, "pass1"),
        "with_rule": Measure(arms, "pass1", _had_earlier_rule).signed,
        "late_with_rule": Measure(arms, "late", _had_earlier_rule).signed,
        "box_counted": len(counted),
        "right_without_box": share,
        "without_box": By(lambda arm: np.mean([1 - form for _, form in forms(arm)])),
        "boxed_right": By(lambda arm: np.mean([(end - share * (1 - form)) / form for end, form in forms(arm)])),
    }


def _of_young(arms: ByArm) -> dict[str, Any]:
    """What arms on NVFP4, whose rollout adds the adapter before it rounds, gain at first beside all other LoRA.

    With and without the runs of earlier packages, whose actor rounded.
    """
    others = (LORA, "bf16_noise", "bf16_of_nvfp4", "int8_lora", "fp8_lora")
    kept = of_arms(arms)
    now = [run for run in kept if not run["tag"]]
    ours = [run for run in kept if run["arm"].startswith("nvfp4")]
    packages = Fit([("earlier" if run["tag"] else "now", run["seed"], gained(run)) for run in ours])
    return {
        "gain_apart": _size(_of_nvfp4_and(others, kept, gained).difference("nvfp4", "others")),
        "gain_apart_now": _size(_of_nvfp4_and(others, now, gained).difference("nvfp4", "others")),
        "gain_earlier": _size(packages.difference("earlier", "now")),
        "early_now": Measure({arm: seeds for arm, seeds in arms.items() if "." not in arm}, "early"),
    }


def _of_nvfp4_and(others: tuple[str, ...], runs: list[Any], value: Callable[[Any], float]) -> Fit:
    """A value of the runs, all arms on NVFP4 counted as one arm and `others` as another."""
    kinds = dict.fromkeys(others, "others") | {run["arm"]: "nvfp4" for run in runs if run["arm"].startswith("nvfp4")}
    return Fit([(kinds[run["arm"]], run["seed"], value(run)) for run in runs if run["arm"] in kinds])


def _of_kl(arms: Told) -> dict[str, Any]:
    """KL(rollout, actor) of an arm in some steps, as 1.9e-4."""

    def values(arm: str) -> np.ndarray:
        steps = min(len(run["metrics"]["step"]) for run in arms[arm].values())
        return np.array([series(run, KL)[:steps] for run in arms[arm].values()])

    def mean(steps: slice) -> By:
        return By(lambda arm: _short(values(arm)[:, steps].mean()))

    return {
        "kl": mean(slice(None)),
        "kl_first": mean(slice(1)),
        "kl_early": mean(slice(1, 8)),
        "kl_late": mean(slice(-10, None)),
        "kl_least": By(lambda arm: _short(values(arm).min())),
        "kl_most": By(lambda arm: _short(values(arm).max())),
        "kl_then": By(lambda seed: _then(arms.run(LORA, seed))),
    }


def _then(run: dict[str, Any]) -> str:
    """KL(rollout, actor) of steps 11 to 50."""
    return _short(series(run, KL)[10:50].mean())


def _short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _of_certainty(arms: ByArm, measures: dict[str, Measure]) -> dict[str, Any]:
    """What 95 % intervals become where all comparisons are allowed for, and without one seed."""
    made = sum(compare(arms, one.arm, one.other, one.measure) is not None for one in CLAIMS)
    pass1 = measures["pass1"]
    without = {arm: {seed: run for seed, run in seeds.items() if seed != 3} for arm, seeds in arms.items()}
    two_gpus = {seed: run for seed, run in arms[LORA].items() if run["session"].get("gpus_per_run") == 2}

    def allowed(pair: str) -> str:
        found = allowing(pass1.fit, pass1.difference(pair), made)
        return f"({found.low:+.3f} to {found.high:+.3f})"

    return {
        "comparisons": made,
        "allowed": By(allowed),
        "spread": pass1.fit.spread,
        # To miss a difference of 0.01 one time in five, and to see one that is not there one time in twenty.
        "seeds_for_a_hundredth": math.ceil(2 * ((1.96 + 0.84) * pass1.fit.spread / 0.01) ** 2),
        "without_seed_3": Measure(without, "pass1"),
        "with_two_gpus": Measure(arms | {LORA: two_gpus}, "pass1"),
    }


def allowing(fit: Fit, found: Difference, comparisons: int) -> Difference:
    """`found` of `fit` with the interval that holds for all of so many comparisons (Bonferroni)."""
    half = (found.high - found.mean) * quantile(fit.free, comparisons) / quantile(fit.free)
    return found._replace(low=found.mean - half, high=found.mean + half)


def _of_repeats(every: dict[str, list[Any]]) -> dict[str, Any]:
    """Mean rewards of runs that were made twice."""
    apart = []
    for one, *others in every.values():
        for other in others:
            steps = min(len(run["metrics"]["step"]) for run in (one, other))
            first, second = (MEASURES["area"][1](run, steps) for run in (one, other))
            apart.append(abs(first - second))
    return {
        "repeats": len(apart),
        "repeats_least": min(apart),
        "repeats_most": max(apart),
        "repeats_deviation": math.sqrt(np.mean(np.square(apart)) / 2),
    }


def _run_in(every: dict[str, list[Any]], file: str) -> dict[str, Any]:
    """The run of a file that has one."""
    found = [run for runs in every.values() for run in runs if run["session"]["file"] == file]
    if len(found) != 1:
        raise ValueError(f"{len(found)} runs in {file}, of which pages/ tells. One is accepted. Copy the file again.")
    return found[0]


def _of_syncs(every: dict[str, list[Any]]) -> dict[str, Any]:
    """KL(rollout, actor) in one run after syncs of ours and of verl's in turn; the two seeds that were made anew."""
    turns, verls = (_run_in(every, file) for file in (IN_TURN, VERLS))
    kl, way = (series(turns, name)[10:50] for name in (KL, "sync/ours"))
    ours, theirs = kl[way == 1], kl[way == 0]
    found = difference(ours, theirs)
    asked = [count for run in (turns, verls) for count in run["metrics"]["sync/equal"] if count]
    return {
        "kl_after": {"ours": f"{1e4 * ours.mean():.2f}e-4", "verl": f"{1e4 * theirs.mean():.2f}e-4"},
        "kl_apart": f"{1e6 * found.mean:+.0f}e-6 ({1e6 * found.low:+.0f}e-6 to {1e6 * found.high:+.0f}e-6)",
        "kl_pairs": found.n,
        "kept_at": By(lambda step: series(turns, "sync/kept")[int(step) - 1]),
        "syncs_asked": len(asked),
        "syncs_equal": min(asked),
        "twice": [final_pass1(run) for run in every[turns["name"]]],
        "kl_of_4": [_then(run) for run in every[verls["name"]]],
    }


def _of_all_weights(every: dict[str, list[Any]]) -> dict[str, Any]:
    """Runs that train all weights: seconds of steps in which they had a GPU to themselves."""
    runs = {arm: [_run_in(every, file) for file in files] for arm, files in ALONE.items()}

    def seconds(name: str) -> float:
        part, arm = name.split("/")
        return float(np.mean([series(run, f"timing_s/{part}")[ALONE_AFTER:CUT] for run in runs[arm]]))

    step, answers, sync = ([seconds(f"{part}/{arm}") for arm in runs] for part in ("step", "gen", "update_weights"))
    return {
        "cut_at": CUT,
        "alone_from": ALONE_AFTER + 1,
        "seconds_of": By(seconds),
        "time_saved": 1 - step[0] / step[1],
        "answers_times": (answers[1] + sync[1]) / (answers[0] + sync[0]),
        "gigabytes": By(lambda arm: max(max(run["metrics"][MEMORY]) for run in runs[arm])),
    }


def _of_acr(runs: Runs) -> dict[str, Any]:
    """How many of their tokens runs with ACR truncated, clipped, and kept from being clipped."""
    tried = [run for run in runs.values() if "actor/acr_freed_frac" in run["metrics"]]

    def of_steps(key: str) -> np.ndarray:
        return np.concatenate([series(run, key) for run in tried])

    tokens = BATCH * ANSWERS * of_steps("response_length/mean")
    return {
        "acr_runs": len(tried),
        "acr_millions": tokens.sum() / 1e6,
        "acr_freed": round((of_steps("actor/acr_freed_frac") * tokens).sum()),
        "acr_truncated": np.average(of_steps("actor/acr_widened_frac"), weights=tokens),
        "acr_clipped": np.average(of_steps("actor/pg_clipfrac"), weights=tokens),
    }


def _of_math(runs: Runs) -> dict[str, Any]:
    arms = Told(by_arm(runs, "math")[0])
    all_runs = [run for seeds in arms.values() for run in seeds.values()]

    def means(key: str, part: str) -> list[float]:
        return [float(series(run, key)[PARTS[part]].mean()) for run in all_runs]

    too_long = means("response_length/clip_ratio", "last")
    return {
        **{f"math_{name}": Measure(arms, name) for name in ("area", "pass1", "entropy_then")},
        "math_questions": max(len(last_validation(run)["right"]) for run in all_runs if run["validation"]),
        "math_wrong": By(lambda part: np.mean(means("study/all_wrong", part))),
        "math_cut": By(lambda part: np.mean(means("response_length/clip_ratio", part))),
        "math_cut_least": min(too_long),
        "math_cut_most": max(too_long),
    }
