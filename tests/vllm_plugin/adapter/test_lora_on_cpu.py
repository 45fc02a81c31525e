"""The path for one adapter inside an engine; its arithmetic against PEFT is in test_quantization_on_cpu.py."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.lora.layers import RowParallelLinearWithLoRA
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import RowParallelLinear

from verl_qerl.vllm_plugin.adapter.lora import release_buffers, use_single_adapter

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def layers_of(engine) -> dict:
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_a_stacked")}


@pytest.fixture(scope="module")
def stock(start, model_dir):
    """The same engine on vLLM's own path."""
    return start(
        model_dir("qwen2"),
        aqn={"enabled": True},
        additional={"lora": "stock"},
        model_loader_extra_config={"scale": "minmax"},
        enable_lora=True,
        max_lora_rank=8,
    )


def test_every_linear_is_on_the_path(engine, stock):
    kinds = {type(layer).__name__ for layer in layers_of(engine).values()}
    assert kinds == {
        "SingleMergedQKVParallelLinearWithLoRA",
        "SingleMergedColumnParallelLinearWithLoRA",
        "SingleRowParallelLinearWithLoRA",
    }
    assert len(layers_of(engine)) == 8
    assert not any("Single" in type(layer).__name__ for layer in layers_of(stock).values())


def test_buffers_of_vllm_are_views_of_the_stacked_tensors(engine):
    for layer in layers_of(engine).values():
        assert layer.qerl_a.shape[0] == len(layer.lora_a_stacked) * 8
        for stacked, parts in ((layer.qerl_a, layer.lora_a_stacked), (layer.qerl_b, layer.lora_b_stacked)):
            assert torch.equal(torch.cat([part[0, 0] for part in parts]), stacked)
            assert {part.untyped_storage().data_ptr() for part in parts} == {stacked.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("targets", "rank"), [(LINEARS, 8), (LINEARS, 4), (["q_proj", "down_proj"], 8)], ids=["all", "rank 4 of 8", "two"]
)
def test_log_probs_are_those_of_vllms_own_path(vllm, engine, stock, write_adapter, prompt_log_probs, targets, rank):
    folder = write_adapter(f"{len(targets)}-{rank}", targets, rank)
    request = vllm.lora.request.LoRARequest(folder.name, 10 * len(targets) + rank, str(folder))
    base = prompt_log_probs(engine)
    ours, expected = prompt_log_probs(engine, lora_request=request), prompt_log_probs(stock, lora_request=request)
    assert torch.equal(base, prompt_log_probs(stock))
    # vLLM's path rounds each linear's result to bf16 once more: a few thousandths, where the adapter moves them by 0.2.
    assert (ours - expected).abs().mean() < 0.05 * (expected - base).abs().mean()


def test_a_whole_prompt_is_scored_with_an_adapter_where_the_head_is_not_tied(
    vllm, start, model_dir, write_adapter, prompt_log_probs
):
    """vLLM's LoRA for the head takes a row for each request, and a prompt has one for each token."""
    engine = start(model_dir("qwen3"), aqn={}, enable_lora=True, max_lora_rank=8)
    folder = write_adapter("untied", LINEARS, 8)
    request = vllm.lora.request.LoRARequest("untied", 1, str(folder))
    with_adapter, without = prompt_log_probs(engine, lora_request=request), prompt_log_probs(engine)
    assert (with_adapter - without).abs().mean() > 0.01


def test_a_batch_may_mix_tokens_with_and_without_the_adapter(vllm, engine, write_adapter, prompt):
    folder = write_adapter("mixed", LINEARS, 8)
    request = vllm.lora.request.LoRARequest("mixed", 77, str(folder))
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": prompt[:40]}, {"prompt_token_ids": prompt[:40]}]

    def ask(requests):
        outputs = engine.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [[next(iter(p.values())).logprob for p in out.prompt_logprobs[1:]] for out in outputs]

    (none, _), (all_, _), mixed = ask([None, None]), ask([request, request]), ask([request, None])
    assert none != all_
    assert torch.allclose(torch.tensor(mixed), torch.tensor([all_, none]), atol=2e-2)


def test_a_second_adapter_replaces_the_first(vllm, engine, write_adapter, prompt_log_probs):
    requests = [
        vllm.lora.request.LoRARequest(name, number, str(write_adapter(name, LINEARS, 8)))
        for number, name in enumerate(("first", "another"), start=100)
    ]
    one, two = (prompt_log_probs(engine, lora_request=request) for request in requests)
    assert (one - two).abs().max() > 0.1
    assert torch.equal(prompt_log_probs(engine, lora_request=requests[0]), one)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_loras": 2}, "max_loras is 2"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras is on"),
        ({"lora_dtype": torch.float16}, "the adapter is torch.float16"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_it_cannot_serve_stays_with_vllm_and_is_said(engine, change, reason, caplog):
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    config = {"max_loras": 1, "fully_sharded_loras": False, "lora_dtype": torch.bfloat16} | change
    assert use_single_adapter(model, SimpleNamespace(**config)) == 0
    assert reason in caplog.text


@pytest.mark.parametrize("max_loras", [1, 2])
def test_buffers_of_what_goes_on_the_path_are_freed_and_made_anew(stock, max_loras):
    layers = [copy.copy(layer) for layer in layers_of(stock).values()]
    wrapper = copy.copy(layers[0].punica_wrapper)  # conversion changes it, and the engine goes on
    for layer in layers:
        layer.punica_wrapper = wrapper
    config = SimpleNamespace(max_loras=max_loras, fully_sharded_loras=False, lora_dtype=torch.bfloat16)
    model = torch.nn.ModuleList(layers)

    def buffers():
        return [part for layer in layers for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]

    before = buffers()
    assert all(part.nbytes > 0 for part in before)
    release_buffers(model, config)
    assert {part.device.type for part in buffers()} == {"meta" if max_loras == 1 else "cpu"}
    assert use_single_adapter(model, config) == (8 if max_loras == 1 else 0)
    for old, new in zip(before, buffers(), strict=True):
        assert (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        assert max_loras == 2 or not new.any()


def test_layers_of_other_kinds_and_odd_widths_stay_and_are_named(engine, caplog):
    model = torch.nn.Module()
    model.embedding = BaseLayerWithLoRA()
    model.odd = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA)
    torch.nn.Module.__init__(model.odd)
    model.odd.output_slices = (24,)
    config = SimpleNamespace(max_loras=1, fully_sharded_loras=False, lora_dtype=torch.bfloat16)
    assert use_single_adapter(model, config) == 0
    assert "BaseLayerWithLoRA, RowParallelLinearWithLoRA stay on vLLM's kernels" in caplog.text
    assert not [record for record in caplog.records if "Single" in record.message]


def test_a_base_that_computes_in_its_own_way_stays(engine, caplog):
    """Such as vLLM's GateLinear, whose result may be float32."""
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    stock = model.model.layers[0].mlp.down_proj
    own = type("Own", (type(stock.base_layer),), {"forward": lambda self, x: x})
    layer, base = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA), own.__new__(own)
    for module in (layer, base):
        torch.nn.Module.__init__(module)
    layer.output_slices, layer.base_layer = (64,), base
    config = SimpleNamespace(max_loras=1, fully_sharded_loras=False, lora_dtype=torch.bfloat16)
    assert use_single_adapter(torch.nn.ModuleList([layer]), config) == 0
    assert "RowParallelLinearWithLoRA stay on vLLM's kernels" in caplog.text


def test_a_model_without_lora_layers_is_an_error():
    with pytest.raises(ValueError, match="Linear has no LoRA layers"):
        use_single_adapter(torch.nn.Linear(2, 2), SimpleNamespace())


@pytest.mark.parametrize(("width", "expected"), [(24, "sorted"), (32, "not sorted")])
def test_tokens_are_sorted_for_a_layer_that_stays(monkeypatch, width, expected):
    class Wrapper:
        def update_metadata(self, *args, **kwargs):
            self.seen = "sorted"

        def _update_base_metadata(self, *args):
            self.seen = "not sorted"

    monkeypatch.setattr("verl_qerl.vllm_plugin.adapter.lora._convert", lambda layer, none_active: None)
    model, wrapper = torch.nn.Module(), Wrapper()
    for name, size in (("even", 32), ("other", width)):
        layer = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA)
        torch.nn.Module.__init__(layer)
        layer.output_slices, layer.punica_wrapper = (size,), wrapper
        layer.base_layer = RowParallelLinear.__new__(RowParallelLinear)
        torch.nn.Module.__init__(layer.base_layer)
        setattr(model, name, layer)
    use_single_adapter(model, SimpleNamespace(max_loras=1, fully_sharded_loras=False, lora_dtype=torch.bfloat16))
    wrapper.update_metadata(SimpleNamespace(is_prefill=False, index_mapping=(1, 0)), [7], 1, 8)
    assert (wrapper.seen, bool(wrapper.qerl_none_active)) == (expected, False)
