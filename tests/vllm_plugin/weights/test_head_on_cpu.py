"""The head in FP8: its arithmetic, what it changes in an engine and what it leaves alone, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from verl_qerl.formats import fp8
from verl_qerl.testing import rms_error_ratio
from verl_qerl.vllm_plugin.weights.head import quantize_head, quantize_rows

FP8 = {"lm_head": "fp8"}


def test_the_weight_is_exact_in_bf16_and_as_fine_as_with_any_scale():
    weight = (torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    codes, scale = quantize_rows(weight)
    dense = codes.float() * scale
    assert torch.equal(dense.bfloat16().float(), dense)
    assert (codes.dtype, scale.shape) == (torch.float8_e4m3fn, (300, 1))
    # Half a step of three bits behind the point; smaller numbers than 2**-6 of a scale have fewer.
    assert ((dense - weight.float()).abs() <= weight.float().abs() * 2.0**-4 + scale * 2.0**-10).all()
    other, factor = fp8.FP8.quantize_rows(weight)
    assert rms_error_ratio(dense, weight) < 1.02 * rms_error_ratio(other.float() * factor, weight)


@pytest.mark.parametrize(
    ("amax", "exponent", "code"), [(448.0, 0, 448.0), (450.0, 1, 224.0), (1.0, -8, 256.0), (0.875, -9, 448.0)], ids=str
)
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_row(amax, exponent, code):
    codes, scale = quantize_rows(torch.tensor([[amax, -amax / 4]], dtype=torch.bfloat16))
    assert (scale.item(), codes[0, 0].float().item()) == (2.0**exponent, code)


def test_rows_of_zeros_and_rows_in_chunks(monkeypatch):
    weight = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[2] = 0
    whole = quantize_rows(weight)
    assert not whole[0][2].float().any()
    monkeypatch.setattr("verl_qerl.vllm_plugin.weights.head.chunk_rows", lambda weight: 3)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(quantize_rows(weight), whole, strict=True))


@pytest.fixture(scope="module")
def rounded(start, packed_dir):
    return start(packed_dir, aqn={}, additional=FP8)


def head_of(worker) -> torch.Tensor:
    return worker.model_runner.get_model().lm_head.weight.data.clone()


def test_the_engine_multiplies_by_the_rounded_head_and_nothing_else_changes(
    rounded, packed_engine, packed_dir, model_dir, prompt_log_probs, reference_model, reference_log_probs, generate
):
    weight = load_file(model_dir("qwen2") / "model.safetensors")["lm_head.weight"]
    codes, scale = quantize_rows(weight)
    (held,) = rounded.collective_rpc(head_of)
    assert torch.equal(held, (codes.float() * scale).bfloat16())
    before, after = prompt_log_probs(packed_engine), prompt_log_probs(rounded)
    model = reference_model()
    exact = reference_log_probs(model)
    model.lm_head.weight.data = codes.float() * scale
    change = reference_log_probs(model) - exact
    # What bf16 adds to one engine and to the other is far below what the rounding does.
    assert (after - before - change).abs().mean() < 0.25 * change.abs().mean()
    assert len(generate(rounded)[0]) == 4


def test_log_probs_change_by_no_more_than_the_stated_bound(rounded, packed_engine, prompt_log_probs):
    """A logit sums K products whose weights move by 2.7 % each, independently: it moves by 2.7 % of their spread."""
    before, after = prompt_log_probs(packed_engine), prompt_log_probs(rounded)
    spread = before.std()
    assert 0.005 * spread < (after - before).abs().mean() < 0.04 * spread
    assert (after - before).abs().max() < 0.16 * spread


def test_bf16_is_what_an_engine_without_the_option_computes(start, packed_dir, packed_engine, prompt_log_probs):
    explicit = start(packed_dir, aqn={}, additional={"lm_head": "bf16"})
    assert torch.equal(prompt_log_probs(explicit), prompt_log_probs(packed_engine))


def test_beside_an_adapter_too(start, model_dir, prompt_log_probs):
    """vLLM wraps the logits of Qwen3 for adapters of its head, of which there are none: they are unwrapped."""
    options = {"enable_lora": True, "max_lora_rank": 8}
    bf16 = start(model_dir("qwen3"), aqn={}, **options)
    fp8 = start(model_dir("qwen3"), aqn={}, additional=FP8, **options)
    (wrapped,) = fp8.collective_rpc(lambda worker: type(worker.model_runner.get_model().logits_processor).__name__)
    assert wrapped == "LogitsProcessor"
    before, after = prompt_log_probs(bf16), prompt_log_probs(fp8)
    assert 0.005 * before.std() < (after - before).abs().mean() < 0.04 * before.std()


def test_a_bf16_model_with_no_format_of_ours(vllm, model_dir, prompt_log_probs):
    def start(additional):
        return vllm.LLM(
            model=str(model_dir("qwen2")),
            dtype="bfloat16",
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
            max_model_len=256,
            max_num_seqs=4,
            worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
            additional_config={"verl_qerl": additional},
        )

    before, after = prompt_log_probs(start({})), prompt_log_probs(start(FP8))
    assert 0.005 * before.std() < (after - before).abs().mean() < 0.04 * before.std()


def test_a_sync_of_quantized_weights_rounds_the_new_head(start, model_dir, prompt_log_probs):
    from verl_qerl.checkpoints.groups import linears_among
    from verl_qerl.checkpoints.manifest import with_manifest
    from verl_qerl.checkpoints.stream import quantize_stream
    from verl_qerl.formats import get_format
    from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

    engine = start(model_dir("qwen2"), form="int8", aqn={}, additional=FP8)
    loaded = prompt_log_probs(engine)
    weights = load_file(model_dir("qwen2") / "model.safetensors")

    def sync(tensors):
        linears = linears_among({name: tensor.shape for name, tensor in tensors.items()}, None, "the test")
        stream = list(with_manifest(quantize_stream(tensors.items(), linears, get_format("int8")), 1))

        def run(worker):
            reload = InPlaceReload(worker.model_runner.get_model(), worker.vllm_config, get_format("int8"), 0)
            reload.load([(name, tensor.clone()) for name, tensor in stream])
            reload.finish()

        engine.collective_rpc(run)
        assert engine.reset_prefix_cache()
        return prompt_log_probs(engine)

    codes, scale = quantize_rows(weights["lm_head.weight"].flip(0))
    flipped = sync(weights | {"lm_head.weight": weights["lm_head.weight"].flip(0)})
    (held,) = engine.collective_rpc(head_of)
    assert torch.equal(held, (codes.float() * scale).bfloat16())
    assert not torch.equal(flipped, loaded)
    assert torch.equal(sync(weights), loaded)


def test_ranks_hold_parts_of_the_rounded_head(run_script, rounded, model_dir, write_adapter, prompt, prompt_log_probs):
    script = (Path(__file__).parents[1] / "parallel_cases.py").read_text()
    adapters = [write_adapter(name, ["q_proj"], 8) for name in ("one", "two.")]
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "model_loader_extra_config": {"scale": "minmax"}}
    ours = {"aqn": {"enabled": True}, **FP8}
    arguments = (*map(str, adapters), json.dumps(prompt), json.dumps(options), json.dumps(ours))
    seen = run_script(script, str(model_dir("qwen2")), *arguments)
    assert (torch.tensor(seen["base"], dtype=torch.float64) - prompt_log_probs(rounded)).abs().mean() < 0.01


def refused(model: torch.nn.Module) -> str:
    with pytest.raises(ValueError, match=r"the output head cannot be quantized: .*lm_head=fp8") as caught:
        quantize_head(model)
    assert str(caught.value).endswith("Leave the option out.")
    return str(caught.value)


def test_heads_that_are_refused(rounded, start, packed_dir):
    (sentence,) = rounded.collective_rpc(lambda worker: refused(worker.model_runner.get_model()))
    assert "Qwen2ForCausalLM: its head is quantized already (FP8Head)" in sentence
    assert "Linear: it has 0 heads" in refused(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_head_that_is_the_embedding_stops_the_engine(start, model_dir, tmp_path, family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir(family) / name).read_bytes())
    with pytest.raises(ValueError, match=r"it has 0 heads beside its embedding|its head is the embedding"):
        start(tmp_path, aqn={}, additional=FP8)
