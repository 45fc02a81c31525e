"""The suite's order, its limits, and what it packs; jobs are small commands."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import suite

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs jobs on two GPUs, until a file has a line if one is named; (exit code, states)."""

    def start(jobs, seconds=30.0, gpus=("0", "1"), until=None):
        made = suite.Suite(jobs, list(gpus), seconds, tmp_path / "out", tmp_path / "work", "none")
        if until:
            left = made._left  # a time that is long enough on any host would be waited for on every one
            monkeypatch.setattr(made, "_left", lambda: 0.0 if until.exists() and until.read_text() else left())
        return made.run(), made.states

    return start


def job(name, command="true", seconds=0, **more):
    return suite.Job(name, "a test", command, seconds, **more)


@pytest.fixture
def stamp(tmp_path):
    """Part of a command that writes down when it began and when it ended; `span` reads it."""
    return f"date +%s%N > {tmp_path}/$QERL_SUITE_JOB; sleep 0.1; date +%s%N >> {tmp_path}/$QERL_SUITE_JOB"


def span(folder, name):
    began, ended = (folder / name).read_text().split()
    return int(began), int(ended)


def log(folder, name):
    return (folder / "out" / "logs" / f"{name}.log").read_text()


def test_jobs_have_what_they_need_in_their_environment(run, tmp_path):
    code, states = run([job("one", 'echo "$OUT" "$WORK" "$SOURCE" "$CUDA_VISIBLE_DEVICES"', gpus=0)])
    assert (code, states) == (0, {"one": "done"})
    assert log(tmp_path, "one").split() == [str(tmp_path / "out"), str(tmp_path / "work"), "none", "0,1"]
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["one"]["state"] == "done"
    assert json.loads((tmp_path / "out" / "host.jsonl").read_text().splitlines()[-1])["processes"] > 1


def test_none_overtakes_one_that_waits_for_gpus(run, tmp_path, stamp):
    jobs = [job("a", stamp), job("all", stamp, gpus=0), job("b", stamp)]
    code, _ = run(jobs)
    first, second, third = (span(tmp_path, name) for name in ("a", "all", "b"))
    assert code == 0
    assert first[1] < second[0]
    assert second[1] < third[0]


def test_jobs_of_one_gpu_run_at_once_on_their_own(run, tmp_path):
    """Each waits until the other has begun."""
    meet = 'touch {0}/{1}; until [[ -e {0}/{2} ]]; do sleep 0.1; done; echo "$CUDA_VISIBLE_DEVICES"'
    jobs = [job(one, meet.format(tmp_path, one, other)) for one, other in (("a", "b"), ("b", "a"))]
    assert run(jobs)[0] == 0
    assert {log(tmp_path, name) for name in ("a", "b")} == {"0\n", "1\n"}


def test_what_needs_a_job_that_failed_is_not_begun(run):
    code, states = run([job("a", "exit 3"), job("b", after=("a",)), job("c")])
    assert code == 1
    assert states == {"a": "failed with 3", "b": "not begun: needs a, which is failed with 3", "c": "done"}


def test_small_jobs_share_the_gpus_of_one_that_shares(run, tmp_path, stamp):
    """The long one ends after them, and late enough that another would have begun."""
    wait = f"until [[ $(cat {tmp_path}/one {tmp_path}/two 2> /dev/null | wc -l) == 4 ]]; do sleep 0.05; done"
    jobs = [job("long", f"{wait}; sleep 1; {stamp}", gpus=0, shares=True)]
    jobs += [job(name, f'{stamp}; echo "$CUDA_VISIBLE_DEVICES"', small=True) for name in ("one", "two")]
    code, states = run([*jobs, job("after", stamp)])
    assert (code, set(states.values())) == (0, {"done"})
    assert (log(tmp_path, "one"), log(tmp_path, "two")) == ("0\n", "1\n")
    assert span(tmp_path, "one")[1] + 1e9 < span(tmp_path, "long")[1] < span(tmp_path, "after")[0]


def test_small_jobs_share_with_none_that_does_not(run, tmp_path, stamp):
    jobs = [job("quiet", stamp), job("small", stamp, small=True), job("last", stamp)]
    assert run(jobs, gpus=("0",))[0] == 0
    first, second, third = (span(tmp_path, name) for name in ("quiet", "small", "last"))
    assert first[1] < second[0]
    assert second[1] < third[0]


def test_small_jobs_of_several_gpus_are_on_all_of_them(run, tmp_path):
    says = 'sleep 0.1; echo "$CUDA_VISIBLE_DEVICES"'
    jobs = [job(f"s{index}", says, small=True, gpus=count) for index, count in enumerate((1, 2, 1))]
    assert run(jobs)[0] == 0
    assert [log(tmp_path, f"s{i}") for i in range(3)] == ["0\n", "0,1\n", "1\n"]


def test_no_more_than_some_small_jobs_are_on_a_gpu(run, tmp_path, monkeypatch, stamp):
    monkeypatch.setattr(suite, "SMALL", 1)
    run([job(name, stamp, small=True) for name in "ab"], gpus=("0",))
    assert span(tmp_path, "a")[1] < span(tmp_path, "b")[0]


def test_what_has_no_time_is_not_begun_and_what_runs_is_killed_at_the_end(run):
    code, states = run([job("a", "sleep 60"), job("b", seconds=99)], seconds=0.5)
    assert code == 1
    assert states["a"] == "killed at the end"
    assert states["b"].startswith("not begun: ")
    assert states["b"].endswith("s are left of 99 s")


def test_what_runs_at_the_end_may_say_what_it_knows(run, tmp_path):
    begun = tmp_path / "begun"
    (tmp_path / "test_slow.py").write_text(
        "import time\ndef test_a(): assert 0, 'known'\n"
        f"def test_b():\n    open({str(begun)!r}, 'w').write('b')\n    time.sleep(60)\n"
    )
    pytest_ = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider -c /dev/null"
    _, states = run([job("tests", f"{pytest_} --rootdir {tmp_path} {tmp_path}/test_slow.py")], until=begun)
    assert states["tests"] == "killed at the end"
    assert "AssertionError: known" in log(tmp_path, "tests")


def test_a_job_of_more_gpus_than_there_are_is_not_begun(run):
    code, states = run([job("a", gpus=2), job("b")], gpus=("0",))
    assert (code, states) == (1, {"a": "not begun: needs 2 GPUs of 1", "b": "done"})


def test_what_left_the_session_of_its_job_is_killed_too(run, tmp_path):
    """As Ray's daemons do."""
    away = f"setsid bash -c 'echo $$ > {tmp_path}/pid; sleep 60' & sleep 60"
    run([job("a", away)], until=tmp_path / "pid")
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_suite_that_is_told_to_end_leaves_results_and_no_process(tmp_path):
    """In a process of its own, whose only job runs until it is killed."""
    command = f"echo $$ > {tmp_path}/pid; sleep 60"
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import suite, suite_jobs\n"
        f"suite_jobs.JOBS = (suite_jobs.Job('a', 'a test', {command!r}, 0),)\n"
        f"suite.main(['--out', {str(tmp_path / 'out')!r}, '--work', {str(tmp_path / 'work')!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 143
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert "suite.json" in tar.getnames()
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["a"]["state"] == "killed at the end"


def test_the_archive_has_numbers_and_ends_of_logs_and_no_weights(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "row.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "train.log").write_text("x" * 300_000 + "the end")
    (tmp_path / "link.json").symlink_to(tmp_path / "deep" / "row.json")
    size = suite.suite_archive.pack(tmp_path, tmp_path / "results.tar.gz")
    assert size == (tmp_path / "results.tar.gz").stat().st_size
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["deep/row.json", "train.log"]
        text = tar.extractfile("train.log").read()
    assert len(text) == suite.suite_archive.LOG_TAIL
    assert text.endswith(b"the end")


def test_an_archive_that_would_be_too_large_loses_logs_first_and_names_what_else(tmp_path):
    for name, size in (("big.png", 300_000), ("small.json", 1000), ("a.log", 150_000)):
        (tmp_path / name).write_bytes(os.urandom(size))

    def names(limit):
        size = suite.suite_archive.pack(tmp_path, tmp_path / "results.tar.gz", limit)
        assert size <= limit
        with tarfile.open(tmp_path / "results.tar.gz") as tar:
            return {member.name: member.size for member in tar}

    whole = names(1 << 20)
    assert whole == {"big.png": 300_000, "small.json": 1000, "a.log": 150_000}
    assert names(400_000) == whole | {"a.log": 50_000}
    assert set(names(200_000)) == {"small.json", "a.log", "MISSING.txt"}


def test_jobs_name_jobs_that_come_before_them():
    seen = set()
    for one in suite.suite_jobs.JOBS:
        assert one.name not in seen
        assert {*one.after} <= seen
        assert subprocess.run(["bash", "-n", "-c", one.command], check=False).returncode == 0
        seen.add(one.name)


def test_a_selection_waits_for_nothing_that_was_left_out():
    assert [one.after for one in suite.suite_jobs.selected(["base", "verl_fp8"])] == [(), ("base",)]
    assert [one.after for one in suite.suite_jobs.selected(["verl_fp8"])] == [()]
    assert [one.name for one in suite.suite_jobs.selected(["verl_fp8", "base", "base"])] == ["verl_fp8", "base"]
    assert suite.suite_jobs.selected(None) == list(suite.suite_jobs.JOBS)


def test_the_host_is_sampled_with_what_burns_its_time():
    host = suite.suite_host.Host()
    host.sample()
    code = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\ntime.sleep(60)"
    burning = [sys.executable, "-c", code]
    process = subprocess.Popen(burning, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        sample = host.sample()
    finally:
        process.kill()
    name = " ".join(burning)[:40].strip()
    assert 1 <= sample["busiest"][name] < 2
    assert sample["threads"] >= sample["processes"] > 1
    assert sample["used_gib"] > 0


def test_bad_calls_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.main(["--out", str(tmp_path)]) == 2
    assert "no GPU is visible" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        suite.main(["--minutes", "3"])
    assert "--out is missing" in capsys.readouterr().err
    assert suite.main(["--list"]) == 0
    assert "study" in capsys.readouterr().out
