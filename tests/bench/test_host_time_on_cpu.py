"""What an engine waits for is seen in vLLM's own classes, over events that take their time."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import host_time

Waiting, by_kind, functions = host_time.Waiting, host_time.by_kind, host_time.functions
steady = host_time.steady


class Clock:
    """Stands in for the time, which goes on when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(host_time.time, "perf_counter", made)
    return made


class Event:
    """Of a GPU that is busy for so long; a second look at it takes no time."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.records = clock, seconds, 0

    def synchronize(self):
        self.clock.now += self.seconds
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


def test_both_waits_are_added_up(runner, clock):
    waiting = Waiting()
    assert waiting.seconds is None
    event = Event(clock, 5.0)
    with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)):
        assert event.records == 0
    assert event.records == 1
    assert waiting.seconds == 5
    clock.now += 100
    output = runner.AsyncGPUModelRunnerOutput.__new__(runner.AsyncGPUModelRunnerOutput)
    output.async_copy_ready_event = Event(clock, 7.0)
    with pytest.raises(AttributeError):  # vLLM's goes on with tensors that are not there
        output.get_output()
    assert waiting.seconds == 12


def test_threads_that_wait_at_once_wait_once(runner, clock):
    class Held(Event):
        """Of a GPU that is busy until the test says otherwise."""

        def __init__(self):
            super().__init__(clock, 0.0)
            self.asked, self.ready = threading.Event(), threading.Event()

        def synchronize(self):
            self.asked.set()
            assert self.ready.wait(60)

    def wait(event):
        with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)):
            pass

    waiting = Waiting()
    first, second = Held(), Held()
    threads = {event: threading.Thread(target=wait, args=(event,)) for event in (first, second)}
    for event in (first, second):
        threads[event].start()
        assert event.asked.wait(60)
        clock.now += 2
    for event in (first, second):
        event.ready.set()
        threads[event].join()
        clock.now += 3
    assert waiting.seconds == 2 + 2 + 3  # from the first's beginning to the second's end
    wait(Event(clock, 5.0))
    assert waiting.seconds == 12


def test_a_runner_that_does_not_schedule_ahead_waits_for_nothing(runner):
    waiting = Waiting()
    with runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=None)):
        pass
    assert waiting.seconds is None


def test_a_step_ends_when_its_own_tokens_come(runner, clock, monkeypatch):
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
        output.name, output.async_copy_ready_event = name, Event(clock, seconds)
        assert output.get_output() == name

    launch(3, 40)
    launch(0, 0)  # nothing to compute: no tokens come
    launch(3, 3)  # ahead
    clock.now += 1  # of the host
    come("first", 5)
    come("second", 3)
    begins, decodes = by_kind(waiting.taken())[::-1]
    assert (begins["begins"], begins["tokens"], begins["steps"]) == (True, 64, 1)
    assert (decodes["begins"], decodes["tokens"], decodes["steps"]) == (False, 8, 1)
    assert (begins["seconds"], begins["host_s"]) == (6, 1)
    assert (decodes["seconds"], decodes["host_s"]) == (3, 0)
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


def test_the_steps_that_decode_a_whole_batch_tell_how_long_one_takes():
    kinds = [
        {"begins": False, "tokens": 64, "steps": 9, "seconds": 0.9, "host_s": 0.1},
        {"begins": False, "tokens": 128, "steps": 50, "seconds": 0.4, "host_s": 0.1},
        {"begins": True, "tokens": 128, "steps": 3, "seconds": 3.0, "host_s": 0.1},
    ]
    assert steady(kinds, 100) == steady(kinds, 128) == pytest.approx((8.0, 0.25))
    assert steady(kinds, 8) is None
    assert steady(kinds[2:], 128) is None
