"""A mixture of experts in an engine, against transformers with the dequantized weights and against the actor."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from qerl_testing import draw_adapter, rms_error_ratio, set_linear
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.digest import check_same_base, weight_digest
from verl_qerl.checkpoints.experts import ADAPTED
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.formats.reference import dequantize

pytest.importorskip("vllm")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module", autouse=True)
def expert_group(vllm):
    """The group of ranks that vLLM makes with a process's first engine if that holds experts, and misses later."""
    from vllm.distributed import parallel_state as state

    if state.model_parallel_is_initialized() and state._EP is None:
        state._EP = state.get_tp_group()  # of one rank, too


@pytest.fixture(scope="module")
def source(model_dir):
    return open_source(model_dir("qwen3_moe"))


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    """As `quantize` writes it."""
    from verl_qerl.cli.quantize.command import quantize_checkpoint

    out = tmp_path_factory.mktemp("packed") / "qwen3_moe"
    quantize_checkpoint(source.path, out, device="cpu")
    return out


@pytest.fixture(scope="module")
def engine(start, source):
    """The bf16 directory, with room for an adapter."""
    return start(source.path, aqn={"enabled": True}, enable_lora=True, max_lora_rank=8)


@pytest.fixture(scope="module")
def packed(source):
    """What the stream makes of the bf16 directory, by module."""
    return {name: item for name, item in packed_stream(source) if isinstance(item, PackedWeight)}


@pytest.fixture(scope="module")
def dense(source):
    """The model in transformers with the weights given to it, in a dtype."""
    import transformers

    def build(weights: dict[str, PackedWeight], dtype: torch.dtype = torch.float32):
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.bfloat16).eval()
        for name, weight in weights.items():
            set_linear(model, name, dequantize(weight))
        return model.to(dtype)

    return build


@pytest.fixture(scope="module")
def truth(dense, packed, reference_log_probs):
    return reference_log_probs(dense(packed))


@pytest.fixture(scope="module")
def tolerance(dense, packed, reference_log_probs, truth):
    """Half as much again as transformers in bf16 is off: an engine rounds the same activations, in another order."""
    return 1.5 * rms_error_ratio(reference_log_probs(dense(packed, torch.bfloat16)), truth)


@pytest.fixture(scope="module")
def actor(source):
    """The model as the engine of the actor builds it."""
    pytest.importorskip("verl")
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
    from verl_qerl.verl_plugin.config.base_options import BaseOptions

    config = AutoConfig.from_pretrained(source.path)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    load_packed(
        model, build_skeleton(model, str(source.path), ("lm_head",)), str(source.path), BaseOptions(), torch.bfloat16
    )
    return model.eval()


def test_the_comparison_sees_experts_that_changed_places(tolerance, truth, dense, packed, reference_log_probs):
    def error(weights) -> float:
        return rms_error_ratio(reference_log_probs(dense(weights)), truth)

    name = "model.layers.2.mlp.experts.{}.down_proj"
    assert error({}) > 3 * tolerance
    assert error(packed | {name.format(e): packed[name.format((e + 1) % 4)] for e in range(4)}) > 3 * tolerance
    weight = packed[name.format(1)]
    twice = nvfp4_weight(weight.codes, weight.block_scale, 2 * weight.global_decode_scale)
    assert error(packed | {name.format(1): twice}) > tolerance


def test_the_engine_samples_as_the_dequantized_weights(engine, prompt_log_probs, truth, tolerance):
    assert rms_error_ratio(prompt_log_probs(engine), truth) < tolerance


def test_actor_and_rollout_agree(engine, actor, prompt_log_probs, reference_log_probs, truth, tolerance):
    found, sampled = reference_log_probs(actor), prompt_log_probs(engine)
    assert rms_error_ratio(found, truth) < tolerance
    assert rms_error_ratio(found, sampled) < tolerance


def test_an_adapter_on_the_attention(
    vllm, engine, dense, packed, prompt_log_probs, reference_log_probs, tmp_path, truth
):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=list(ADAPTED))
    model = peft.get_peft_model(dense(packed), config)
    draw_adapter(model, seed=3)
    model.save_pretrained(tmp_path)
    expected = reference_log_probs(model)
    request = vllm.lora.request.LoRARequest("attention", 1, str(tmp_path))
    found = prompt_log_probs(engine, lora_request=request)
    allowed = 1.5 * rms_error_ratio(reference_log_probs(model.bfloat16()), expected)
    assert rms_error_ratio(found, expected) < allowed < rms_error_ratio(truth, expected) / 3


def test_experts_and_router_carry_no_adapter(engine):
    def kinds(worker):
        return {name: type(module).__name__ for name, module in worker.model_runner.get_model().named_modules()}

    found = engine.collective_rpc(kinds)[0]
    adapted = {name.removesuffix(".base_layer") for name, kind in found.items() if "LoRA" in kind}
    assert {name.rpartition(".")[2] for name in adapted} == {"qkv_proj", "o_proj"}
    assert len(adapted) == 3 * 2
    assert found["model.layers.1.mlp.experts.routed_experts"] == "RoutedExperts"
    assert found["model.layers.1.mlp.gate"] == "ReplicatedLinear"


def test_the_router_stays_dense(engine):
    def methods(worker):
        mlp = worker.model_runner.get_model().model.layers[1].mlp
        return [type(module.quant_method).__name__ for module in (mlp.gate, mlp.experts.routed_experts)]

    assert engine.collective_rpc(methods)[0] == ["UnquantizedLinearMethod", "ReferenceExperts"]


def test_digests_name_every_expert(engine, packed, digests_in):
    expected = {name: weight_digest(weight) for name, weight in packed.items()}
    assert digests_in(engine) == expected
    assert sum(".experts." in name for name in expected) == 2 * 4 * 3
    name = "model.layers.2.mlp.experts.3.up_proj"
    codes = packed[name].codes.clone()
    codes[7, 3] ^= 1
    broken = nvfp4_weight(codes, packed[name].block_scale, packed[name].global_decode_scale)
    with pytest.raises(ValueError, match=rf"1 of {len(expected)} differ, first '{name}'"):
        check_same_base(expected | {name: weight_digest(broken)}, digests_in(engine))


def test_noise_on_the_norms(engine, prompt_log_probs):
    before = prompt_log_probs(engine)
    ((num_norms, _),) = engine.collective_rpc("qerl_set_noise", args=(0.05, 1))
    assert num_norms == 3 * 2
    engine.reset_prefix_cache()
    assert not torch.equal(prompt_log_probs(engine), before)
    engine.collective_rpc("qerl_set_noise", args=(0.0, 2))
    engine.reset_prefix_cache()
    assert torch.equal(prompt_log_probs(engine), before)


def test_a_layer_without_its_experts(start, quantized, tmp_path):
    folder = tmp_path / "lost"
    shutil.copytree(quantized, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.experts." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 36 parameters of Qwen3Moe.*, first 'model\.layers\.2\.mlp\.experts\.0\."
    ):
        start(folder)


def test_other_targets_of_adapters_are_refused(start, quantized):
    with pytest.raises(
        ValueError, match=r"adapters of a mixture of experts: lora_target_modules=\['experts'\]\. Accep"
    ):
        start(quantized, enable_lora=True, max_lora_rank=8, lora_target_modules=["experts"])


def test_expert_parallelism_and_other_formats_are_refused():
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from verl_qerl.vllm_plugin.weights.experts import experts_method

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=True))
    with pytest.raises(
        ValueError, match=r"^experts are spread over ranks: enable_expert_parallel=True, 'x\.experts'\."
    ):
        experts_method(layer, "x.experts")
    with pytest.raises(
        ValueError, match=r"^experts are quantized in another format: rollout=int8, 'x\.experts'\. Accepted"
    ):
        experts_method(layer, "x.experts", "int8")
    assert experts_method(torch.nn.Linear(1, 1), "x") is None
