"""A mixture of experts on a GPU: vLLM's own kernel (Marlin), stock and under our loader, against transformers."""

import json

import pytest
import torch
from qerl_testing import log_probs, random_qwen3_moe, set_linear

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

LENGTHS = (100, 300)
SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

def main():
    options, adapter = json.loads(sys.argv[2]), sys.argv[3]
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, max_num_seqs=8, gpu_memory_utilization=0.02,
              kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True, enable_prefix_caching=False, **options)

    def ask(lora):
        params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        found = {}
        for length in (100, 300):
            ids = [(7 * i + 3) % 1000 for i in range(length)]
            (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False, lora_request=lora)
            log_probs = [entry[i].logprob for i, entry in zip(ids[1:], out.prompt_logprobs[1:])]
            found[length] = [log_probs, list(out.outputs[0].token_ids)]
        return found

    seen = {"base": ask(None)}
    if adapter:
        seen |= {"adapter": ask(LoRARequest("adapter", 1, adapter)), "again": ask(None)}
    layer = llm.collective_rpc(lambda worker: [
        [type(m).__name__, type(m.quant_method).__name__, m.quant_method.nvfp4_backend.value]
        for m in worker.model_runner.get_model().modules() if type(m).__name__ == "RoutedExperts"
    ])[0]
    wrapped = llm.collective_rpc(lambda worker: sorted({
        name.rpartition(".")[2] for name, m in worker.model_runner.get_model().named_modules()
        if "LoRA" in type(m).__name__ and name.count(".") > 2
    }))[0]
    print("RESULT", json.dumps([seen, layer, wrapped]))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder with bf16, nvfp4 and adapter; name -> length -> log-probs of transformers)."""
    import peft

    from verl_qerl.checkpoints.experts import ADAPTED
    from verl_qerl.checkpoints.source import open_source
    from verl_qerl.checkpoints.stream import packed_stream
    from verl_qerl.cli.quantize.command import quantize_checkpoint
    from verl_qerl.formats.reference import dequantize

    folder = tmp_path_factory.mktemp("models")
    model = random_qwen3_moe(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=192,
        num_experts=8,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1023,
    )
    model.save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4")
    for name, item in packed_stream(open_source(folder / "nvfp4")):
        if not isinstance(item, torch.Tensor):
            set_linear(model, name, dequantize(item))
    model = model.float().cuda()
    found = {"base": reference_log_probs(model), "base in bf16": reference_log_probs(model.bfloat16())}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules=list(ADAPTED))
    adapted = peft.get_peft_model(model.float(), config)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.data = (torch.randn_like(parameter) * 0.05).bfloat16().float()
    adapted.save_pretrained(folder / "adapter")
    found["adapter"] = reference_log_probs(adapted)
    found["adapter in bf16"] = reference_log_probs(adapted.bfloat16())
    return folder, found


def reference_log_probs(model) -> dict[int, torch.Tensor]:
    found = {}
    for length in LENGTHS:
        ids = torch.tensor([[(7 * i + 3) % 1000 for i in range(length)]], device="cuda")
        found[length] = log_probs(model, ids).cpu()
    return found


def error(found, expected: torch.Tensor) -> float:
    """Root mean square over nine tenths of the tokens: rounding sends single ones to other experts."""
    squares = (torch.as_tensor(found, dtype=torch.float64) - expected).pow(2).sort().values
    return float(squares[: len(squares) * 9 // 10].mean().sqrt())


def test_marlin_computes_with_the_decoded_experts_stock_and_ours(models, run_script):
    from verl_qerl.formats import NVFP4

    folder, expected = models
    # Once with CUDA graphs, adapters and the bf16 directory, once as anyone would start it.
    ours = {
        "load_format": "verl_qerl_nvfp4",
        "quantization": "verl_qerl_nvfp4",
        "hf_overrides": {"quantization_config": NVFP4().config()},
        "enable_lora": True,
        "max_lora_rank": 16,
        "worker_extension_cls": "verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
        "additional_config": {"verl_qerl": {}},
    }
    adapter = str(folder / "adapter")
    seen, layers, wrapped = run_script(SCRIPT, str(folder / "bf16"), json.dumps(ours), adapter)
    assert layers == [["RoutedExperts", "CompressedTensorsW4A4Nvfp4MoEMethod", "MARLIN"]] * 2
    assert wrapped == ["o_proj", "qkv_proj"]
    stock, layers, _ = run_script(
        SCRIPT, str(folder / "nvfp4"), json.dumps({"enforce_eager": True}), "", plugins="none"
    )
    assert layers == [["RoutedExperts", "CompressedTensorsW4A4Nvfp4MoEMethod", "MARLIN"]] * 2
    for engine, name in ((seen, "base"), (seen, "adapter"), (seen, "again"), (stock, "base")):
        reference = "base" if name == "again" else name
        for length in LENGTHS:
            found, _ = engine[name][str(length)]
            truth = expected[reference][length]
            # transformers in bf16 rounds the same activations in another order.
            rounding = error(expected[f"{reference} in bf16"][length], truth)
            assert error(found, truth) < 2.5 * rounding, (name, length)
            other = expected["adapter" if reference == "base" else "base"][length]
            assert error(found, other) > 3 * rounding, (name, length)
