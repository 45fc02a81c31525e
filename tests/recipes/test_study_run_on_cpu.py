"""The runner of recipes/study: order, limits, repetition, and the file it leaves; a script stands in for main_ppo."""

import json
import os
import shlex
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

STEPS = 6
# Writes what verl would: a line of metrics and a file of answers a step, and those to the test questions at the end.
FAKE = """
import json, os, subprocess, sys, time
from pathlib import Path

name, attempt = Path.cwd().parent.name, int(Path.cwd().name)
steps, pause, behaviour = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
metrics = Path(os.environ["VERL_FILE_LOGGER_PATH"])
Path("began").write_text(f"{time.monotonic()} {os.environ['CUDA_VISIBLE_DEVICES']} {os.environ['RAY_TMPDIR']}")
if behaviour == "leaves":  # a worker of Ray's is a session of its own
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("worker").write_text(str(worker.pid))
for kind in ("rollouts", "validation"):
    Path(kind).mkdir()
for step in range(1, steps + 1):
    if behaviour == "fails once" and attempt == 1 and step == 3 or behaviour == "fails" and step == 3:
        sys.exit("ValueError: the third step")
    if behaviour == "fails sooner" and step == 6 - 2 * attempt:
        sys.exit("ValueError: sooner")
    if behaviour == "fails late" and step == 6:
        sys.exit("ValueError: the sixth step")
    if behaviour == "hangs" and step == 2:
        time.sleep(600)
    answers = [
        {"uid": f"{question}_{sample}_0", "score": float(right), "output": "so \\\\boxed{1}" if sample else "so 1"}
        for question, scores in {"a": [1, 1], "b": [0, 0], "c": [0, 1], "d": [0, 0]}.items()
        for sample, right in enumerate(scores)
    ]
    Path(f"rollouts/{step}.jsonl").write_text("".join(json.dumps(answer) + "\\n" for answer in answers))
    if step == steps:
        rows = [("y", 0), ("y", 1), ("x", 1), ("x", 1)]
        rows = [{"uid": f"{q}_{i}_0", "input": q, "score": s, "form": 1.0} for i, (q, s) in enumerate(rows)]
        Path(f"validation/{step}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    data = {"critic/score/mean": step / 10 + attempt, "timing_s/step": 2.0, "num_turns": 2}
    with open(metrics, "a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
    time.sleep(pause)
"""


@pytest.fixture
def runner(study):
    return study("run")


@pytest.fixture
def go(runner, study, tmp_path):
    """Runs names of arms with a behaviour; (exit code, jobs by arm, the result file)."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))

    def start(behaviours, seconds=60.0, gpus=("0", "1"), pause=0.05, least=0.0, per_gpu=1):
        jobs = [runner.Job(study("arms").Run(arm, "gsm8k", 1), [f"+{arm}=1"]) for arm in behaviours]

        def command(job, folder):
            return [sys.executable, str(script), str(STEPS), str(pause), behaviours[job.run.arm]]

        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        places = [(gpu, f"GPU of kind {gpu}") for gpu in gpus] * per_gpu
        file = out / "first.json"
        made = runner.Study(jobs, places, command, STEPS, seconds, least, file, tmp_path / "work", {"commit": "abc"})
        code = made.run()
        return code, {job.run.arm: job for job in jobs}, json.loads(file.read_text())

    return start


def began(tmp_path, arm, attempt=1):
    """When, on which GPU, with which folder for Ray."""
    at, gpu, folder = (tmp_path / "work" / f"{arm}-gsm8k-seed1" / str(attempt) / "began").read_text().split()
    return float(at), gpu, folder


def test_every_step_of_every_run_is_in_the_file_under_its_name(go):
    code, _, content = go({"bf16": "", "nvfp4": "", "int8": ""})
    assert code == 0
    assert content["session"] == {"commit": "abc"}
    assert list(content["runs"]) == ["bf16-gsm8k-seed1", "nvfp4-gsm8k-seed1", "int8-gsm8k-seed1"]
    run = content["runs"]["nvfp4-gsm8k-seed1"]
    assert (run["state"], run["attempts"], run["options"]) == ("done", 1, ["+nvfp4=1"])
    assert run["metrics"]["step"] == [1, 2, 3, 4, 5, 6]
    assert run["metrics"]["critic/score/mean"] == [1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert "num_turns" not in run["metrics"]


def test_whether_a_run_ends_in_time_is_told_while_it_runs(go, capsys):
    _, jobs, _ = go({"bf16": ""}, seconds=80)
    assert "1 min left. Steps: bf16-gsm8k-seed1 0 of 6\n" in capsys.readouterr().out
    jobs["bf16"].metrics = {"step": list(range(1, 11)), "timing_s/step": [90.0, *[20.0] * 8, None]}
    assert jobs["bf16"].outlook(60) == "10 of 60, 17 min more"


def test_what_is_kept_has_the_names_that_verl_writes(study):
    recorded = Path(__file__).parents[2] / "recipes" / "quickstart" / "results" / "metrics.jsonl"
    written = {key for line in recorded.read_text().splitlines() for key in json.loads(line)["data"]}
    unknown = [begin for begin in study("records").KEPT if not any(key.startswith(begin) for key in written)]
    assert unknown == ["actor/acr_", "val-core/"]  # that run has neither ACR nor a validation


def test_groups_without_a_gradient_and_boxes_are_counted_from_the_answers(go, tmp_path):
    _, jobs, _ = go({"bf16": ""})
    metrics = jobs["bf16"].metrics
    assert metrics["study/all_right"] == [0.25] * STEPS
    assert metrics["study/all_wrong"] == [0.5] * STEPS
    assert metrics["study/form"] == [0.5] * STEPS
    assert not list((tmp_path / "work").rglob("rollouts/*"))  # megabytes a step


def test_answers_to_the_test_questions_are_kept_in_the_questions_order(go):
    _, jobs, _ = go({"bf16": ""})
    found = jobs["bf16"].validation["6"]
    assert (found["samples"], found["right"]) == (2, "21")  # x, then y


def test_a_question_that_the_test_set_has_twice_counts_as_two(study):
    scores = {"x": [1, 1], "twice": [1, 1, 0, 0], "y": [1, 0]}
    answers = [{"input": input, "score": score, "form": 1} for input, of in scores.items() for score in of]
    assert study("records").answered(answers)["right"] == "2021"
    one_short = study("records").answered([*answers, {"input": "twice", "score": 1, "form": 1}])
    assert one_short["right"] == "2021"  # no question of one answer


def test_answers_with_a_box_are_counted_apart(study):
    answers = [{"input": "x", "score": score, "form": form} for score, form in [(1, 1), (0, 1), (1, 0), (0, 1)]]
    found = study("records").answered(answers)
    assert found == {"samples": 4, "right": "2", "form": 0.75, "boxed_right": 0.3333}


def test_a_gpu_has_one_run_at_a_time_and_each_run_a_folder_for_ray(go, tmp_path):
    go({"bf16": "", "nvfp4": "", "int8": "", "fp8": ""}, pause=0.3)
    by_gpu = {}
    for arm in ("bf16", "nvfp4", "int8", "fp8"):
        at, gpu, folder = began(tmp_path, arm)
        by_gpu.setdefault(gpu, []).append(at)
        assert len(folder) < 20
        assert not Path(folder).exists()
    assert sorted(by_gpu) == ["0", "1"]
    for times in by_gpu.values():
        first, second = sorted(times)
        assert second - first > STEPS * 0.3


def test_runs_can_share_gpus_which_are_filled_evenly(go, tmp_path):
    go({"bf16": "", "nvfp4": "", "int8": "", "fp8": ""}, pause=0.3, per_gpu=2)
    found = [began(tmp_path, arm) for arm in ("bf16", "nvfp4", "int8", "fp8")]
    assert [gpu for _, gpu, _ in found] == ["0", "1", "0", "1"]
    times = [at for at, _, _ in found]
    assert max(times) - min(times) < STEPS * 0.3


def test_gpus_that_share_a_run_count_as_one(runner):
    gpus = {str(number): "H" for number in range(5)}
    assert runner.in_groups(gpus, 1) == gpus
    assert runner.in_groups(gpus, 2) == {"0,1": "2 x H", "2,3": "2 x H"}
    assert runner.in_groups(gpus, 5) == {"0,1,2,3,4": "5 x H"}


def test_one_that_fails_early_is_begun_once_more(go, tmp_path):
    code, jobs, _ = go({"bf16": "fails once", "nvfp4": ""})
    assert (code, jobs["bf16"].state, jobs["bf16"].attempts, jobs["bf16"].error) == (0, "done", 2, "")
    assert jobs["bf16"].metrics["critic/score/mean"][0] == 2.1  # nothing of the first attempt is mixed in


def test_one_that_fails_twice_is_named_with_its_reason_and_stops_no_other(go, tmp_path):
    code, jobs, content = go({"bf16": "fails", "nvfp4": ""}, gpus=("0",))
    assert (code, jobs["bf16"].state, jobs["bf16"].attempts, jobs["nvfp4"].state) == (1, "failed", 2, "done")
    run = content["runs"]["bf16-gsm8k-seed1"]
    assert run["error"] == "ValueError: the third step"
    assert run["metrics"]["step"] == [1, 2]
    assert "the third step" in (tmp_path / "out" / "bf16-gsm8k-seed1.log").read_text()


def test_of_a_long_error_its_beginning_is_told(runner):
    error = "torch.OutOfMemoryError: CUDA out of memory. " + "Another process has some of it. " * 30
    told = runner.last_error(f"some Error before\n{error}\nthe end\n")
    assert told.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert len(told) == 400


def test_of_two_attempts_the_one_with_more_steps_is_kept(go):
    _, jobs, _ = go({"bf16": "fails sooner"})
    assert (jobs["bf16"].attempts, jobs["bf16"].metrics["critic/score/mean"]) == (2, [1.1, 1.2, 1.3])


def test_one_that_fails_late_is_not_repeated(go):
    code, jobs, _ = go({"bf16": "fails late"})
    assert (code, jobs["bf16"].attempts, jobs["bf16"].metrics["step"][-1]) == (1, 1, 5)


def test_one_that_stands_still_is_ended_and_begun_once_more(go, runner, monkeypatch):
    monkeypatch.setattr(runner, "STALL_S", 1.0)
    monkeypatch.setattr(runner, "WRITE_S", 0.2)
    code, jobs, _ = go({"bf16": "hangs"})
    assert (code, jobs["bf16"].attempts, jobs["bf16"].error) == (1, 2, "no step in 1 s")


def test_at_the_limit_all_is_ended_and_what_there_is_is_kept(go, tmp_path):
    start = time.monotonic()
    code, jobs, content = go({"bf16": "leaves", "nvfp4": "", "int8": ""}, seconds=2.5, gpus=("0",), pause=1.0)
    assert time.monotonic() - start < 20
    assert code == 0
    assert {arm: job.state for arm, job in jobs.items()} == {"bf16": "cut", "nvfp4": "not begun", "int8": "not begun"}
    assert list(content["runs"]) == ["bf16-gsm8k-seed1"]
    assert 1 <= len(content["runs"]["bf16-gsm8k-seed1"]["metrics"]["step"]) < STEPS
    worker = int((tmp_path / "work/bf16-gsm8k-seed1/1/worker").read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_nothing_begins_with_less_time_than_a_run_needs(go):
    _, jobs, _ = go({"bf16": "", "nvfp4": ""}, seconds=12.0, gpus=("0",), pause=0.5, least=10.0)
    assert {arm: job.state for arm, job in jobs.items()} == {"bf16": "done", "nvfp4": "not begun"}


def test_the_file_is_there_while_runs_go_on(go, runner, monkeypatch, study):
    seen = []
    write = study("results").write
    monkeypatch.setattr(runner, "WRITE_S", 0.1)
    monkeypatch.setattr(runner.results, "write", lambda path, content: (write(path, content), seen.append(content)))
    go({"bf16": ""}, pause=0.3)
    lengths = [len(content["runs"]["bf16-gsm8k-seed1"]["metrics"]["step"]) for content in seen]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3
    assert {content["runs"]["bf16-gsm8k-seed1"]["state"] for content in seen} == {"running", "done"}


def test_one_that_has_no_time_to_be_repeated_has_failed(go):
    code, jobs, _ = go({"bf16": "fails"}, seconds=60.0, least=59.6, pause=0.4)
    assert (code, jobs["bf16"].state, jobs["bf16"].attempts) == (1, "failed", 1)


@pytest.fixture
def asked(runner, tmp_path):
    """Arguments -> the jobs that are left to run."""
    for folder in ("model", "data/gsm8k", "data/math", "earlier", "out"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)

    def jobs(*more):
        places = {"model": "model", "data": "data", "out": "out", "earlier": "earlier"}
        given = [part for name, folder in places.items() for part in (f"--{name}", str(tmp_path / folder))]
        return runner.to_run(runner.parse([*given, *more]))

    return jobs


def save(path, jobs, state="done", steps=(1, 2), model="model"):
    runs = {job.run.name: job.as_json() | {"state": state, "metrics": {"step": list(steps)}} for job in jobs}
    path.write_text(json.dumps({"session": {"model": model}, "runs": runs}))


def test_the_commands_that_are_printed_are_a_shells(runner, tmp_path, capsys):
    model, data = tmp_path / "a = b", tmp_path / "data"
    for folder in (model, data / "gsm8k"):
        folder.mkdir(parents=True)
    given = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--earlier", str(tmp_path)]
    assert runner.main([*given, "--arms", "int8_acr", "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert f"actor_rollout_ref.model.path='{model}'" in words
    assert 'trainer.logger=["console","file"]' in words


def test_a_later_session_runs_what_is_missing(asked, tmp_path):
    first = asked("--arms", "bf16", "nvfp4", "--seeds", "1", "2")
    names = [job.run.name for job in first]
    # Seeds come first: what a short session leaves can be compared.
    assert names == ["bf16-gsm8k-seed1", "nvfp4-gsm8k-seed1", "bf16-gsm8k-seed2", "nvfp4-gsm8k-seed2"]
    save(tmp_path / "earlier/one.json", first[:2])
    save(tmp_path / "out/two.json", first[2:3])
    save(tmp_path / "out/cut.json", first[3:], state="cut")
    left = asked("--arms", "bf16", "nvfp4", "--seeds", "1", "2")
    assert [job.run.name for job in left] == ["nvfp4-gsm8k-seed2"]
    more = asked("--arms", "bf16", "nvfp4", "--seeds", "2", "3", "--tasks", "gsm8k", "math")
    assert len(more) == 7


def test_a_name_stands_for_one_set_of_options(asked, tmp_path):
    save(tmp_path / "earlier/one.json", asked("--arms", "bf16"))
    with pytest.raises(ValueError, match=r"runs of bf16 on gsm8k differ in trainer.total_training_steps=30, .*=60\."):
        asked("--arms", "bf16", "--seeds", "2", "--steps", "30")
    tagged = asked("--arms", "bf16", "--steps", "30", "--tag", "lr1e-5", "--", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert [job.run.name for job in tagged] == ["bf16.lr1e-5-gsm8k-seed1"]
    assert tagged[0].options[-1] == "actor_rollout_ref.actor.optim.lr=1e-5"


def test_a_run_of_other_options_does_not_hide_behind_one_of_its_name(asked, study, tmp_path):
    save(tmp_path / "earlier/cut.json", asked("--arms", "bf16", "--steps", "30"), state="cut")
    save(tmp_path / "earlier/done.json", asked("--arms", "bf16", "--earlier", str(tmp_path / "out")))
    with pytest.raises(ValueError, match=r"runs of bf16 on gsm8k differ in trainer\.total_training_steps=30, "):
        study("results").merged([tmp_path / "earlier"])


def test_results_of_another_model_are_refused(asked, tmp_path):
    save(tmp_path / "earlier/one.json", asked("--arms", "bf16"), model="other")
    for arm in ("bf16", "nvfp4"):  # a run of that name is there, or would be compared with it
        with pytest.raises(ValueError, match=r"results of several models: model, other\. One model is accepted"):
            asked("--arms", arm)


def test_what_is_named_twice_runs_once(asked):
    assert len(asked("--arms", "bf16", "bf16", "--seeds", "1", "1", "--tasks", "gsm8k", "gsm8k")) == 1


@pytest.mark.parametrize("more", [["--tag", "../x", "--", "a=1"], ["--tag", "a b", "--", "a=1"], ["--seeds", "-1"]])
def test_a_name_that_is_no_folder(asked, more):
    with pytest.raises(ValueError, match=r"no name of a run: 'bf16.* Lower-case letters, digits, `_`, `-` and `\.`"):
        asked("--arms", "bf16", *more)


def test_earlier_results_that_are_not_there(asked, tmp_path, capsys):
    with pytest.raises(SystemExit):
        asked("--arms", "bf16", "--earlier", str(tmp_path / "typo"))
    assert f"no such folder: {tmp_path / 'typo'}" in capsys.readouterr().err
    new = str(tmp_path / "new")  # as tests/bench/bench_step.py
    assert asked("--arms", "bf16", "--earlier", new, "--out", new)


def test_a_calibrated_arm_without_its_base_is_refused(asked, capsys):
    with pytest.raises(SystemExit):
        asked("--arms", "nvfp4", "nvfp4_gptq")
    assert "nvfp4_gptq needs --calibrated. What `python -m verl_qerl quantize --method gptq`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        asked("--arms", "bf16_of_nvfp4", "--calibrated", "base")
    assert "--calibrated is for nvfp4_gptq, which is none of --arms. Add the arm, or leave" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        asked("--arms", "bf16_of_nvfp4")
    assert "bf16_of_nvfp4 needs --dequantized. What recipes/study/dequantize.py" in capsys.readouterr().err


def test_a_calibrated_base_is_named_by_its_weights(asked, tmp_path):
    bases = {}
    for name, digest in {"a": "1", "same": "1", "other": "2"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "quantization_report.json").write_text(
            json.dumps({"model_digest": digest, "method": "gptq"})
        )
        plain, calibrated = asked("--arms", "nvfp4", "nvfp4_gptq", "--calibrated", str(tmp_path / name))
        assert "base" not in plain.as_json()
        bases[name] = calibrated.as_json()["base"]
    assert bases["a"] == bases["same"] != bases["other"]


def test_a_calibrated_base_without_its_report_is_refused(asked, tmp_path):
    (tmp_path / "bf16").mkdir()
    given = ["--arms", "nvfp4_gptq", "--calibrated", str(tmp_path / "bf16")]
    with pytest.raises(
        ValueError, match=r"no report of a quantized model: .*bf16/quantization_report\.json\. A folder"
    ):
        asked(*given)
    (tmp_path / "bf16" / "quantization_report.json").write_text("{")
    with pytest.raises(ValueError, match="--calibrated cannot be read"):
        asked(*given)


def test_another_base_than_the_arm_has_is_refused(asked, tmp_path):
    (tmp_path / "quantization_report.json").write_text(json.dumps({"model_digest": "1", "method": "rtn"}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    with pytest.raises(
        ValueError, match=r"^not calibrated: .* has method=rtn\. A folder that .* is accepted as --calib"
    ):
        asked("--arms", "nvfp4_gptq", "--calibrated", str(tmp_path))
    given = ["--arms", "bf16_of_nvfp4", "--dequantized", str(tmp_path)]
    with pytest.raises(ValueError, match=r"^quantized still: .* A folder that .* is accepted as --dequantized"):
        asked(*given)
    (tmp_path / "config.json").write_text("{}")
    assert [job.run.arm for job in asked(*given)] == ["bf16_of_nvfp4"]


@pytest.mark.parametrize("more", [["--steps", "0"], ["--minutes", "5"], ["--minutes", "0", "--least", "-1"]])
def test_what_would_run_nothing_is_refused(asked, capsys, more):
    with pytest.raises(SystemExit):
        asked("--arms", "bf16", *more)
    assert "nothing would run: --steps" in capsys.readouterr().err


def test_overrides_without_a_name_of_their_own_are_refused(asked, capsys):
    with pytest.raises(SystemExit):
        asked("--arms", "bf16", "--", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert "--tag and overrides of main_ppo go together" in capsys.readouterr().err


def test_of_a_run_that_comes_twice_the_whole_one_counts(asked, study, tmp_path):
    jobs = asked("--arms", "bf16")
    save(tmp_path / "earlier/a.json", jobs, state="cut", steps=(1, 2, 3))
    save(tmp_path / "earlier/b.json", jobs)
    save(tmp_path / "earlier/c.json", jobs, state="cut", steps=(1,))
    merged = study("results").merged([tmp_path / "earlier"])
    assert merged["bf16-gsm8k-seed1"]["session"]["file"] == "b.json"


def test_a_run_that_is_not_whole_is_refused(asked, study, tmp_path):
    save(tmp_path / "earlier/a.json", asked("--arms", "bf16"))
    content = json.loads((tmp_path / "earlier/a.json").read_text())
    del content["runs"]["bf16-gsm8k-seed1"]["metrics"], content["runs"]["bf16-gsm8k-seed1"]["tag"]
    (tmp_path / "earlier/a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"bf16-gsm8k-seed1 in \S+a\.json has no metrics, tag\. Whole files"):
        study("results").merged([tmp_path / "earlier"])


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"session": {', '{"session": {}, "runs": []}', '{"session": null, "runs": {}}']
)
def test_another_json_file_is_refused(study, tmp_path, content):
    (tmp_path / "suite.json").write_text(content)
    with pytest.raises(ValueError, match=r"no result of the study: .*suite\.json has no session or runs"):
        study("results").merged([tmp_path])


def test_lists_of_numbers_have_a_line_each(study, tmp_path):
    path = tmp_path / "a.json"
    content = {"runs": {"x": {"metrics": {"step": [1, 2], "reward": [0.5, None]}, "options": ['a=["b","c"]']}}}
    study("results").write(path, content)
    assert json.loads(path.read_text()) == content
    assert "[0.5, null]" in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_names_are_those_that_the_files_are_searched_for(study):
    arms, results = study("arms"), study("results")
    for arm in arms.ARMS:
        for run in (arms.Run(arm, "gsm8k", 1), arms.Run(arm, "math", 12, "lr1e-5")):
            assert results.RUN.fullmatch(run.name)


def test_the_threads_of_a_run_are_its_share_of_the_cores(go, tmp_path, runner, monkeypatch):
    started = []
    popen = runner.subprocess.Popen
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda *args, **more: (started.append(more["env"]), popen(*args, **more))[1]
    )
    go({"bf16": ""}, gpus=("0", "1", "2"))
    assert [env["OMP_NUM_THREADS"] for env in started] == ["4"]
    assert os.environ.get("OMP_NUM_THREADS") is None


def test_a_session_says_what_a_run_got_of_the_machine(runner, study, tmp_path, monkeypatch):
    made = []

    class Ended:
        def __init__(self, jobs, places, command, *limits_and_session):
            made.append((places, limits_and_session))

        def run(self):
            return 0

    monkeypatch.setattr(runner, "Study", Ended)
    monkeypatch.setattr(runner, "visible_gpus", lambda: {"0": "H", "1": "H"})
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    for folder in ("model", "data/gsm8k"):
        (tmp_path / folder).mkdir(parents=True)
    given = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    given += ["--earlier", str(tmp_path / "model"), "--arms", "bf16_merge", "--per-gpu", "3", "--gpus-per-run", "2"]
    assert [runner.main(given) for _ in range(3)] == [0] * 3
    for place in (-3, -2):  # the result file, and the folder for what verl writes
        assert len({given[place] for _, given in made}) == 3  # of one second
    places, (*_, session) = made[0]
    assert places == [("0,1", "2 x H")] * 3
    assert session["per_gpu"] == 3
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10922" in session["machine"]["gsm8k"]
    assert json.loads(json.dumps(session)) == session
