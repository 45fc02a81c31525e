"""Overwriting an adapter in place, against loading it anew."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")
from vllm.lora.request import LoRARequest

from verl_qerl.vllm_plugin.adapter.buffers import can_place, flatten, place_adapter, require_placed, unflatten

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


def place(manager, number: int, tensors: dict, config: dict) -> int:
    layout, flat = flatten(tensors, manager.lora_config.lora_dtype)
    count = place_adapter(manager, number, layout, flat, config)
    require_placed(manager, number, flat)
    return count


@pytest.mark.parametrize(
    ("targets", "rank"),
    [(LINEARS, 8), (LINEARS, 4), (["q_proj", "down_proj"], 8)],
    ids=["all", "rank 4", "two linears"],
)
def test_is_the_adapter_loaded_anew(engine, manager, loaded, prompt_log_probs, targets, rank):
    _, tensors, config, expected = loaded(f"target {len(targets)} {rank}", targets, rank, ID + 1)
    request, *_, before = loaded("before", LINEARS, 8, ID)
    assert can_place(manager)
    assert place(manager, ID, tensors, config) == (8 if targets == LINEARS else 4)
    engine.reset_prefix_cache()
    after = prompt_log_probs(engine, lora_request=request)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected)


def test_an_adapter_takes_the_slot_of_another_and_leaves_nothing_on_the_host(engine, manager, loaded, prompt_log_probs):
    _, tensors, config, expected = loaded("source", LINEARS, 8, ID + 1)
    loaded("holds the slot", LINEARS, 8, ID + 2)
    place(manager, ID + 3, tensors, config)
    assert manager.lora_index_to_id == [ID + 3]
    assert engine.llm_engine.list_loras() == {ID + 3}
    assert manager.get_adapter(ID + 3).loras == {}
    request = LoRARequest("source", ID + 3, "nowhere")  # is not read: the adapter is there
    assert torch.equal(prompt_log_probs(engine, lora_request=request), expected)
    assert place(manager, ID + 3, tensors, config) == 8


def test_nothing_is_written_unless_every_tensor_finds_its_place(engine, manager, loaded, prompt_log_probs):
    request, tensors, config, before = loaded("here", LINEARS, 8, ID)
    bad = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    stray = {name.replace("q_proj", "z_proj"): tensor for name, tensor in bad.items()}
    with pytest.raises(ValueError, match=r"2 modules of the adapter are none of this model's, first '.*z_proj'"):
        place(manager, ID, stray, config)
    half = {name: tensor for name, tensor in bad.items() if "layers.1.mlp.down_proj.lora_B" not in name}
    with pytest.raises(ValueError, match=r"has lora_A of 'model\.layers\.1\.mlp\.down_proj' alone"):
        place(manager, ID, half, config)
    with pytest.raises(ValueError, match="rank"):
        place(manager, ID, bad, {**config, "r": 512})
    narrow = {name: tensor[:, :-16] if "1.mlp.down_proj.lora_A" in name else tensor for name, tensor in bad.items()}
    with pytest.raises(ValueError, match=r"lora_A of 'model\.layers\.1\.mlp\.down_proj' is \(8, 240\)\. .* \(8, 256\)"):
        place(manager, ID, narrow, config)
    short = {name: tensor[:-16] if "1.mlp.down_proj.lora_B" in name else tensor for name, tensor in bad.items()}
    with pytest.raises(ValueError, match=r"lora_B of 'model\.layers\.1\.mlp\.down_proj' is \(112, 8\)"):
        place(manager, ID, short, config)
    layout, flat = flatten(bad, torch.bfloat16)
    with pytest.raises(ValueError, match="Send all of them, once"):
        place_adapter(manager, ID, layout, flat[:-1], config)
    engine.reset_prefix_cache()
    assert torch.equal(prompt_log_probs(engine, lora_request=request), before)


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj"])
def test_a_layer_whose_part_is_no_span_is_set_by_itself(engine, manager, loaded, prompt_log_probs, monkeypatch, name):
    """As under tensor parallelism a fused linear with one adapter for all of its members."""
    _, tensors, config, expected = loaded("source", LINEARS, 8, ID + 1)
    request, *_ = loaded("before", LINEARS, 8, ID)
    layer = manager.modules[f"model.layers.0.mlp.{name}"]

    def copied(half):
        return [part.clone() for part in half] if isinstance(half, list) else half.clone()

    monkeypatch.setattr(layer, "tp_size", 2)
    monkeypatch.setattr(layer, "slice_lora_a", copied, raising=False)
    monkeypatch.setattr(layer, "slice_lora_b", copied, raising=False)
    monkeypatch.setattr(manager, "qerl_plan", None, raising=False)
    place(manager, ID, tensors, config)
    assert [one for one, *_ in manager.qerl_plan.by_layer] == [layer]
    flat = flatten(tensors, torch.bfloat16)[1]
    place_adapter(manager, ID, flatten(tensors, torch.bfloat16)[0], flat, config)
    layer.lora_b_stacked[0][0, 0, 3, 1] += 1
    with pytest.raises(ValueError, match=r"came: a linear of \(\d+, \d+\) differs"):
        require_placed(manager, ID, flat)
    place(manager, ID, tensors, config)
    engine.reset_prefix_cache()
    assert torch.equal(prompt_log_probs(engine, lora_request=request), expected)
    manager.qerl_plan = None


@pytest.mark.parametrize("targets", [LINEARS, ["q_proj", "down_proj"]], ids=["all", "two linears"])
def test_what_the_slot_does_not_hold_is_told(manager, loaded, targets):
    _, tensors, config, _ = loaded(f"told {len(targets)}", targets, 4, ID + 1)
    with pytest.raises(ValueError, match=r"^the rollout does not hold the adapter that came: nothing was written\."):
        require_placed(manager, ID, torch.zeros(4))
    layout, flat = flatten(tensors, torch.bfloat16)
    place_adapter(manager, ID, layout, flat, config)
    require_placed(manager, ID, flat)
    newer = flat.clone()
    newer[-1] = newer[-1].nextafter(torch.tensor(9.0, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"came: [12] of {2 * flat.numel()} bytes differ\."):
        require_placed(manager, ID, newer)
    copied, _ = manager.qerl_plan.copies[0]
    copied.view(-1)[3] += 1
    with pytest.raises(ValueError, match=r"came: [12] of "):
        require_placed(manager, ID, flat)
    place(manager, ID, tensors, config)
    # Beyond the rank, and in a linear without an adapter.
    layer = manager.modules["model.layers.0.mlp.gate_up_proj"]
    layer.lora_b_stacked[0][0, 0, 5, 7] = 1
    with pytest.raises(ValueError, match="what it leaves out is not zero"):
        require_placed(manager, ID, flat)
    place(manager, ID, tensors, config)


def test_a_flat_adapter_is_named_tensors_and_back():
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4, 2)}
    layout, flat = flatten(tensors, torch.float32)
    assert (layout, flat.shape) == ((("a", (2, 3)), ("b", (4, 2))), (14,))
    assert all(torch.equal(part, tensors[name]) for name, part in unflatten(layout, flat).items())
    with pytest.raises(ValueError, match=r"c of the adapter is \(3,\)"):
        flatten({"c": torch.zeros(3)}, torch.float32)
