"""Linears of an engine on a CPU against the arithmetic of their format; NVFP4's are in test_quantization_on_cpu.py."""

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from qerl_testing import assert_close, rms_error_ratio

from verl_qerl.formats import get_format
from verl_qerl.formats.reference import dequantize


@pytest.mark.parametrize("name", ["int8", "fp8", "mxfp4"])
def test_linears_compute_what_the_format_says(name, start, model_dir):
    form = get_format(name)
    stored = load_file(model_dir("qwen2") / "model.safetensors")
    (model,) = start(model_dir("qwen2"), form=name).collective_rpc(lambda worker: worker.model_runner.get_model())
    generator = torch.Generator().manual_seed(0)
    for module, members in (
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.down_proj", ("mlp.down_proj",)),
    ):
        linear = model.get_submodule(f"model.layers.1.{module}")
        x = torch.randn(3, 5, linear.input_size, generator=generator).bfloat16()
        bias = torch.randn(linear.output_size, generator=generator).bfloat16()
        weights = [form.quantize(stored[f"model.layers.1.{member}.weight"]) for member in members]
        dense = torch.cat([dequantize(weight, torch.float32) for weight in weights])
        found = linear.quant_method.apply(linear, x, bias)
        assert (found.shape, found.dtype) == ((3, 5, linear.output_size), torch.bfloat16)
        whole = x.float() @ dense.t() + bias.float()
        rows = x.view(15, -1)
        rounded = dequantize(form.quantize(rows), torch.float32).view(x.shape)  # a scale a token
        expected = rounded @ dense.t() + bias.float() if form.quantizes_activations else whole
        assert_close(found.float(), expected, 3e-3)  # bf16's rounding of the result: 1.7e-3
        assert linear.quant_method.apply(linear, x[:, :0], bias).shape == (3, 0, linear.output_size)
        if form.quantizes_activations:
            assert rms_error_ratio(found.float(), whole) > 2 * rms_error_ratio(found.float(), expected)
