"""Stock vLLM without our plugin runs every form of `export` on a GPU, with Marlin under the packed ones."""

from pathlib import Path

import pytest
import torch
from qerl_testing import answer_of

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

from verl_qerl.cli.export.command import export_checkpoint  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "ask_vllm.py"
CASE = "ours-nvfp4-lora"
# As on the CPU (test_export_vllm_on_cpu.py): two roundings of one function to bf16.
BOUND = 2e-2


@pytest.fixture(scope="module")
def answers(trained, models, tmp_path_factory):
    """form -> (quantization method that vLLM took, log-probs [63])."""
    out = tmp_path_factory.mktemp("exports")
    cases = []
    for form in ("peft", "base-and-adapter", "merged-bf16", "merged-nvfp4", "modelopt"):
        export_checkpoint(trained(CASE).actor, out / form, form)
        loras = {"peft": str(out / form), "base-and-adapter": str(out / form / "adapter")}
        model, lora = models / "nvfp4" if form == "peft" else out / form, loras.get(form)
        options = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30}
        cases.append({"name": form, "model": str(model), "lora": lora, "reference_kernel": False, "options": options})
    found = {}
    for case in cases:  # a process each: an engine gives its memory back only when it ends
        found |= answer_of(SCRIPT, [case], VLLM_PLUGINS="none")[0]
    return {name: (method, torch.tensor(values)) for name, (method, values) in found.items()}


@pytest.mark.parametrize("form", ["peft", "base-and-adapter", "merged-bf16"])
def test_log_probs_are_the_trainers(trained, answers, form):
    assert (answers[form][1] - trained(CASE).found["log_probs"]).abs().mean() < BOUND


def test_both_quantized_forms_compute_the_same(answers):
    # Both W4A16: the same Marlin kernel on the same bits.
    assert [answers[form][0] for form in ("merged-nvfp4", "modelopt")] == ["compressed-tensors", "modelopt_fp4"]
    assert torch.equal(answers["merged-nvfp4"][1], answers["modelopt"][1])


def test_the_quantized_forms_cost_what_they_cost_on_a_cpu(trained, answers):
    cost = (answers["modelopt"][1] - trained(CASE).found["log_probs"]).abs().mean()
    assert 0.02 < cost < 0.3
