"""What an engine waits for is seen in vLLM's own classes, over events that take their time."""

import time
from types import SimpleNamespace

import pytest

from verl_qerl.testing import load_beside

pytest.importorskip("vllm")
host_time = load_beside(__file__, "host_time")
Waiting, functions = host_time.Waiting, host_time.functions


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

    for name, method in (("AsyncGPUModelRunnerOutput", "get_output"), ("GPUModelRunner", "synchronize_input_prep")):
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


def test_a_runner_that_does_not_schedule_ahead_waits_for_nothing(runner):
    waiting = Waiting()
    with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=None)):
        pass
    assert waiting.seconds is None


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
