"""Overwriting an adapter in place, against loading it anew."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")
from verl_qerl.vllm_plugin.adapter import can_overwrite, overwrite_adapter

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ID = 900


@pytest.fixture(scope="module")
def manager(engine):
    return engine.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)[0]


@pytest.fixture(scope="module")
def loaded(vllm, engine, manager, write_adapter, prompt_log_probs):
    """A request whose adapter is in the buffers."""

    def load(name: str, targets: list[str], rank: int, number: int):
        folder = write_adapter(name, targets, rank)
        request = vllm.lora.request.LoRARequest(name, number, str(folder))
        config = json.loads((folder / "adapter_config.json").read_text())
        return (
            request,
            load_file(folder / "adapter_model.safetensors"),
            config,
            prompt_log_probs(engine, lora_request=request),
        )

    return load


@pytest.mark.parametrize(
    ("targets", "rank"),
    [(LINEARS, 8), (LINEARS, 4), (["q_proj", "down_proj"], 8)],
    ids=["all", "rank 4", "two linears"],
)
def test_is_the_adapter_loaded_anew(engine, manager, loaded, prompt_log_probs, targets, rank):
    _, tensors, config, expected = loaded(f"target {len(targets)} {rank}", targets, rank, ID + 1)
    request, *_, before = loaded("before", LINEARS, 8, ID)
    assert can_overwrite(manager, ID)
    assert overwrite_adapter(manager, ID, tensors, config) == (8 if targets == LINEARS else 4)
    engine.reset_prefix_cache()
    after = prompt_log_probs(engine, lora_request=request)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected)


def test_an_adapter_that_is_not_in_the_buffers_cannot_be_overwritten(manager, loaded):
    loaded("here", LINEARS, 8, ID)
    assert not can_overwrite(manager, ID + 5)


def test_every_tensor_must_find_its_place(manager, loaded):
    _, tensors, config, _ = loaded("here", LINEARS, 8, ID)
    stray = {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"2 modules of the adapter are none of this model's, first '.*z_proj'"):
        overwrite_adapter(manager, ID, stray, config)
    half = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.down_proj.lora_B" not in name}
    with pytest.raises(ValueError, match=r"has lora_A of 'model\.layers\.0\.mlp\.down_proj' alone"):
        overwrite_adapter(manager, ID, half, config)
    with pytest.raises(ValueError, match="rank"):
        overwrite_adapter(manager, ID, tensors, {**config, "r": 512})
