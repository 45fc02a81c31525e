"""How long an engine waits for tokens of its GPU: of a step that has none of it, the GPU waits for the host."""

import time
from typing import Any


class Waiting:
    """Of vLLM's workers in this process, from now on.

    Attributes:
        seconds: So far; None where none of them schedules ahead on a GPU of this process.
    """

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput as Output

        self.seconds: float | None = None
        vllms = Output.get_output

        def get_output(output: Any) -> Any:
            began = time.perf_counter()
            output.async_copy_ready_event.synchronize()
            self.seconds = (self.seconds or 0.0) + time.perf_counter() - began
            return vllms(output)

        Output.get_output = get_output


def synchronize() -> None:
    """Wait for what a GPU has under way, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
