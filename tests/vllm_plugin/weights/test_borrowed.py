"""An engine over the memory of another process on a GPU: CUDA IPC, graphs, sleep, and the end of its owner."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

SCRIPT = """
import json, os, signal, sys, time
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from verl_qerl.formats import NVFP4
from verl_qerl.vllm_plugin.weights.borrowed import borrowed_by

def look(worker):
    model = worker.model_runner.get_model()
    borrowed, linears = borrowed_by(model), [m for m in model.modules() if hasattr(m, "qerl_plan")]
    flat = borrowed.base.flat
    mapped = all(m.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for m in linears)
    return {"pid": borrowed.pid, "linears": len(linears), "sum": int(flat.long().sum()), "mapped": mapped}

def main(path, adapter, shared):
    llm = LLM(path, dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30,
              skip_tokenizer_init=True, enable_sleep_mode=True, enable_lora=True, max_loras=1, max_lora_rank=16,
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4",
              hf_overrides={"quantization_config": NVFP4().config()},
              model_loader_extra_config={"scale": "minmax", "share_base": shared},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
              additional_config={"verl_qerl": {"aqn": {"enabled": True}}})
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)

    def ask():
        assert llm.reset_prefix_cache()
        prompt = [{"prompt_token_ids": [(7 * i + 3) % 1000 for i in range(200)]}]
        out = llm.generate(prompt, params, use_tqdm=False, lora_request=LoRARequest("one", 1, adapter))[0]
        return [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]

    seen = {"before": ask()}
    if shared:
        seen["look"] = llm.collective_rpc(look)[0]
    llm.sleep(level=1)
    if shared:
        seen["asleep"] = llm.collective_rpc(look)[0]
    llm.wake_up()
    seen["after"] = ask()
    if shared:
        os.kill(seen["look"]["pid"], signal.SIGKILL)
        until = time.monotonic() + 60  # the driver takes a killed process apart, which lives meanwhile
        while "error" not in seen and time.monotonic() < until:
            try:
                ask()
            except RuntimeError as error:
                seen["error"] = str(error)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
"""


def test_one_copy_of_the_base_survives_sleep_and_ends_with_its_owner(
    lend, random_qwen2, random_adapter, run_script, monkeypatch
):
    monkeypatch.setenv("VERL_RAY_JOB_ID", "gpu")
    adapter = str(random_adapter(1))
    alone = run_script(SCRIPT, str(random_qwen2), adapter, "false")
    lend(random_qwen2, "gpu")
    shared = run_script(SCRIPT, str(random_qwen2), adapter, "true")
    assert (shared["look"]["linears"], shared["look"]["mapped"]) == (16, True)
    assert shared["asleep"] == shared["look"]
    assert shared["before"] == shared["after"] == alone["before"]
    assert shared["error"].startswith(f"the actor that owns the packed base has ended: process {shared['look']['pid']}")
