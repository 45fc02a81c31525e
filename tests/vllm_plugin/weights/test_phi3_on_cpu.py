"""Phi-3, whose checkpoints hold q, k, v and gate, up in one matrix each, with an adapter on those."""

import pytest
import torch
from qerl_testing import draw_adapter, random_decoder
from safetensors.torch import load_file

pytest.importorskip("vllm")
pytest.importorskip("peft")

import peft

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats.reference import dequantize

LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """(directory of a bf16 model, directory of an adapter of it, the actor's log-probs with and without)."""
    folder = tmp_path_factory.mktemp("phi3")
    sizes = {"vocab_size": 512, "max_position_embeddings": 512, "original_max_position_embeddings": 512}
    special = {"bos_token_id": None, "eos_token_id": 510, "pad_token_id": 511}
    model = random_decoder("phi3", gain=3, **sizes, **special)
    model.save_pretrained(folder / "bf16")
    for name, item in packed_stream(open_source(folder / "bf16")):
        if not isinstance(item, torch.Tensor):
            model.get_submodule(name).weight.data = dequantize(item).bfloat16()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=LINEARS)
    )
    draw_adapter(adapted, seed=1)
    adapted.save_pretrained(folder / "adapter")
    return folder / "bf16", folder / "adapter", adapted.float()


def test_a_flat_adapter_is_the_actors(vllm, start, phi3, prompt_log_probs, reference_log_probs):
    from verl_qerl.vllm_plugin.adapter.buffers import flatten, place_adapter

    folder, adapter, actor = phi3
    engine = start(folder, enable_lora=True, max_lora_rank=8, skip_tokenizer_init=True)
    base = prompt_log_probs(engine)
    layout, flat = flatten(load_file(adapter / "adapter_model.safetensors"), torch.bfloat16)
    config = peft.PeftConfig.from_pretrained(adapter).to_dict()
    request = vllm.lora.request.LoRARequest("trained", 5, str(adapter))
    from_files = prompt_log_probs(engine, lora_request=request)  # vLLM's own way

    def place(worker):
        manager = worker.model_runner.lora_manager._adapter_manager
        for layer in manager.modules.values():
            layer.reset_lora(0)
        return place_adapter(manager, 5, layout, flat.clone(), config)

    assert engine.collective_rpc(place) == [8]
    placed = prompt_log_probs(engine, lora_request=request)
    assert torch.equal(placed, from_files)
    with actor.disable_adapter():
        expected = reference_log_probs(actor)
    assert (base - expected).abs().mean() < 0.03
    expected = reference_log_probs(actor)
    assert (placed - expected).abs().mean() < 0.03 < (base - expected).abs().mean()
