"""The KV cache of an engine that sleeps stays within the engine's share of a GPU."""

import logging
from types import SimpleNamespace

import pytest
import torch

from verl_qerl.vllm_plugin.memory_share import stay_within_share

GIB = 1 << 30


def make_worker(found: float, device: str = "cuda") -> SimpleNamespace:
    """One whose share is 56 of 140 GiB, of which 132 were free when it began."""
    return SimpleNamespace(
        device=torch.device(device),
        requested_memory=56 * GIB,
        init_snapshot=SimpleNamespace(free_memory=132 * GIB),
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
        assert worker.determine_available_memory() == 50 * GIB
    assert "has 63.0 GiB for the KV cache, of which 50.0 are left" in caplog.text


def test_what_is_within_the_share_stays(caplog):
    worker = make_worker(49.5)
    stay_within_share(worker, make_config())
    assert worker.determine_available_memory() == int(49.5 * GIB)
    assert not caplog.text


@pytest.mark.parametrize(
    ("config", "device"),
    [(make_config(sleeps=False), "cuda"), (make_config(given=63 * GIB), "cuda"), (make_config(), "cpu")],
    ids=["never asleep", "bytes are given", "no GPU"],
)
def test_others_are_as_they_were(config, device):
    worker = make_worker(63, device)
    stay_within_share(worker, config)
    assert worker.determine_available_memory() == 63 * GIB
