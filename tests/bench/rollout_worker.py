"""What bench_rollout.py asks the workers of an engine."""

from typing import Any

GIB = 1 << 30


def modules_of(worker: Any) -> dict[str, str]:
    """Two linears of a layer and the sampler -> the classes that compute them: what the arm really ran."""
    found = {"sampler": type(worker.model_runner.sampler).__name__}
    for name, module in worker.model_runner.get_model().named_modules():
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
