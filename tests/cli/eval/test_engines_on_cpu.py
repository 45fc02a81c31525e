"""Questions dealt out to several processes; test_eval_vllm_on_cpu.py has them with vLLM."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from verl_qerl.cli.eval.engines import Work, gpus, in_processes, judged
from verl_qerl.vllm_plugin.offline import EngineOptions

SCRIPT = Path(__file__).with_name("several_engines.py")
ROOT = Path(__file__).parents[3]


def start(devices, questions=5, behaviour="answer"):
    given = json.dumps({"devices": devices, "questions": questions, "behaviour": behaviour})
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.Popen([sys.executable, str(SCRIPT), given], env=env, stdout=subprocess.PIPE, text=True)


def run(*args, **kwargs):
    stdout, _ = start(*args, **kwargs).communicate(timeout=120)
    return [json.loads(line) for line in stdout.splitlines()]


def test_each_question_is_answered_once_and_as_itself():
    found = run(["0,1", "2,3"])
    assert sorted(line["number"] for line in found) == [0, 1, 2, 3, 4]
    assert all(line["asked"] == [line["number"]] and line["truth"] == str(line["number"]) for line in found)
    by_engine = {(line["pid"], line["gpus"], line["seed"]) for line in found}
    assert {(gpus, seed) for _, gpus, seed in by_engine} == {("0,1", 5), ("2,3", 6)}
    assert len(by_engine) == 2


def test_there_are_no_more_engines_than_questions():
    found = run([None, None, None], questions=1)
    assert [(line["number"], line["gpus"]) for line in found] == [(0, None)]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("refuse", "the adapter changes nothing"),
        (
            "die",
            "an engine ended: 2 of 2, with code 7. What was answered is kept. See its last lines above, then give the"
            " same command again to go on.",
        ),
    ],
)
def test_an_engine_that_fails_ends_the_others(behaviour, error):
    *answered, last = run([None, None], behaviour=behaviour)
    assert last == {"error": error}
    assert {"number": 3, "asked": [3]}.items() <= next(line for line in answered if line["number"] == 3).items()


def test_an_engine_that_cannot_start_says_why(monkeypatch):
    def start(process):
        raise BlockingIOError(errno.EAGAIN, "no room for another process")

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start)
    work = Work(EngineOptions("model", None), [[1], [2]], ["1", "2"], {})
    with pytest.raises(BlockingIOError, match="no room for another process"):
        next(in_processes(work, [None, None]))


def test_engines_end_with_what_takes_their_answers():
    assert len(run([None, None], behaviour="leave")) == 1  # and the program ends


def test_engines_end_with_a_parent_that_is_killed():
    parent = start([None, None], behaviour="wait")
    pids = {json.loads(parent.stdout.readline())["pid"] for _ in range(2)}
    engines = [psutil.Process(pid) for pid in pids]
    assert len(engines) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in engines):
        assert time.monotonic() < end, "an engine is left"
        time.sleep(0.1)


def test_an_interrupt_while_an_engine_starts_is_not_lost(monkeypatch):
    """vLLM takes one that comes while it waits for a core in a process of its own, and then waits on."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    def start(options):
        import zmq
        from vllm import envs
        from vllm.utils.network_utils import zmq_socket_ctx

        with zmq_socket_ctx("inproc://core", zmq.ROUTER) if envs.VLLM_ENABLE_V1_MULTIPROCESSING else nullcontext():
            raise KeyboardInterrupt
        raise TimeoutError("the core said nothing")

    monkeypatch.setattr("verl_qerl.vllm_plugin.offline.OfflineEngine", start)
    with pytest.raises(KeyboardInterrupt):
        next(judged(Work(EngineOptions("model", None), [[1]], ["1"], {})))


def test_gpus_are_dealt_out_in_the_order_of_the_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpus(2, 4) == [None, None]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7,GPU-ab")
    assert gpus(3, 1) == ["4", "6", "7"]
    with pytest.raises(
        ValueError, match=r"too few GPUs: --data-parallel=3 with --tensor-parallel=2 takes 6, and 4 can"
    ):
        gpus(3, 2)
