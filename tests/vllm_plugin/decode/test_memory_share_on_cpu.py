"""The KV cache of an engine that sleeps stays within the engine's share of a GPU."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm import envs

from verl_qerl.vllm_plugin.decode.memory_share import stay_within_share, use_segments_again

GIB = 1 << 30


def make_worker(found: float, device: str = "cuda") -> SimpleNamespace:
    """One whose share is 56 of 140 GiB, of which 132 were free when it began; a pass takes 2, and its CUDA graphs 3."""
    return SimpleNamespace(
        device=torch.device(device),
        requested_memory=56 * GIB,
        init_snapshot=SimpleNamespace(free_memory=132 * GIB),
        peak_activation_memory=2 * GIB,
        cudagraph_memory_estimate=3 * GIB,
        determine_available_memory=lambda: int(found * GIB),
    )


def make_config(sleeps: bool = True, given: int | None = None) -> SimpleNamespace:
    cache = SimpleNamespace(kv_cache_memory_bytes=given)
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps), cache_config=cache)


@pytest.fixture(autouse=True)
def six_gib_are_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (126 * GIB, 140 * GIB))


def test_what_is_beyond_the_share_is_not_given(caplog):
    worker = make_worker(63)
    stay_within_share(worker, make_config())
    with caplog.at_level(logging.WARNING):
        assert worker.determine_available_memory() == 45 * GIB
    assert "has 63.0 GiB for the KV cache, of which 45.0 are left" in caplog.text


def test_what_is_within_the_share_stays(caplog):
    worker = make_worker(44.5)
    stay_within_share(worker, make_config())
    assert worker.determine_available_memory() == int(44.5 * GIB)
    assert not caplog.text


def test_graphs_that_vllm_does_not_count_are_not_counted(monkeypatch):
    monkeypatch.setitem(vars(envs), "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False)  # an engine has them cached
    worker = make_worker(63)
    stay_within_share(worker, make_config())
    assert worker.determine_available_memory() == 48 * GIB


@pytest.mark.parametrize(
    ("config", "device"),
    [(make_config(sleeps=False), "cuda"), (make_config(given=63 * GIB), "cuda"), (make_config(), "cpu")],
    ids=["never asleep", "bytes are given", "no GPU"],
)
def test_others_are_as_they_were(config, device):
    worker = make_worker(63, device)
    stay_within_share(worker, config)
    assert worker.determine_available_memory() == 63 * GIB


@pytest.mark.parametrize(("sleeps", "asked", "given"), [(True, 20, 21), (True, 64, 64), (False, 20, 20)])
def test_segments_of_20_mib_are_used_again(sleeps, asked, given):
    limits = []
    worker = SimpleNamespace(_scoped_allocator_max_split=lambda max_split_size_mb: limits.append(max_split_size_mb))
    use_segments_again(worker, make_config(sleeps))
    worker._scoped_allocator_max_split(max_split_size_mb=asked)
    assert limits == [given]


def test_vllm_calls_it_that():
    from vllm.v1.worker.gpu_worker import Worker

    assert list(inspect.signature(Worker._scoped_allocator_max_split).parameters) == ["self", "max_split_size_mb"]
