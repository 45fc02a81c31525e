"""Everything of ours on two ranks of one engine: loader, linears, one adapter, its place in the buffers, noise."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCRIPT = Path(__file__).with_name("parallel_cases.py").read_text()


@pytest.fixture(scope="module")
def adapters(write_adapter):
    return [write_adapter(name, LINEARS, rank) for name, rank in (("one", 8), ("two.", 4))]


@pytest.fixture(scope="module")
def alone(vllm, engine, adapters, prompt_log_probs):
    """What one rank computes."""
    requests = [vllm.lora.request.LoRARequest(path.name, 700 + i, str(path)) for i, path in enumerate(adapters)]
    engine.reset_prefix_cache()
    found = {"base": prompt_log_probs(engine)}
    found |= {
        name: prompt_log_probs(engine, lora_request=one) for name, one in zip(("one", "two"), requests, strict=True)
    }
    engine.collective_rpc("qerl_set_noise", args=(5e-2, 3))
    engine.reset_prefix_cache()
    found["noisy"] = prompt_log_probs(engine, lora_request=requests[1])
    engine.collective_rpc("qerl_set_noise", args=(0.0, 0))
    engine.reset_prefix_cache()
    return found


def test_two_ranks_compute_what_one_computes(run_script, model_dir, adapters, alone, prompt):
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "model_loader_extra_config": {"scale": "minmax"}}
    ours = {"aqn": {"enabled": True}, "lora": "single"}
    arguments = (*map(str, adapters), json.dumps(prompt), json.dumps(options), json.dumps(ours))
    seen = run_script(SCRIPT, str(model_dir("qwen2")), *arguments)
    assert (
        seen["kinds"]
        == [
            [
                "SingleMergedColumnParallelLinearWithLoRA",
                "SingleMergedQKVParallelLinearWithLoRA",
                "SingleRowParallelLinearWithLoRA",
            ]
        ]
        * 2
    )
    assert len(seen["digests"][0]) == 14
    assert seen["digests"][0] == seen["digests"][1]
    assert seen["counts"] == [[8, 0], [8, 0]]
    first, second = seen["norms"]
    assert first == second  # the checksum too
    assert first[0] == 4
    assert seen["two"] == seen["loaded"]
    assert seen["quiet"] == seen["two"]
    found = {name: torch.tensor(seen[name], dtype=torch.float64) for name in ("base", "one", "two", "noisy")}
    # A row-parallel product is rounded on each rank and their sum again.
    error = {name: float((found[name] - alone[name]).abs().mean()) for name in found}
    moved = {name: float((alone[name] - alone["base"]).abs().mean()) for name in ("one", "two")}
    noise = float((alone["noisy"] - alone["two"]).abs().mean())
    assert max(error.values()) < 0.01, error
    assert min(*moved.values(), noise) > 0.04, (moved, noise)
