"""How long an engine waits for its GPU: in a step that has nothing of it, the GPU waits for the host."""

import collections
import contextlib
import cProfile
import itertools
import math
import pstats
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZES = (8, 32, 64, 128, 192, 256, 512)  # tokens of a step that `by_kind` tells apart
# Requests, tokens, when its own tokens had come, and for how long the host had waited by then.
Step = tuple[int, int, float, float]
FUNCTIONS = 40  # that `functions` tells of, by each of its two times


class Waiting:
    """Of the worker of this process, from now on: vLLM waits for tokens, and for the inputs of the step before.

    A worker in a process of its own waits for tokens in another thread: the time in which any thread waits counts.

    Attributes:
        seconds: So far; None where none schedules ahead on a GPU of this process.
        steps: Those since `taken` was called.
    """

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

        self.seconds: float | None = None
        self._lock, self._threads, self._until = threading.Lock(), 0, 0.0
        self.steps: list[Step] = []
        self.taken()
        self._launched: collections.deque[tuple[int, int]] = collections.deque()
        get_output, prepare = AsyncGPUModelRunnerOutput.get_output, GPUModelRunner.synchronize_input_prep
        execute = GPUModelRunner.execute_model

        def watched_output(output: Any) -> Any:
            self._wait(output.async_copy_ready_event)
            if self._launched:
                self.steps.append((*self._launched.popleft(), time.perf_counter(), self.seconds or 0.0))
            return get_output(output)

        def watched_execute(runner: Any, scheduled: Any, *args: Any, **options: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self._launched.append((len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens))
            return execute(runner, scheduled, *args, **options)

        @contextlib.contextmanager
        def watched_inputs(runner: Any) -> Iterator[None]:
            if runner.prepare_inputs_event is not None:
                self._wait(runner.prepare_inputs_event)
            with prepare(runner):
                yield

        AsyncGPUModelRunnerOutput.get_output, GPUModelRunner.synchronize_input_prep = watched_output, watched_inputs
        GPUModelRunner.execute_model = watched_execute

    def taken(self) -> list[Step]:
        """Since the last call, after one of no requests that is the time of that call."""
        found, self.steps = self.steps, [(0, 0, time.perf_counter(), self.seconds or 0.0)]
        return found

    def _wait(self, event: Any) -> None:
        self._count(1)
        event.synchronize()
        self._count(-1)

    def _count(self, threads: int) -> None:
        with self._lock:
            now, self.seconds = time.perf_counter(), self.seconds or 0.0
            if self._threads:
                self.seconds += now - self._until
            self._threads, self._until = self._threads + threads, now


def by_kind(steps: list[Step]) -> list[dict[str, Any]]:
    """Steps, seconds, and those of them in which the host did not wait, of each kind of step.

    Kinds are steps of one token of each request, and those in which requests begin; by the least of SIZES that takes
    their tokens, None for more. A step takes the time from the tokens of the step before to its own.

    Args:
        steps: In their order; the first one only tells when the second one began.
    """
    kinds: dict[tuple[bool, int | None], list[float]] = {}
    for before, (requests, tokens, came, waited) in itertools.pairwise(steps):
        size = next((size for size in SIZES if tokens <= size), None)
        kind = kinds.setdefault((tokens > requests, size), [0, 0.0, 0.0])
        seconds = came - before[2]
        for index, value in enumerate((1, seconds, seconds - (waited - before[3]))):
            kind[index] += value
    order = sorted(kinds.items(), key=lambda item: (item[0][0], item[0][1] or math.inf))
    return [
        {"begins": begins, "tokens": size, "steps": count, "seconds": round(seconds, 3), "host_s": round(host, 3)}
        for (begins, size), (count, seconds, host) in order
    ]


def steady(kinds: list[dict[str, Any]], batch: int) -> tuple[float, float] | None:
    """ms of a step that only decodes about so many sequences, and the host's share of it; None without such steps.

    Args:
        kinds: Of `by_kind`.
    """
    size = next((size for size in SIZES if batch <= size), None)
    for kind in kinds:
        if not kind["begins"] and kind["tokens"] == size and kind["seconds"]:
            return 1e3 * kind["seconds"] / kind["steps"], kind["host_s"] / kind["seconds"]
    return None


class Sampler:
    """Looks from now on, a thousand times a second, at what the thread does that made it.

    A call costs nothing more for it, other than under a profiler, and a thread that waits is seen too.
    """

    def __init__(self) -> None:
        self._own: collections.Counter[Any] = collections.Counter()
        self._whole: collections.Counter[Any] = collections.Counter()
        self._samples, self._ended, self._switches = 0, threading.Event(), sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # Python would let it wait for 5 ms
        self._thread = threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True)
        self._thread.start()

    def _look(self, thread: int) -> None:
        while not self._ended.wait(1e-3):
            frame = sys._current_frames().get(thread)
            if frame is None:
                return
            self._samples += 1
            self._own[frame.f_code] += 1
            codes = set()
            while frame is not None:
                codes.add(frame.f_code)
                frame = frame.f_back
            self._whole.update(codes)

    def stop(self) -> dict[str, list[float]]:
        """Function -> its share of the samples, its own and with what it calls, of those that have the most."""
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._switches)
        samples = max(self._samples, 1)
        most = {code for counts in (self._own, self._whole) for code, _ in counts.most_common(FUNCTIONS)}
        order = sorted(most, key=lambda code: -self._whole[code])
        return {
            _name(code): [round(counts[code] / samples, 4) for counts in (self._own, self._whole)] for code in order
        }


def _name(code: Any) -> str:
    file = Path(code.co_filename)
    return f"{file.parent.name}/{file.name}:{code.co_firstlineno}:{code.co_name}"


def synchronize() -> None:
    """Wait for what a GPU has under way, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def functions(run: Callable[[int], object], steps: int) -> dict[str, list[float]]:
    """Function -> microseconds of a step, its own and with what it calls, of those that take the most.

    The profiler makes calls slower: functions that are called often seem larger than they are.

    Args:
        run: Makes so many steps in this thread.
        steps: How many.
    """
    profiler = cProfile.Profile()
    profiler.runcall(run, steps)
    times: dict[str, list[float]] = {}
    for (file, line, name), (_, _, own, whole, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = f"{Path(file).parent.name}/{Path(file).name}:{line}:{name}" if line else name
        times[where] = [round(own / steps * 1e6, 1), round(whole / steps * 1e6, 1)]
    most = {name for by in (0, 1) for name in sorted(times, key=lambda name: -times[name][by])[:FUNCTIONS]}
    return {name: times[name] for name in sorted(most, key=lambda name: -times[name][1])}
