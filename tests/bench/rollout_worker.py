"""What bench_rollout.py asks the workers of an engine."""

from typing import Any

import host_time

GIB = 1 << 30


def modules_of(worker: Any) -> dict[str, str]:
    """Two linears of a layer and the sampler -> the classes that compute them: what the arm really ran."""
    found = {"worker": "ours" if hasattr(worker, "qerl_set_noise") else "stock"}
    runner = worker.model_runner
    parts = ("sampler", "cudagraph_dispatcher", "cudagraph_manager")  # the last one in vLLM's V2 runner only
    found |= {name: type(getattr(runner, name)).__name__ for name in parts if hasattr(runner, name)}
    for name, module in runner.get_model().named_modules():
        if name.endswith(("layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj")):
            base = getattr(module, "base_layer", module)
            scheme = getattr(base, "scheme", None)
            kernel = getattr(scheme, "kernel", None) or getattr(base.quant_method, "fp8_linear", None)
            parts = (module, base if base is not module else None, base.quant_method, scheme, kernel)
            found[name] = " > ".join(type(part).__name__ for part in parts if part is not None)
    return found


def peak_gib(worker: Any) -> float | None:
    """Of a GPU so far: what the driver calls used, or the allocator's peak if that was higher while loading."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round(max(total - free, torch.cuda.max_memory_reserved()) / GIB, 2)


def watch(worker: Any) -> None:
    """Count from now on what this worker waits for."""
    worker.bench_waiting = host_time.Waiting()


def waited(worker: Any) -> tuple[float | None, list[dict[str, Any]]]:
    """Seconds that this worker has waited for its GPU so far, and the kinds of its steps since this was called last."""
    waiting = worker.bench_waiting
    return waiting.seconds, host_time.by_kind(waiting.taken())


def sample(worker: Any) -> None:
    """Look from now on at what the thread of this worker does, which may be the engine's."""
    worker.bench_sampler = host_time.Sampler()


def sampled(worker: Any) -> dict[str, list[float]]:
    """What was seen since `sample`."""
    return worker.bench_sampler.stop()
