"""Engines on a base in int8, fp8 or mxfp4 with an adapter; NVFP4: test_loader_on_cpu.py and test_lora_on_cpu.py."""

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("peft")

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import PackedWeight, get_format
from verl_qerl.formats.reference import dequantize

FORMS = ("fp8", "int8", "mxfp4")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Mean |log p(rollout) - log p(actor)|, the actor in bf16 with its adapter. Between rollout and actor lie the roundings
# of bf16 arithmetic, and in int8 and fp8 those of the rollout's activations and of the actor's dense weights. Measured:
# 0.034, 0.012 and 0.006, where the adapter moves them by 0.32.
BOUNDS = {"fp8": 0.045, "int8": 0.016, "mxfp4": 0.009}


def weights(folder, name):
    items = packed_stream(open_source(folder), get_format(name))
    return {module: item for module, item in items if isinstance(item, PackedWeight)}


@pytest.fixture(scope="module")
def packed_dirs(model_dir, tmp_path_factory):
    from verl_qerl.cli.quantize.command import quantize_checkpoint

    out = tmp_path_factory.mktemp("packed")
    for name in FORMS:
        quantize_checkpoint(model_dir("qwen2"), out / name, form=name, device="cpu")
    return out


@pytest.fixture(scope="module", params=FORMS)
def case(request, start, model_dir):
    """(format, engine over the bf16 model with noise and room for an adapter)."""
    options = {"enable_lora": True, "max_lora_rank": 8}
    return request.param, start(model_dir("qwen2"), aqn={"enabled": True}, form=request.param, **options)


def actor_log_probs(folder, name, adapter, reference_log_probs):
    """Of the model with the dense bf16 weights that the actor multiplies by."""
    import transformers
    from peft import PeftModel

    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for module, weight in weights(folder, name).items():
        model.get_submodule(module).weight.data = dequantize(weight)
    return reference_log_probs(PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False))


def test_it_holds_the_bits_and_computes_as_the_actor(
    vllm, case, packed_dirs, start, model_dir, write_adapter, prompt_log_probs, digests_in, reference_log_probs
):
    name, engine = case
    expected = {module: weight_digest(one) for module, one in weights(model_dir("qwen2"), name).items()}
    assert len(expected) == 14
    assert digests_in(engine) == expected
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    assert sum(type(layer).__name__.startswith("Single") for layer in model.modules()) == 8  # our path for one adapter

    folder = write_adapter("trained", LINEARS, 8)
    request = vllm.lora.request.LoRARequest("trained", 5, str(folder))
    base, found = prompt_log_probs(engine), prompt_log_probs(engine, lora_request=request)
    actor = actor_log_probs(model_dir("qwen2"), name, folder, reference_log_probs)
    difference = float((found - actor).abs().mean())
    assert difference < BOUNDS[name]
    assert (found - base).abs().mean() > 5 * difference  # an adapter that did not arrive

    packed = start(packed_dirs / name, aqn={"enabled": True}, form=name)
    assert digests_in(packed) == expected
    assert torch.equal(prompt_log_probs(packed), base)


def test_noise_changes_log_probs_and_zero_restores_them(case, prompt_log_probs):
    _, engine = case

    def set_noise(sigma):
        ((num_norms, _),) = engine.collective_rpc("qerl_set_noise", args=(sigma, 1))
        assert num_norms == 4
        assert engine.reset_prefix_cache()

    clean = prompt_log_probs(engine)
    set_noise(1e-2)
    assert torch.count_nonzero(prompt_log_probs(engine) - clean) > 150
    set_noise(0.0)
    assert torch.equal(prompt_log_probs(engine), clean)


def test_a_directory_in_another_format_is_refused(start, packed_dirs):
    with pytest.raises(CheckpointFormatError, match="in another format: int8, and fp8 is asked for"):
        start(packed_dirs / "int8", form="fp8", hf_overrides={"quantization_config": get_format("fp8").config()})
