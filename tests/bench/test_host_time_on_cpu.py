"""What an engine waits for is seen in vLLM's own classes, over events that take their time."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from qerl_testing import load_beside

pytest.importorskip("vllm")
host_time = load_beside(__file__, "host_time")
Waiting, by_kind, functions = host_time.Waiting, host_time.by_kind, host_time.functions


class Event:
    """Of a GPU that is busy for so long; a second look at it takes no time."""

    def __init__(self, seconds):
        self.seconds, self.records = seconds, 0

    def synchronize(self):
        time.sleep(self.seconds)
        self.seconds = 0.0

    def record(self):
        self.records += 1


@pytest.fixture
def runner(monkeypatch):
    from vllm.v1.worker import gpu_model_runner

    for name, method in (
        ("AsyncGPUModelRunnerOutput", "get_output"),
        ("GPUModelRunner", "synchronize_input_prep"),
        ("GPUModelRunner", "execute_model"),
    ):
        cls = getattr(gpu_model_runner, name)
        monkeypatch.setattr(cls, method, getattr(cls, method))  # put back afterwards
    return gpu_model_runner


def test_both_waits_are_added_up(runner):
    waiting = Waiting()
    assert waiting.seconds is None
    event = Event(0.05)
    with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)):
        assert event.records == 0
    assert event.records == 1
    assert 0.05 <= waiting.seconds < 0.1
    output = runner.AsyncGPUModelRunnerOutput.__new__(runner.AsyncGPUModelRunnerOutput)
    output.async_copy_ready_event = Event(0.07)
    with pytest.raises(AttributeError):  # vLLM's goes on with tensors that are not there
        output.get_output()
    assert 0.12 <= waiting.seconds < 0.2


def test_threads_that_wait_at_once_wait_once(runner):
    waiting = Waiting()

    def wait(seconds):
        with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=Event(seconds))):
            pass

    threads = [threading.Thread(target=wait, args=(seconds,)) for seconds in (0.1, 0.15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.15 <= waiting.seconds < 0.22
    wait(0.05)
    assert 0.2 <= waiting.seconds < 0.29


def test_a_runner_that_does_not_schedule_ahead_waits_for_nothing(runner):
    waiting = Waiting()
    with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=None)):
        pass
    assert waiting.seconds is None


def test_a_step_ends_when_its_own_tokens_come(runner, monkeypatch):
    cls = runner.AsyncGPUModelRunnerOutput
    monkeypatch.setattr(cls, "get_output", lambda output: output.name)
    monkeypatch.setattr(runner.GPUModelRunner, "execute_model", lambda *_: "launched")
    waiting = Waiting()

    def launch(requests, tokens):
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(range(requests), 1), total_num_scheduled_tokens=tokens
        )
        assert runner.GPUModelRunner.execute_model(None, scheduled) == "launched"

    def come(name, seconds):
        output = cls.__new__(cls)
        output.name, output.async_copy_ready_event = name, Event(seconds)
        assert output.get_output() == name

    launch(3, 40)
    launch(0, 0)  # nothing to compute: no tokens come
    launch(3, 3)  # ahead
    come("first", 0.05)
    come("second", 0.03)
    begins, decodes = by_kind(waiting.taken())[::-1]
    assert (begins["begins"], begins["tokens"], begins["steps"]) == (True, 64, 1)
    assert (decodes["begins"], decodes["tokens"], decodes["steps"]) == (False, 8, 1)
    assert 0.05 <= begins["seconds"] < 0.08
    assert 0.03 <= decodes["seconds"] < 0.05
    assert begins["host_s"] < 0.02
    assert by_kind(waiting.taken()) == []  # they are taken


def test_steps_are_added_up_by_their_kind():
    steps = [(0, 0, 10.0, 1.0), (256, 256, 11.0, 1.5), (255, 255, 13.0, 2.0), (2, 700, 16.0, 2.0), (9, 9, 20.0, 6.0)]
    assert by_kind(steps) == [
        {"begins": False, "tokens": 32, "steps": 1, "seconds": 4.0, "host_s": 0.0},
        {"begins": False, "tokens": 256, "steps": 2, "seconds": 3.0, "host_s": 2.0},
        {"begins": True, "tokens": None, "steps": 1, "seconds": 3.0, "host_s": 3.0},
    ]


def test_what_a_thread_does_is_seen_without_it():
    def spin(seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def outer():
        spin(0.3)
        time.sleep(0.1)

    switches = sys.getswitchinterval()
    sampler = host_time.Sampler()
    outer()
    found = sampler.stop()
    assert sys.getswitchinterval() == switches
    spun, whole = (next(found[name] for name in found if name.endswith(end)) for end in (":spin", ":outer"))
    assert 0.6 < spun[0] < 0.85
    assert whole[1] > 0.95
    assert 0.15 < whole[0] < 0.4  # that it slept
    assert list(found) == sorted(found, key=lambda name: -found[name][1])


def test_functions_have_the_time_of_a_step():
    def callee():
        time.sleep(0.002)

    def step(count):
        for _ in range(count):
            callee()

    found = functions(step, 5)
    (inner,) = (times for name, times in found.items() if name.endswith(":callee"))
    assert 2000 <= inner[1] < 4000
    assert inner[0] < 500  # the rest is sleep's
    assert next(iter(found)).endswith(":step")  # the one with the most
