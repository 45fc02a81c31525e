"""How long an engine waits for its GPU: in a step that has nothing of it, the GPU waits for the host."""

import contextlib
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FUNCTIONS = 40  # that `functions` tells of, by each of its two times


class Waiting:
    """Of the worker of this process, from now on: vLLM waits for tokens, and for the inputs of the step before.

    Attributes:
        seconds: So far; None where none schedules ahead on a GPU of this process.
    """

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

        self.seconds: float | None = None
        get_output, prepare = AsyncGPUModelRunnerOutput.get_output, GPUModelRunner.synchronize_input_prep

        def watched_output(output: Any) -> Any:
            self._wait(output.async_copy_ready_event)
            return get_output(output)

        @contextlib.contextmanager
        def watched_inputs(runner: Any) -> Iterator[None]:
            if runner.prepare_inputs_event is not None:
                self._wait(runner.prepare_inputs_event)
            with prepare(runner):
                yield

        AsyncGPUModelRunnerOutput.get_output, GPUModelRunner.synchronize_input_prep = watched_output, watched_inputs

    def _wait(self, event: Any) -> None:
        began = time.perf_counter()
        event.synchronize()
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - began


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
