"""What an engine computes with, against transformers with the dequantized weights."""

from types import SimpleNamespace

import pytest
import torch
from qerl_testing import assert_close, draw_adapter, rms_error_ratio

pytest.importorskip("vllm")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def truth(reference_model, reference_log_probs):
    """Of the dequantized model in float32."""
    return reference_log_probs(reference_model())


@pytest.fixture(scope="module")
def tolerance(reference_model, reference_log_probs, truth):
    """Half as much again as transformers in bf16 is off: an engine rounds the same activations, in another order."""
    return 1.5 * rms_error_ratio(reference_log_probs(reference_model(dtype=torch.bfloat16)), truth)


@pytest.fixture(scope="module")
def adapter(reference_model, tmp_path_factory):
    """(PEFT model in float32 on the dequantized base, directory of its adapter)."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=LINEARS)
    model = peft.get_peft_model(reference_model(), config)
    draw_adapter(model, seed=3)  # bf16 values, as the engine holds them
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return model, folder


def test_the_tolerance_tells_quantized_from_original(tolerance, truth, reference_model, reference_log_probs):
    assert rms_error_ratio(reference_log_probs(reference_model(scale=None)), truth) > 10 * tolerance
    assert rms_error_ratio(reference_log_probs(reference_model(scale="mse")), truth) > 3 * tolerance


def test_a_bf16_source_is_sampled_as_its_dequantized_weights(engine, prompt_log_probs, truth, tolerance):
    assert rms_error_ratio(prompt_log_probs(engine), truth) < tolerance


def test_an_nvfp4_directory_is_sampled_as_the_source_it_comes_from(engine, packed_engine, prompt_log_probs):
    assert torch.equal(prompt_log_probs(packed_engine), prompt_log_probs(engine))


def test_generated_tokens_have_the_same_log_probs_as_a_prompt(engine, generate, prompt, reference_model, tolerance):
    steps, _ = generate(engine)
    tokens, log_probs = (torch.tensor(column) for column in zip(*steps, strict=True))
    with torch.no_grad():
        logits = reference_model()(input_ids=torch.cat((torch.tensor(prompt), tokens))[None]).logits[0, 199:-1]
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    # Four numbers, not 199: their RMS error scatters.
    assert_close(log_probs, expected, 3 * tolerance)


def test_an_adapter_on_all_linears_acts_as_in_peft(
    vllm, engine, adapter, prompt_log_probs, reference_log_probs, truth, tolerance
):
    model, folder = adapter
    request = vllm.lora.request.LoRARequest("tuned", 1, str(folder))
    expected = reference_log_probs(model)
    assert rms_error_ratio(expected, truth) > 10 * tolerance
    assert rms_error_ratio(prompt_log_probs(engine, lora_request=request), expected) < tolerance
    assert rms_error_ratio(prompt_log_probs(engine), truth) < tolerance


def test_every_decoder_linear_holds_the_dequantized_weight(engine, reference_model):
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    reference = reference_model(dtype=torch.bfloat16)
    for index, layer in enumerate(reference.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        expected = {
            "self_attn.qkv_proj": [attention.q_proj, attention.k_proj, attention.v_proj],
            "self_attn.o_proj": [attention.o_proj],
            "mlp.gate_up_proj": [mlp.gate_proj, mlp.up_proj],
            "mlp.down_proj": [mlp.down_proj],
        }
        for name, linears in expected.items():
            found = model.get_submodule(f"model.layers.{index}.{name}")
            dense = torch.cat([linear.weight.data for linear in linears])
            assert torch.equal(getattr(found, "base_layer", found).weight.data, dense), name


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        (70, []),
        (75, ["int8", "nvfp4"]),
        (80, ["int8", "mxfp4", "nvfp4"]),
        (90, ["fp8", "int8", "mxfp4", "nvfp4"]),
        (100, ["fp8", "mxfp4", "nvfp4"]),
        (120, ["fp8", "mxfp4", "nvfp4"]),
    ],
)
def test_a_gpu_without_a_format_is_told_what_it_has(capability, able):
    from verl_qerl.vllm_plugin.weights.quantization import why_not_on

    for form in ("fp8", "int8", "mxfp4", "nvfp4"):
        found = why_not_on(capability, form)
        if form in able:
            assert found is None
        else:
            expected = (
                f"this GPU cannot run the format: rollout={form}, compute capability {capability / 10}. It can run "
            )
            assert found == f"{expected}{', '.join(able) or 'bf16 only'}. Choose one of them."


def test_a_format_the_gpu_lacks_stops_the_engine(monkeypatch):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from verl_qerl.formats import get_format
    from verl_qerl.vllm_plugin.weights.quantization import CONFIGS

    monkeypatch.setattr(current_platform, "get_device_capability", lambda: DeviceCapability(10, 0))
    config = CONFIGS["verl_qerl_int8"].from_config(get_format("int8").config())
    scheme = config.target_scheme_map["Linear"]
    with pytest.raises(ValueError, match=r"rollout=int8, compute capability 10\.0\. It can run fp8, mxfp4, nvfp4\."):
        config._get_scheme_from_parts(scheme["weights"], scheme["input_activations"])


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_eight_bits_are_computed_by_vllm_on_a_gpu_and_by_the_reference_on_a_cpu(monkeypatch, form, is_cpu):
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    from verl_qerl.formats import get_format
    from verl_qerl.vllm_plugin.weights import quantization, reference_kernels

    stock = {"int8": schemes.CompressedTensorsW8A8Int8, "fp8": schemes.CompressedTensorsW8A8Fp8}[form]
    monkeypatch.setattr(quantization.current_platform, "is_cpu", lambda: is_cpu)
    monkeypatch.setattr(stock, "__init__", lambda self, *args, **given: vars(self).update(given, args=args))
    monkeypatch.setattr(quantization.RolloutConfig, "_check_scheme_supported", lambda *_, **__: True)
    config = quantization.CONFIGS[f"verl_qerl_{form}"].from_config(get_format(form).config())
    scheme = config.target_scheme_map["Linear"]
    made = config._get_scheme_from_parts(scheme["weights"], scheme["input_activations"], format=scheme.get("format"))
    assert type(made) is (reference_kernels.W8A8Reference if is_cpu else stock)
    if form == "int8" and not is_cpu:
        assert (made.strategy, made.is_static_input_scheme, made.input_symmetric) == ("channel", False, True)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Schemes as they are made on Hopper, in an engine with a linear_backend; vLLM's own kernel is `stock`."""
    from verl_qerl.vllm_plugin.log import say_once
    from verl_qerl.vllm_plugin.weights import quantization

    say_once.cache_clear()
    monkeypatch.setattr(quantization.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(
        quantization.CompressedTensorsW4A4Fp4, "__init__", lambda self, **_: vars(self).update(kernel="stock")
    )
    monkeypatch.setattr(quantization, "why_not", lambda: None)
    monkeypatch.setattr(quantization, "W4A16Kernel", lambda config: "tiled")

    def engine(backend: str):
        config = SimpleNamespace(additional_config={}, kernel_config=SimpleNamespace(linear_backend=backend))
        monkeypatch.setattr(quantization, "get_current_vllm_config_or_none", lambda: config)
        return quantization

    return engine


def test_linears_stay_on_marlin_where_the_user_names_it(on_a_gpu):
    assert on_a_gpu("auto").W4A16NVFP4().kernel == "tiled"
    assert on_a_gpu("marlin").W4A16NVFP4().kernel == "stock"


@pytest.mark.parametrize("form", ["NVFP4", "MXFP4"])
@pytest.mark.parametrize(
    ("backend", "invariant", "asked"),
    [("cutlass", False, "linear_backend='cutlass'"), ("auto", True, "VLLM_BATCH_INVARIANT=1")],
)
def test_kernels_for_other_activations_are_refused(vllm, on_a_gpu, monkeypatch, form, backend, invariant, asked):
    monkeypatch.setitem(vars(vllm.envs), "VLLM_BATCH_INVARIANT", invariant)
    with pytest.raises(
        ValueError, match=rf"^{form} weights under bf16 activations cannot run as vLLM was told: {asked}\."
    ):
        getattr(on_a_gpu(backend), f"W4A16{form}")()


def test_takes_a_compressed_tensors_checkpoint_only_when_asked_by_name():
    from verl_qerl.vllm_plugin.weights.quantization import CONFIGS

    stored = {"quant_method": "compressed-tensors"}
    assert CONFIGS["verl_qerl_nvfp4"].override_quantization_method(stored, "verl_qerl_nvfp4") == "verl_qerl_nvfp4"
    assert CONFIGS["verl_qerl_nvfp4"].override_quantization_method(stored, None) is None
    assert CONFIGS["verl_qerl_nvfp4"].override_quantization_method(stored, "compressed-tensors") is None
