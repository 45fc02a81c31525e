"""The report of recipes/study on made-up results: its arithmetic, what it pairs, and what it writes."""

import json
import math

import numpy as np
import pytest

PAGE = "before\n<!-- results: written by report.py -->\nold\n<!-- end of results -->\nafter\n"


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
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
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


def test_a_run_that_is_alone_with_its_arm_and_seed_takes_no_comparison_away(paired):
    rows = [(arm, seed, 0.1 * (arm == "b") + seed**2 / 9 * (arm != "c")) for arm in "abc" for seed in (1, 2, 3)]
    before, fit = paired.Fit(rows), paired.Fit([*rows, ("new", 6, 0.8)])
    assert fit.difference("b", "a") == pytest.approx(before.difference("b", "a"))
    assert (fit.free, fit.spread) == (before.free, pytest.approx(before.spread))
    assert fit.difference("new", "a") is None


def test_a_mark_of_runs_has_a_term(paired):
    values = [
        ("a", 1, 0.3, 1),
        ("a", 2, 0.5, 0),
        ("b", 1, 0.4, 0),
        ("b", 2, 0.9, 1),
        ("b", 2, 0.7, 0),
        ("a", 1, 0.2, 0),
    ]
    table = [[arm == "a", arm == "b", seed == 2, mark] for arm, seed, _, mark in values]
    found, (left,) = np.linalg.lstsq(np.array(table, float), np.array([row[2] for row in values]))[:2]
    fit = paired.Fit([row[:3] for row in values], [row[3] for row in values])
    assert fit.difference("b", "a").mean == pytest.approx(found[1] - found[0])
    assert (fit.free, fit.spread) == (2, pytest.approx(math.sqrt(left / 2)))


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


@pytest.mark.parametrize(("free", "comparisons", "value"), [(1, 1, 12.706), (10, 1, 2.228), (10, 5, 3.169)])
def test_quantiles_are_those_of_tables(paired, free, comparisons, value):
    assert paired.quantile(free, comparisons) == pytest.approx(value, abs=5e-4)


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
    runs += [made_up("bf16", 1, 0.20, 0.01, steps=29), made_up("bf16", 2, 0.40, 0.01), made_up("bf16", 3, 0.9, 0)]
    arms = report.by_arm({run["name"]: run for run in runs}, "gsm8k")[0]
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


@pytest.fixture
def page(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    return page


@pytest.fixture
def own_page(report, page, tmp_path, monkeypatch):
    """The one that has texts, beside the study's own results."""
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(report, "PAGES", (page,))
    return page


def test_the_page_has_the_tables_of_all_files_and_the_pictures_are_there(report, page, tmp_path):
    folder = tmp_path / "results"
    better, worse = ("4444", "4440", "4400"), ("4000", "1000", "0000")
    save(folder, "a.json", [made_up("nvfp4", seed, 0.3, 0.01, right=better[seed]) for seed in range(3)], per_gpu=2)
    save(folder, "b.json", [made_up(LORA, seed, 0.2, 0.01 + seed / 999, right=worse[seed]) for seed in range(3)])
    save(folder, "c.json", [made_up("int8", 1, 0.2, 0.01, steps=3), made_up("bf16", 1, 0, 0, task="math")])
    assert report.main(["--results", str(folder), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    assert "old" not in text
    assert "Left out, with less than 95 % of the longest run's steps: int8-gsm8k-seed1." in text
    assert "| nvfp4 | 0, 1, 2 | 30 | 0.445 (0.445 to 0.445) |" in text
    assert text.count(" | 20.0 (20.0 to 20.0), shared | H |") == text.count(" | 20.0 (20.0 to 20.0) | H |") == 1
    assert "0.750 (0.500 to 1.000); +-" in text
    (row,) = (line for line in text.splitlines() if "nvfp4 - bf16_merge: pass@1" in line and "| 3: +" in line)
    assert row.endswith("| **yes** |")
    assert "Best by pass@1: nvfp4-gsm8k-seed0 1.000 (a.json)" in text
    assert f"Worst: {LORA}-gsm8k-seed0 0.250 (b.json)" in text
    assert "Files: [a.json](results/a.json), [b.json](results/b.json), [c.json](results/c.json)." in text
    for picture in ("gsm8k_lora.png", "math_lora.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert f"(results/{picture})" in text


def test_runs_of_one_name_with_other_options_are_refused(report, page, tmp_path):
    save(tmp_path / "results", "a.json", [made_up("bf16", 1, 0, 0), made_up("bf16", 2, 0, 0) | {"options": ["x"]}])
    with pytest.raises(ValueError, match="runs of bf16 on gsm8k differ in bf16, x"):
        report.main(["--results", str(tmp_path / "results"), "--page", str(page)])
    assert page.read_text() == PAGE


def test_a_run_of_no_arm_is_refused(report, page, tmp_path):
    save(tmp_path / "results", "a.json", [made_up("fancy", 1, 0, 0)])
    with pytest.raises(ValueError, match=r"no arm of the study: fancy, of fancy-gsm8k-seed1 in a\.json\. "):
        report.main(["--results", str(tmp_path / "results"), "--page", str(page)])
    assert page.read_text() == PAGE


def test_steps_without_metrics_are_refused(report, page, tmp_path):
    run = made_up(LORA, 1, 0, 0)
    save(tmp_path / "results", "a.json", [run | {"metrics": {"step": run["metrics"]["step"]}}])
    with pytest.raises(ValueError, match=rf"{LORA}-gsm8k-seed1 in a\.json has steps without critic/score/mean\. Whole"):
        report.main(["--results", str(tmp_path / "results"), "--page", str(page)])
    assert page.read_text() == PAGE


def test_other_results_need_a_page_of_their_own(report, own_page, tmp_path):
    save(tmp_path / "mine", "a.json", [made_up(LORA, 1, 0, 0)])
    with pytest.raises(ValueError, match=r"no page for --results=\S+mine: "):
        report.main(["--results", str(tmp_path / "mine")])
    assert own_page.read_text() == PAGE


def test_nothing_is_written_where_a_text_cannot_be_filled(report, own_page, tmp_path):
    save(tmp_path / "results", "a.json", [made_up("nvfp4", 1, 0, 0)])
    with pytest.raises(ValueError, match=f"no run of {LORA} can be compared, though pages/ tells of it"):
        report.main([])
    assert own_page.read_text() == PAGE


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


def test_runs_of_an_earlier_package_count_to_their_arm_where_all_are_compared(report):
    runs = [made_up(arm, seed, 0.1 * (arm == LORA) + seed / 99, 0) for arm in ("nvfp4", LORA) for seed in range(2)]
    runs += [made_up("nvfp4", 5, 0.5, 0) | {"tag": tag} for tag in ("rounded", "lr8e-5")]
    runs += [made_up(LORA, 5, 0.9, 0)]
    arms = {}
    for run in runs:
        arms.setdefault(f"{run['arm']}.{run['tag']}", {})[run["seed"]] = run
    fit = report.at_once(arms, "area")
    assert fit.free == 6 - 4  # two arms, three seeds
    assert fit.difference(LORA, "nvfp4")[:2] == (3, pytest.approx((0.1 + 0.1 + 0.4) / 3))


@pytest.mark.parametrize(("steps", "counted"), [(28, False), (29, True)])
def test_a_run_that_was_cut_counts_where_it_is_long(report, steps, counted):
    made = [made_up(arm, seed, 0.1, 0.01) for seed in range(3) for arm in ("nvfp4", LORA)]
    cut = made_up(LORA, 2, 0.4, 0.01, steps, state="cut")
    other = made_up(LORA, 0, 0, 0, steps=60, task="math")  # is not the longest of this task
    arms, left_out = report.by_arm({run["name"]: run for run in [*made, cut, other]}, "gsm8k")
    assert left_out == ([] if counted else [cut["name"]])
    fit = report.at_once(arms, "area")
    assert fit.arms.count(LORA) == 2 + counted
    assert fit.difference(LORA, "nvfp4").mean == pytest.approx(0.1 * counted)  # over the steps that all have
    assert report.at_once(arms, "pass1").arms.count(LORA) == 2


def test_runs_without_a_step_are_named(report, tmp_path):
    run = made_up(LORA, 1, 0, 0, steps=1, state="failed") | {"session": {"file": "a.json"}}
    run["metrics"] = {"step": []}
    assert f"steps: {run['name']}." in report.section({run["name"]: run}, tmp_path)[2]


def test_what_is_drawn_together(report):
    names = ("nvfp4", "nvfp4.rounded", "nvfp4.lr8e-5", LORA, "int8", "int8.lr3e-6")
    shown = report.pictures({name: {} for name in names})
    assert {kind: list(arms) for kind, arms in shown.items()} == {
        "lora": ["nvfp4", "nvfp4.lr8e-5", LORA],  # those of an earlier package would hide others
        "all_weights": ["int8", "int8.lr3e-6", LORA],
    }
    assert list(report.pictures({LORA: {}})) == ["lora"]


def test_what_is_not_measured_is_named(report):
    arms = {arm: {seed: made_up(arm, seed, seed / 99, 0) for seed in range(3)} for arm in ("nvfp4", LORA)}
    *_, missing = report.table_of_claims(arms)
    assert missing.startswith(f"Not measured: nvfp4_aqn - {LORA}, nvfp4_aqn - bf16_full, nvfp4_aqn - nvfp4, int8_acr")
    assert "rounded" not in missing  # there will be no such runs


def test_a_folder_that_is_not_there_takes_no_table_away(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match=r"no such folder: --results=\S+typo\. "):
        report.main(["--results", str(tmp_path / "typo"), "--page", str(page)])
    assert page.read_text() == PAGE
