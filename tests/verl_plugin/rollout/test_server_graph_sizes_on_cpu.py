"""Which CUDA graphs a rollout asks vLLM for."""

import json
from types import SimpleNamespace

import pytest

from verl_qerl.verl_plugin.rollout.server import cover_batches
from verl_qerl.vllm_plugin.decode.graph_sizes import VLLMS, larger_sizes


def rollout(**options):
    sizes = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    return SimpleNamespace(**{"enforce_eager": False, "cudagraph_capture_sizes": None, **sizes, **options})


@pytest.mark.parametrize(
    ("given", "config", "largest"),
    [
        ({}, rollout(), 1024),
        ({}, rollout(max_num_seqs=768), 768),
        ({"max_num_seqs": 600}, rollout(), 600),
        ({}, rollout(max_num_batched_tokens=1000), 1000),  # vLLM leaves out larger ones, and warns
        ({"max_num_batched_tokens": 700}, rollout(), 700),
    ],
)
def test_every_batch_that_decodes_has_a_graph(given, config, largest):
    own = {"mode": 3, "cudagraph_mode": "PIECEWISE"}
    sizes = [*VLLMS, *larger_sizes(largest)]
    assert sizes[-1] == largest
    for compilation, its in ((own, own), (json.dumps(own), own), (None, {})):
        kwargs = {"compilation_config": compilation, **given}
        kwargs["additional_config"] = {"verl_qerl": {"train_norms": False}}
        cover_batches(kwargs, config)
        assert kwargs.pop("additional_config") == {"verl_qerl": {"train_norms": False}}
        assert kwargs == {"compilation_config": {**its, "cudagraph_capture_sizes": sizes}, **given}


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, rollout(max_num_seqs=512)),
        ({}, rollout(enforce_eager=True)),
        ({}, rollout(cudagraph_capture_sizes=[8])),
        ({"cudagraph_capture_sizes": [8]}, rollout()),
        ({"max_cudagraph_capture_size": 8}, rollout()),
        ({"compilation_config": {"cudagraph_capture_sizes": [8]}}, rollout()),
        ({"compilation_config": '{"max_cudagraph_capture_size": 8}'}, rollout()),
        ({"additional_config": {"verl_qerl": {"lora": "stock"}}}, rollout()),
        ({"max_loras": 2}, rollout()),
    ],
)
def test_sizes_of_graphs_that_somebody_chose_or_that_vllm_has_no_memory_for_stay(given, config):
    kwargs = dict(given)
    cover_batches(kwargs, config)
    assert kwargs == given


def test_sizes_of_graphs_stay_where_lora_is_vllms_by_another_setting(monkeypatch):
    monkeypatch.setitem(vars(pytest.importorskip("vllm.envs")), "VLLM_BATCH_INVARIANT", True)
    kwargs: dict = {}
    cover_batches(kwargs, rollout())
    assert kwargs == {}
