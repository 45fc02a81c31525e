"""The report of recipes/study on made-up results: its arithmetic, what it pairs, and what it writes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

PAGE = "before\n<!-- results: written by report.py -->\nold\n<!-- end of results -->\nafter\n"


@pytest.fixture
def paired(study):
    return study("paired")


@pytest.fixture
def report(study):
    return study("report")


LORA = "bf16_merge"  # what the claims call 16-bit LoRA


def made_up(arm, seed, start, gain, steps=30, right="4400", state="done", task="gsm8k"):
    """A run whose reward grows by `gain` a step."""
    metrics = {
        "step": list(range(1, steps + 1)),
        "critic/score/mean": [start + gain * step for step in range(steps)],
        "rollout_corr/rollout_log_ppl": [0.25] * steps,
        "rollout_corr/k3_kl": [1e-4] * steps,
        "response_length/mean": [200.0] * steps,
        "timing_s/step": [20.0] * (steps - 1) + [None],
        "study/all_right": [0.2] * steps,
        "study/all_wrong": [0.3] * steps,
        "study/form": [0.9] * steps,
    }
    validation = {str(steps): {"samples": 4, "right": right, "form": 1.0}}
    told = {"arm": arm, "task": task, "seed": seed, "tag": "", "state": state, "gpu": "H", "options": [arm]}
    return told | {"name": f"{arm}-{task}-seed{seed}", "metrics": metrics, "validation": validation}


def save(folder, name, runs, **session):
    folder.mkdir(exist_ok=True)
    content = {"session": session, "runs": {run["name"]: run for run in runs}}
    (folder / name).write_text(json.dumps(content))


def test_the_interval_is_students(paired):
    found = paired.difference([2, 3, 4, 5, 6], [1, 1, 1, 1, 1])  # 1 to 5: mean 3, deviation sqrt(2.5)
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.n, found.mean) == (5, 3)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))


def test_all_runs_at_once_are_compared_by_least_squares(paired):
    effects = {("a", 1): 0.0, ("a", 2): 0.5, ("a", 3): 0.2, ("b", 1): 0.1, ("b", 2): 0.6, ("b", 3): 0.3}
    exact = paired.Fit([(arm, seed, value) for (arm, seed), value in effects.items()] + [("c", 3, 0.9), ("c", 1, 0.7)])
    assert exact.difference("b", "a")[:2] == (3, pytest.approx(0.1))
    assert exact.difference("c", "b")[:2] == (2, pytest.approx(0.6))  # whatever seeds it has
    assert exact.spread == pytest.approx(0)
    rows = [("a", 1, 0.0), ("a", 2, 0.5), ("a", 3, 0.1), ("b", 1, 0.2), ("b", 2, 0.4), ("b", 3, 0.9)]
    found, pairs = paired.Fit(rows).difference("b", "a"), paired.difference([0.2, 0.4, 0.9], [0.0, 0.5, 0.1])
    assert found == pytest.approx(pairs)  # of two arms with the same seeds it is the same


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [("a", 1, 0.0), ("b", 1, 0.5)],  # nothing tells the spread
        [("a", 1, 0.0), ("a", 2, 0.1), ("a", 1, 0.0), ("b", 3, 0.5), ("b", 3, 0.5)],  # it is the arm, or the seed
    ],
)
def test_too_few_runs_are_not_compared_at_once(paired, rows):
    assert paired.Fit(rows).difference("a", "b") is None


def test_between_the_quantiles_of_t_lie_95_per_cent(paired):
    for degrees, quantile in enumerate(paired.T_975, start=1):
        at = np.linspace(-quantile, quantile, 20001)
        density = (1 + at**2 / degrees) ** (-(degrees + 1) / 2)
        density *= math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        assert np.trapezoid(density, at) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize(
    ("ours", "kind", "answer"),
    [
        ([0.03, 0.04, 0.05], "more", "**yes**"),
        ([-0.03, -0.04, -0.05], "more", "**no**"),
        ([-0.03, 0.04, 0.05], "more", "not shown"),
        ([0.03, 0.04], "more", "too few seeds (2)"),
        ([-0.005, -0.006, -0.007], "good", "**yes**"),
        ([-0.05, -0.06, -0.055], "good", "**no**"),
        ([-0.05, 0.06, 0.055], "good", "not shown"),
        ([-0.019, -0.020, -0.021], "good", "**lower**"),
    ],
)
def test_verdicts(paired, ours, kind, answer):
    assert paired.verdict(paired.difference(ours, [0.0] * len(ours)), kind, 0.02) == answer


def test_no_pairs_are_no_measurement(paired):
    assert paired.verdict(None, "more", 0.02) == "not measured"
    with pytest.raises(ValueError, match="no pairs can be compared"):
        paired.difference([], [])


def test_runs_are_paired_by_seed_over_the_steps_that_all_have(report):
    runs = [made_up("nvfp4", 1, 0.30, 0.01), made_up("nvfp4", 2, 0.50, 0.01), made_up("nvfp4", 9, 0.0, 0.01)]
    runs += [made_up("bf16", 1, 0.20, 0.01, steps=20), made_up("bf16", 2, 0.40, 0.01), made_up("bf16", 3, 0.9, 0)]
    arms = report.by_arm({run["name"]: run for run in runs}, "gsm8k", 0)
    found = report.compare(arms, "nvfp4", "bf16", "area")
    assert (found.n, found.mean) == (2, pytest.approx(0.1))  # with all 30 steps of seed 1 it would be more
    assert report.compare(arms, "nvfp4", "bf16", "end").mean == pytest.approx(0.1)
    assert report.compare(arms, "nvfp4", "int8", "area") is None


def test_accuracy_on_the_test_questions(report):
    run = made_up("bf16", 1, 0, 0, right="4210")
    mean, half, any_right = report.accuracy(run)
    assert (mean, any_right) == (pytest.approx(7 / 16), 0.75)
    assert half == pytest.approx(1.96 * np.std([1, 0.5, 0.25, 0], ddof=1) / 2)
    assert report.accuracy(run | {"validation": {}}) is None


def test_a_run_that_was_cut_has_no_final_accuracy(report):
    arms = {arm: {1: made_up(arm, 1, 0, 0, state="cut")} for arm in ("nvfp4", "bf16")}
    assert report.compare(arms, "nvfp4", "bf16", "pass1") is None
    assert report.compare(arms, "nvfp4", "bf16", "area").n == 1


def test_the_page_has_the_tables_of_all_files_and_the_pictures_are_there(report, tmp_path):
    folder, page = tmp_path / "results", tmp_path / "README.md"
    page.write_text(PAGE)
    better, worse = ("4444", "4440", "4400"), ("4000", "1000", "0000")
    save(folder, "a.json", [made_up("nvfp4", seed, 0.3, 0.01, right=better[seed]) for seed in range(3)], per_gpu=2)
    save(folder, "b.json", [made_up(LORA, seed, 0.2, 0.01 + seed / 999, right=worse[seed]) for seed in range(3)])
    save(folder, "c.json", [made_up("int8", 1, 0.2, 0.01, steps=3), made_up("bf16", 1, 0, 0, task="math")])
    assert report.main(["--results", str(folder), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    assert "old" not in text
    assert "Left out, as they have fewer than 20 steps: int8-gsm8k-seed1." in text
    assert "| nvfp4 | 0, 1, 2 | 30 | 0.445 (0.445 to 0.445) |" in text
    assert text.count(" | 20.0 (20.0 to 20.0), shared | H |") == text.count(" | 20.0 (20.0 to 20.0) | H |") == 1
    assert "0.750 (0.500 to 1.000); +-" in text
    (row,) = (line for line in text.splitlines() if "nvfp4 - bf16_merge: pass@1" in line and "| 3: +" in line)
    assert row.endswith("| **yes** |")
    assert "Best by pass@1: nvfp4-gsm8k-seed0 1.000 (a.json)" in text
    assert f"Worst: {LORA}-gsm8k-seed0 0.250 (b.json)" in text
    assert "Files: [a.json](results/a.json), [b.json](results/b.json), [c.json](results/c.json)." in text
    for task in ("gsm8k", "math"):
        assert (folder / f"{task}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(results/{task}.png)" in text


def test_runs_of_one_name_with_other_options_are_refused(report, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    save(tmp_path / "results", "a.json", [made_up("bf16", 1, 0, 0), made_up("bf16", 2, 0, 0) | {"options": ["x"]}])
    with pytest.raises(ValueError, match="runs of bf16 on gsm8k differ in bf16, x"):
        report.main(["--results", str(tmp_path / "results"), "--page", str(page)])
    assert page.read_text() == PAGE


def test_a_page_without_a_place_is_refused(report, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="no place for the tables"):
        report.main(["--results", str(tmp_path), "--page", str(page)])


def test_claims_name_arms_and_measures_that_there_are(report, study):
    for claim in study("claims").CLAIMS:
        arms = {name.partition(".")[0] for name in (claim.arm, claim.other)}
        tags = {name.partition(".")[2] for name in (claim.arm, claim.other)}
        assert arms <= study("arms").ARMS.keys()
        assert tags <= {"", *study("claims").EARLIER}
        assert claim.measure in report.MEASURES
        assert claim.kind in ("more", "good")


def test_the_page_of_the_study_is_what_its_files_give(report, study, tmp_path):
    folder = study("report").HERE
    page = tmp_path / "README.md"
    page.write_text((folder / "README.md").read_text())
    runs = study("results").merged([folder / "results"])
    pictures = tmp_path / "results"
    pictures.mkdir()  # not beside the files
    text = report.section({name: run | {"name": name} for name, run in runs.items()}, pictures, 20)
    assert "\n".join(text) in page.read_text()


def test_runs_of_an_earlier_package_count_to_their_arm_where_all_are_compared(report):
    runs = [made_up(arm, seed, 0.1 * (arm == LORA) + seed / 99, 0) for arm in ("nvfp4", LORA) for seed in range(2)]
    runs += [made_up("nvfp4", 5, 0.5, 0) | {"tag": tag} for tag in ("rounded", "lr8e-5")]
    runs += [made_up("nvfp4", 6, 0.5, 0, state="cut"), made_up(LORA, 5, 0.9, 0)]
    arms = {}
    for run in runs:
        arms.setdefault(f"{run['arm']}.{run['tag']}", {})[run["seed"]] = run
    fit = report.at_once(arms, "area")
    assert fit.free == 6 - 4  # two arms, three seeds
    assert fit.difference(LORA, "nvfp4")[:2] == (3, pytest.approx((0.1 + 0.1 + 0.4) / 3))


def test_what_is_not_measured_is_named(report):
    arms = {arm: {seed: made_up(arm, seed, seed / 99, 0) for seed in range(3)} for arm in ("nvfp4", LORA)}
    *_, missing = report.table_of_claims(arms)
    assert missing.startswith(f"Not measured: nvfp4_aqn - {LORA}, nvfp4_aqn - bf16_full, nvfp4_aqn - nvfp4, int8_acr")
    assert "rounded" not in missing  # there will be no such runs


def test_the_kl_that_the_page_tells(report, study):
    page = (report.HERE / "README.md").read_text()
    arms = report.by_arm(study("results").merged([report.HERE / "results"]), "gsm8k", 60)
    for arm in ("nvfp4", "bf16_merge", "nvfp4.rounded"):
        values = np.array([report.series(run, report.KL) for run in arms[arm].values()])
        means = [f"{values[:, part].mean():.1e}" for part in (slice(1), slice(1, 8), slice(50, 60))]
        assert f"| {arm} | {' | '.join(means)} |".replace("e-0", "e-") in page
    values = np.array([report.series(run, report.KL) for run in arms["nvfp4"].values()])
    assert f"{values.min():.1e} to {values.max():.1e} in all steps".replace("e-0", "e-") in page


def last_validation(run):
    return run["validation"][max(run["validation"], key=int)]


def without_box(arms, arm):
    return np.mean([1 - last_validation(run)["form"] for run in arms[arm].values() if run["validation"]])


def test_what_the_page_says_of_answers_without_a_box_and_of_runs_made_twice(report, study):
    page = (report.HERE / "README.md").read_text()
    counted, made = [], {}
    for file in sorted((report.HERE / "results").glob("*.json")):
        for name, run in json.loads(file.read_text())["runs"].items():
            made.setdefault(name, []).append(run)
            if run["task"] == "gsm8k" and run["validation"] and "boxed_right" in last_validation(run):
                found = last_validation(run)
                counted.append((report.accuracy(run)[0] - found["form"] * found["boxed_right"], 1 - found["form"]))
    share = np.divide(*np.sum(counted, axis=0))
    assert f"In the {len(counted)} runs that counted it" in page
    assert f"{share:.0%} of the answers without a box are right".replace("%", " %") in page
    arms = report.by_arm(study("results").merged([report.HERE / "results"]), "gsm8k", 20)

    def boxed_right(arm):
        runs = [(report.accuracy(run)[0], last_validation(run)["form"]) for run in arms[arm].values()]
        return np.mean([(right - share * (1 - form)) / form for right, form in runs])

    assert f"of those with a box {boxed_right(LORA):.3f} are right with bf16 and {boxed_right('nvfp4'):.3f}" in page
    told = f"{boxed_right('int8_lora'):.3f} are right."
    assert (
        f"Of INT8's {without_box(arms, 'int8_lora'):.1%} have none, and of those with one {told}".replace("%", " %")
        in page
    )
    differences = []
    for runs in made.values():
        steps = min(len(run["metrics"]["step"]) for run in runs)
        rewards = [report.MEASURES["area"][1](run, steps) for run in runs]
        differences += [abs(rewards[0] - rewards[1])] if len(runs) > 1 else []
    deviation = np.sqrt(np.mean(np.square(differences)) / 2)
    told = f"by {min(differences):.3f} to {max(differences):.3f}, a standard deviation of {deviation:.3f} for one run"
    assert len(differences) == 7  # "Seven runs were made twice"
    assert told in page
    steps = 59
    spreads = [
        np.std([report.MEASURES["area"][1](run, steps) for run in seeds.values()], ddof=1)
        for seeds in arms.values()
        if len(seeds) > 2
    ]
    assert f"beside {min(spreads):.3f} to {max(spreads):.3f} between the seeds of an arm with three or more" in page


def test_what_the_page_says_of_math(report, study):
    page = (report.HERE / "README.md").read_text()
    arms = report.by_arm(study("results").merged([report.HERE / "results"]), "math", 60)
    runs = [arms[arm][1] for arm in ("nvfp4", "nvfp4_noise")]
    rewards, ends = ([report.MEASURES[name][1](run, 60) for run in runs] for name in ("area", "pass1"))
    told = "Mean reward {:.3f} without noise and {:.3f} with a KL of 5e-3, pass@1 on the {} questions"
    told += " of MATH-500 that have no more than 512 tokens {:.3f} and {:.3f}."
    (asked,) = {len(last_validation(run)["right"]) for run in runs}
    assert told.format(*rewards, asked, *ends) in page
    wrong, cut = (
        np.array([report.series(run, key) for run in runs]) for key in ("study/all_wrong", "response_length/clip_ratio")
    )
    told = "{:.2f} of the groups have no right answer in the first ten steps, and {:.2f} in the last ten."
    assert told.format(wrong[:, :10].mean(), wrong[:, -10:].mean()) in page
    assert f"{cut.mean():.0%} of the answers reach the limit".replace("%", " %") in page
    assert (cut[:, -10:].mean(1) > cut[:, :10].mean(1)).all()
    said, real = report.series(runs[1], "aqn/kl"), report.series(runs[1], report.KL)
    scored = np.flatnonzero(np.isfinite(said))
    assert f"{said[scored[0]]:.4f} where KL(rollout, actor) is {real[scored[0]]:.4f}" in page
    ratios = said[scored] / real[scored]
    assert f"{ratios.min():.1f} to {ratios.max():.1f} times that KL in the nine steps" in page
    assert len(scored) == 9


def test_what_the_pages_say_of_all_runs_at_once(report, study, paired):
    runs = study("results").merged([report.HERE / "results"])
    arms = report.by_arm(runs, "gsm8k", 20)
    page, front = ((folder / "README.md").read_text() for folder in (report.HERE, report.HERE.parents[1]))
    fits = {measure: report.at_once(arms, measure) for measure in ("area", "pass1", "entropy")}
    used = [run for seeds in arms.values() for run in seeds.values() if run["state"] == "done"]
    used = [run["arm"] for run in used if run["tag"] in ("", "rounded")]
    told = f"intervals from {len(used)} runs: {used.count(LORA)} of bf16, {used.count('nvfp4_aqn')} with the paper's"
    assert told in front

    def compared(arm, other, measure):
        found = fits[measure].difference(arm, other)
        return report.with_interval(found), paired.verdict(found, "more", 0).strip("*")

    for arm, measure, claim in (
        ("nvfp4", "entropy", "quantization raises the entropy of answers | {} | {} |"),
        ("nvfp4_aqn", "area", "with noise reward grows faster than with 16-bit LoRA | {} | {} |"),
        ("nvfp4_aqn", "pass1", "and ends higher | pass@1 {} | {}\\* |"),
    ):
        figure, verdict = compared(arm, LORA, measure)
        figure = figure.replace(" (", " nats (") if measure == "entropy" else figure
        assert claim.format(figure, verdict) in front
    assert (
        "noise adds to what quantization does: faster | {} | {} |".format(*compared("nvfp4_aqn", "nvfp4", "area"))
        in front
    )
    assert "and higher | pass@1 {} | {} |".format(*compared("nvfp4_aqn", "nvfp4", "pass1")) in front
    assert f"in five seeds each: {compared('nvfp4_noise', 'nvfp4', 'pass1')[0]}." in front
    for arm in ("nvfp4_aqn", "nvfp4_noise"):
        assert "reward {}, pass@1 {}.".format(*(compared(arm, "nvfp4", name)[0] for name in ("area", "pass1"))) in page
    calibrated = [compared("nvfp4_gptq", other, "pass1")[0] for other in (LORA, "nvfp4")]
    assert "{} beside bf16, {} beside NVFP4 without calibration".format(*calibrated) in page
    found = fits["entropy"].difference("nvfp4_gptq", LORA)
    assert f"by {found.mean:.3f} nats ({found.low:.3f} to {found.high:.3f})" in page
    lower, than_int8 = (fits["pass1"].difference(other, "nvfp4") for other in (LORA, "int8_lora"))
    told = [f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})" for one in (lower, than_int8)]
    assert f"by {' and '.join(told)}" in page
    assert f"by {told[0]}" in front
    assert f"in stock verl on two: {compared('int8_lora', LORA, 'pass1')[0]}." in page
    assert f"by {told[1]}, which holds for all 17 too" in front
    assert f"{compared('int8_lora', LORA, 'pass1')[0]}, three runs each" in front

    def positive(found):
        return f"{-found.mean:.3f} ({-found.high:.3f} to {-found.low:.3f})"

    area = [fits["area"].difference("nvfp4", other) for other in ("int8_lora", LORA)]
    told = f"INT8 - NVFP4 {positive(area[0])}, bf16 - NVFP4 {positive(area[1])}"
    assert told.replace("to 0.025", "to +0.025") in page
    spread = fits["pass1"].spread
    assert f"pass@1 of a run has a standard deviation of {spread:.3f}" in page
    seeds = 2 * ((1.96 + 0.84) * spread / 0.01) ** 2  # both errors: 5 %, two-sided, and 20 %
    assert f"four times in five takes about {math.ceil(seeds)} seeds of each arm" in page
    rows = [
        row for row in page.partition("### math")[0].splitlines() if row.startswith(("| QeRL", "| readers", "| this"))
    ]
    assert f"where {len(rows)} comparisons are made" in page
    assert fits["pass1"].free == 21
    wider = 3.363 / paired.t_975(21)  # Student's t of 21 degrees where both tails are 0.05 / 17
    allowing = {}
    for claim in study("claims").CLAIMS:
        if found := fits[claim.measure].difference(claim.arm, claim.other):
            half = wider * (found.high - found.mean)
            allowing[claim.arm, claim.other, claim.measure] = found.mean - half, found.mean + half
    assert len(allowing) == 15  # and two with a tag, which are not in the fit
    first, second = ("({:.3f} to {:+.3f})".format(*allowing["nvfp4", other, "pass1"]) for other in ("int8_lora", LORA))
    assert f"NVFP4 - INT8 in pass@1 {first}; NVFP4 - bf16 does not, by a hair {second}." in page
    assert [pair for pair, (_, high) in allowing.items() if high < 0] == [("nvfp4", "int8_lora", "pass1")]
    assert not [pair for pair, (low, _) in allowing.items() if low > 0]
    without = {arm: {seed: run for seed, run in seeds.items() if seed != 3} for arm, seeds in arms.items()}
    fit = report.at_once(without, "pass1")
    first, second = (report.with_interval(fit.difference("nvfp4", other)) for other in ("int8_lora", LORA))
    assert f"Without seed 3 neither interval would exclude 0: {first} and {second}." in page


def test_what_the_page_says_of_parts_of_the_steps_and_of_one_reward_rule(report, study, paired, monkeypatch):
    page = (report.HERE / "README.md").read_text()
    arms = report.by_arm(study("results").merged([report.HERE / "results"]), "gsm8k", 20)
    early, late = slice(10), slice(10, 60)
    told = {}
    for part in (early, late):

        def reward(run, steps, part=part):
            return report.series(run, report.REWARD)[part].mean()

        monkeypatch.setitem(report.MEASURES, "part", ("", reward))
        fit = report.at_once(arms, "part")
        for arm, other in (("nvfp4", "int8_lora"), ("nvfp4", LORA), ("int8_lora", LORA)):
            found = fit.difference(arm, other)
            low, high = sorted((abs(found.low), abs(found.high)))
            assert found.low * found.high > 0 or (arm, other, part) in ((arm, LORA, early), ("int8_lora", LORA, late))
            told[arm, other, part.start or 0] = f"{abs(found.mean):.3f} ({low:.3f} to {high:.3f})"
    assert f"that is higher by {told['nvfp4', 'int8_lora', 0]}" in page
    assert f"from step 11 on, by {told['nvfp4', 'int8_lora', 10]}" in page
    assert f"beside bf16 {told['nvfp4', LORA, 0][:5]} ahead and {told['nvfp4', LORA, 10]} behind" in page
    assert f"its reward was below bf16's by {told['int8_lora', LORA, 0]}" in page
    later = [
        ("int8" if arm == "int8_lora" else "nvfp4", seed, report.accuracy(run)[0])
        for arm, seeds in arms.items()
        for seed, run in seeds.items()
        if run["state"] == "done"
        and not run["tag"]
        and arm != LORA
        and (arm, seed) not in [("nvfp4", n) for n in (1, 2, 3)]
    ]
    found = paired.Fit(later).difference("int8", "nvfp4")
    assert f"is below INT8 by {found.mean:.3f} ({found.low:.3f} to {found.high:.3f})" in page


def test_what_the_pages_say_of_their_runs(report, study, paired):
    runs = study("results").merged([report.HERE / "results"])
    arms, begun = (report.by_arm(runs, "gsm8k", least) for least in (60, 20))
    page, front = ((folder / "README.md").read_text() for folder in (report.HERE, report.HERE.parents[1]))

    def mean(arm):
        return np.mean([report.accuracy(run)[0] for run in arms[arm].values()])

    assert f"pass@1 {mean('nvfp4'):.3f}, beside {mean(LORA):.3f} of bf16 and {mean('int8_lora'):.3f} of INT8" in page
    assert f"pass@1 of {mean('nvfp4'):.3f}, beside {mean(LORA):.3f} of stock bf16" in front
    assert f"beside {mean('int8_lora'):.3f} of LoRA on INT8" in front
    kl = np.mean([report.series(run, report.KL) for run in arms["int8_lora"].values()], axis=0)
    assert (
        f"rises from {kl[0]:.1e} in the first step to {kl[-10:].mean():.1e} in the last ten".replace("e-0", "e-")
        in page
    )
    assert f"pass@1 came to {mean('nvfp4'):.3f} without it and {mean('nvfp4_noise'):.3f} with it" in front
    assert f"**A calibrated base** has a pass@1 of {mean('nvfp4_gptq'):.3f}:" in page
    assert f"calibrated by GPTQ came to {mean('nvfp4_gptq'):.3f}," in front
    for measure, name in (("pass1", "pass@1"), ("area", "reward")):
        found = report.compare(arms, "nvfp4", "nvfp4.rounded", measure)
        assert f"{name} {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})" in page
    early = [
        np.mean([report.series(arms[arm][seed], report.REWARD)[1:4].mean() for seed in (1, 2, 3)])
        for arm in ("nvfp4", LORA, "nvfp4.rounded")
    ]
    assert "{:.2f} with nvfp4, {:.2f} with bf16_merge and {:.2f} with nvfp4.rounded".format(*early) in page
    rates = [report.MEASURES["area"][1](begun[f"nvfp4{tag}"][1], 59) for tag in (".lr2e-5", "", ".lr8e-5")]
    assert "{:.3f} at 2e-5, {:.3f} at 4e-5 and {:.3f} at 8e-5".format(*rates) in page
    ends = [report.accuracy(arms[arm][1])[0] for arm in ("nvfp4.lr8e-5", "nvfp4")]
    assert "pass@1 is {:.3f} for {:.3f}".format(*ends) in page
    lengths = [report.series(arms[arm][1], "response_length/mean")[-10:].mean() for arm in ("nvfp4.lr8e-5", "nvfp4")]
    assert "({:.0f} tokens at the end for {:.0f})".format(*lengths) in page
    tested = {
        arm: [found[0] for run in seeds.values() if (found := report.accuracy(run))] for arm, seeds in begun.items()
    }
    of_nvfp4 = sorted(value for arm, values in tested.items() if arm.startswith("nvfp4") for value in values)
    below = [value for value in of_nvfp4 if value < min(tested[LORA])]
    assert f"Of the {len(of_nvfp4)} NVFP4 runs that have a pass@1, {len(below)} are below all three of bf16" in page
    noisy = {seed: report.accuracy(run)[0] for seed, run in arms["nvfp4_noise"].items()}
    assert (noisy[1], noisy[5]) == (max(max(of_nvfp4), *tested[LORA]), min(of_nvfp4))
    assert f"the same noise, {noisy[1]:.3f} with seed 1 and {noisy[5]:.3f} with seed 5" in page
    runs_with_noise = arms["nvfp4_noise"].values()
    scored = [np.flatnonzero(np.isfinite(report.series(run, "aqn/kl")))[0] for run in runs_with_noise]
    pairs = zip(runs_with_noise, scored, strict=True)
    real, said = zip(*[(report.series(r, report.KL)[i], report.series(r, "aqn/kl")[i]) for r, i in pairs], strict=True)
    told = f"{min(real):.4f} to {max(real):.4f}, mean {np.mean(real):.4f}; `aqn/kl` said {np.mean(said):.4f}"
    assert f"In the first step with noise KL(rollout, actor) was {told}" in page
    cut = [f"{without_box(begun, arm):.1%}".replace("%", " %") for arm in ("nvfp4", LORA)]
    assert "{} of NVFP4's have none and {} of bf16's.".format(*cut) in page
    firsts = [
        np.mean([report.series(arms[arm][seed], report.REWARD)[0] for seed in (1, 2, 3)])
        for arm in ("nvfp4", LORA, "nvfp4_gptq")
    ]
    assert f"its reward began lower, at {firsts[2]:.3f} beside {firsts[1]:.3f}" in page
    assert "its mean reward is {:.3f}, that of bf16 {:.3f}".format(*firsts) in page


def test_what_other_measurements_say_is_what_their_files_say(study):
    h200 = Path(__file__).parents[2] / "tests" / "bench" / "results" / "h200"

    def rollout(size):
        rows = json.loads((h200 / f"step_{size}.json").read_text())["rows"]
        seconds = {row["arm"]: row["median_s"]["rollout"] for row in rows}
        return seconds["stock"] / seconds["ours"]

    said = [why for _, _, why in study("claims").NOT_BY_THESE_RUNS]
    assert f"{rollout('1.5b'):.2f} times with this model, {rollout('7b'):.2f} with 7B: see tests/bench/results" in said
    front = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"in a step {rollout('1.5b'):.2f} times with 1.5B, {rollout('7b'):.2f} with 7B" in front
    assert f"of 7B with its weight sync: {said[-1].partition(': ')[2].rpartition(': ')[0]} | no |" in front


def test_a_folder_that_is_not_there_takes_no_table_away(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match=r"no such folder: --results=\S+typo\. "):
        report.main(["--results", str(tmp_path / "typo"), "--page", str(page)])
    assert page.read_text() == PAGE
