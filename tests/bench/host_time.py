"""How long an engine waits for its GPU: in a step that has nothing of it, the GPU waits for the host."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


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
