"""Weights are loaded under a split limit above torch's segments of 20 MiB, so that an empty one is used again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from vllm.v1.worker import gpu_worker

limits = []


@contextmanager
def scoped(max_split_size_mb: int) -> Iterator[None]:
    """Stands for the setting of torch's allocator, which a CPU does not have."""
    limits.append(max_split_size_mb)
    yield


gpu_worker.set_current_vllm_config = nullcontext
worker = SimpleNamespace(
    _maybe_get_memory_pool_context=lambda tag: nullcontext(),
    _scoped_allocator_max_split=scoped,
    vllm_config=SimpleNamespace(weight_transfer_config=None),
    model_runner=SimpleNamespace(load_model=lambda load_dummy_weights: None),
)
gpu_worker.Worker.load_model(worker)
assert all(limit > 20 for limit in limits), f"weights are loaded with max_split_size_mb:{limits}"
