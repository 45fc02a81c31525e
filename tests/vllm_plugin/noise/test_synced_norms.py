"""Norms that a sync brings, under CUDA graphs and in sleep mode, which only a GPU has."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
import torch
from sleeping_engine import decode, noise, norms, same, start

def main():
    llm = start(sys.argv[1], {"train_norms": True, "aqn": {"enabled": True}})

    def sync(size):
        def place(worker):
            held = worker._qerl_norms
            generator = torch.Generator().manual_seed(0)
            shifts = {
                name: (torch.randn(one.numel(), 1, generator=generator) * size).to(worker.device, torch.bfloat16)
                for name, one in sorted(held._base.items())
            }
            held.check(shifts)
            held.place(shifts)
            return len(shifts)
        return llm.collective_rpc(place)[0]

    clean, clean_norms = decode(llm), norms(llm)
    seen = {"num_norms": sync(1e-3)}
    seen["small_change_acts"] = decode(llm) != clean
    sync(0.1)
    trained, trained_norms = decode(llm), norms(llm)
    seen["change_acts"] = trained != clean and not same(trained_norms, clean_norms)
    noise(llm, 1e-2, 2)
    noisy = decode(llm)
    seen["noise_on_top_acts"] = noisy != trained
    llm.sleep(level=1)
    noise(llm, 1e-2, 2)
    llm.wake_up(tags=["weights"])
    sync(0.1)  # as verl syncs
    llm.wake_up(tags=["kv_cache"])
    seen["the_sync_keeps_the_noise"] = decode(llm) == noisy
    noise(llm, 0.0, 0)
    seen["trained_norms_come_back"] = decode(llm) == trained and same(norms(llm), trained_norms)
    sync(0.0)
    seen["the_base_comes_back"] = decode(llm) == clean and same(norms(llm), clean_norms)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_synced_norms_act_under_cuda_graphs_and_survive_sleep(random_qwen2, run_script):
    seen = run_script(SCRIPT, str(random_qwen2))
    assert seen.pop("num_norms") == 8
    assert all(seen.values()), seen
