"""What the pages say of the study's runs is what their files give."""

import json
import math
from pathlib import Path

import numpy as np

LORA = "bf16_merge"  # what the claims call 16-bit LoRA


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
    assert f"by {told[0]}, and beside" in front
    assert f"in stock verl on two: {compared('int8_lora', LORA, 'pass1')[0]}." in page
    assert f"by {told[1]}: both hold for all 17 too, the first by a hair" in front
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
    assert f"Where {len(rows)} comparisons are made" in page
    assert fits["pass1"].free == 22
    wider = 3.344 / paired.t_975(22)  # Student's t of 22 degrees where both tails are 0.05 / 17
    allowing = {}
    for claim in study("claims").CLAIMS:
        if found := fits[claim.measure].difference(claim.arm, claim.other):
            half = wider * (found.high - found.mean)
            allowing[claim.arm, claim.other, claim.measure] = found.mean - half, found.mean + half
    assert len(allowing) == 15  # and two with a tag, which are not in the fit
    first, second = ("({:.3f} to {:+.3f})".format(*allowing["nvfp4", other, "pass1"]) for other in ("int8_lora", LORA))
    assert f"in pass@1 NVFP4 - INT8 {first} and NVFP4 - bf16 {second}." in page
    below = [pair for pair, (_, high) in allowing.items() if high < 0]
    assert below == [("nvfp4", LORA, "pass1"), ("nvfp4", "int8_lora", "pass1")]
    alone = report.at_once({arm: seeds for arm, seeds in arms.items() if arm != "int8_acr"}, "pass1")
    found = alone.difference("nvfp4", LORA)
    wider = 3.363 / paired.t_975(alone.free)  # and of 21
    assert alone.free == 21
    assert found.mean + wider * (found.high - found.mean) > 0  # "only since the runs of INT8 with ACR"
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
        and arm in ("int8_lora", "nvfp4", "nvfp4_aqn", "nvfp4_noise", "nvfp4_gptq")
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
    shares = [100 * mean(arm) for arm in ("nvfp4", LORA, "int8_lora")]
    assert (
        "{:.1f} % of a 1.5B's answers are right with NVFP4, {:.1f} % with bf16, {:.1f} % with INT8".format(*shares)
        in front
    )
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


def test_what_the_pages_say_of_runs_that_train_all_weights(report, study):
    page, front = ((folder / "README.md").read_text() for folder in (report.HERE, report.HERE.parents[1]))
    found = report.by_arm(study("results").merged([report.HERE / "results"]), "gsm8k", 20)
    arms = [found[arm] for arm in ("int8_acr", "bf16_full")]
    assert [sorted(seeds) for seeds in arms] == [[1, 3], [1, 2]]
    assert {len(run["metrics"]["step"]) for run in arms[1].values()} == {58}

    def reward(arm, seed):
        return f"{report.MEASURES['area'][1](arms[arm][seed], 58):.3f}"

    first, others = [reward(arm, 1) for arm in (0, 1)], [reward(0, 3), reward(1, 2)]
    assert "first 58 steps of {} with INT8 and ACR and {} with bf16.".format(*first) in page
    assert "INT8's seed 3 has {}, bf16's seed 2 {}.".format(*others) in page
    assert f"of 58 steps: {first[0]} and {others[0]}, bf16 {first[1]} and {others[1]} | too few seeds |" in front
    kl = [np.mean([report.series(run, report.KL)[:58] for run in seeds.values()]) for seeds in arms]
    assert "KL(rollout, actor) is {:.1e}, for {:.1e}.".format(*kl).replace("e-0", "e-") in page
    lower = report.at_once(found, "pass1").difference(LORA, "int8_acr")
    assert f"by {lower.mean:.3f} ({lower.low:.3f} to {lower.high:.3f}) beside bf16's LoRA" in page

    def seconds(name):  # from step 12 on
        return [np.mean([report.series(run, f"timing_s/{name}")[11:58] for run in seeds.values()]) for seeds in arms]

    gen, sync = seconds("gen"), seconds("update_weights")
    step = seconds("step")
    assert "a step took {:.1f} s with INT8 and ACR and {:.1f} s with bf16.".format(*step) in page
    assert f"in {1 - step[0] / step[1]:.0%} less time, as far as four runs tell".replace("%", " %") in page
    assert "the answers took {:.1f} and {:.1f} s, sending the weights {:.1f} and {:.1f} s,".format(*gen, *sync) in page
    assert "the update {:.1f} and {:.1f} s.".format(*seconds("update_actor")) in page
    faster = f"{(gen[1] + sync[1]) / (gen[0] + sync[0]):.2f} times"
    assert f"both together {faster} as fast" in page
    assert f"1.5B with int8 {faster} as fast" in front
    assert f"int8 {faster} with this model" in study("claims").NOT_BY_THESE_RUNS[-1][2]
    memory = [
        max(max(run["metrics"]["actor/perf/max_memory_allocated_gb"]) for run in seeds.values()) for seeds in arms
    ]
    assert "with {:.0f} GB for {:.0f} GB".format(*memory) in page


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
    assert said[-1].endswith("7B: int8 6 % slower, fp8 13 % faster, see tests/bench/results")
    assert "7B 6 % slower, 7B with fp8 13 % faster | partly |" in front


def test_the_page_of_the_study_is_what_its_files_give(report, study, tmp_path):
    folder = study("report").HERE
    page = tmp_path / "README.md"
    page.write_text((folder / "README.md").read_text())
    runs = study("results").merged([folder / "results"])
    pictures = tmp_path / "results"
    pictures.mkdir()  # not beside the files
    text = report.section({name: run | {"name": name} for name, run in runs.items()}, pictures, 20)
    assert "\n".join(text) in page.read_text()
