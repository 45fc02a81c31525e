"""Exports of runs that trained all weights under UAQ; test_command_on_cpu.py has those with adapters."""

import json
import shutil

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import TOKENS, log_probs
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verl_qerl.algos.uaq import RECORD
from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import INDEX, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli import main
from verl_qerl.cli.export.command import export_checkpoint
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import PackedWeight


def log_probs_of(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    return log_probs(model, TOKENS)


def distance(a, b):
    return (a - b).abs().mean().item()


def exported(trained, case, form, out):
    export_checkpoint(trained(case).run / "global_step_4", out, form, device="cpu")
    return out


@pytest.mark.parametrize("case", ["uaq-bf16-all", "uaq-tied-all"])
def test_the_scaling_of_uaq_is_undone(trained, tmp_path, case):
    found = trained(case)
    out = exported(trained, case, "merged-bf16", tmp_path / "out")
    report = json.loads((out / "export_report.json").read_text())
    assert (report["uaq_scale"], report["base"], report["r"]) == (1.5, str(found.base), 0)
    tied = found.base.name == "tied"
    assert len(report["changed_besides_the_adapter"]) == (20 if tied else 27)
    merged, trained_weights = (dict(open_source(out).tensors()), found.found["adapter"])
    for name, weight in trained_weights.items():
        if tied and name == "lm_head.weight":
            continue
        leaf = name.rpartition(".")[0].rpartition(".")[2]
        norm, linear = leaf in ("input_layernorm", "post_attention_layernorm"), name.endswith("_proj.weight")
        factor = 1 / 1.5 if norm else 1.5 if linear and leaf[0] not in "od" else 1.0
        assert torch.equal(merged[name], (weight.double() * factor).float().bfloat16()), name
    # The exported model rounds its weights where the trainer rounded scaled ones; both are bf16.
    assert distance(log_probs_of(out), found.found["log_probs"]) < 2e-2
    assert distance(found.found["before"], found.found["log_probs"]) > 0.5, "training changed next to nothing"


def test_a_run_of_all_weights_without_uaq_is_merged_with_a_base_that_is_given(trained, tmp_path):
    found = trained("uaq-bf16-all")
    actor = shutil.copytree(found.actor, tmp_path / "actor")
    (actor / RECORD).unlink()
    with pytest.raises(ValueError, match=r"^the base is not found: \S+ names none\. .* Give it with --base"):
        export_checkpoint(actor, tmp_path / "out", "merged-bf16")
    report = export_checkpoint(actor, tmp_path / "out", "merged-bf16", str(found.base), device="cpu")
    assert (report["uaq_scale"], report["r"], len(report["layers"])) == (None, 0, 14)
    merged = dict(open_source(tmp_path / "out").tensors())
    assert merged.keys() == found.found["adapter"].keys()
    for name, weight in found.found["adapter"].items():
        assert torch.equal(merged[name], weight.bfloat16()), name


def test_a_base_may_hold_what_models_compute_anew(trained, tmp_path):
    found = trained("uaq-bf16-all")
    base = shutil.copytree(found.base, tmp_path / "base")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # as in meta-llama/Llama-2-7b-hf
    save_file({name: torch.ones(8)}, base / "more.safetensors")
    index = json.loads((base / INDEX).read_text())
    index["weight_map"][name] = "more.safetensors"
    (base / INDEX).write_text(json.dumps(index))
    export_checkpoint(found.actor, tmp_path / "out", "merged-bf16", str(base), device="cpu")
    merged = dict(open_source(tmp_path / "out").tensors())
    assert merged.keys() == found.found["adapter"].keys() | {name}
    assert distance(log_probs_of(tmp_path / "out"), found.found["log_probs"]) < 2e-2


def test_a_run_of_all_weights_is_quantized_or_refused(trained, tmp_path, capsys):
    case = "uaq-bf16-all"
    out = exported(trained, case, "merged-nvfp4", tmp_path / "nvfp4")
    report = json.loads((out / "export_report.json").read_text())
    assert len(report["layers"]) == 14
    assert all(0 < layer["relative_update"] < 1 for layer in report["layers"].values())
    quantize_checkpoint(exported(trained, case, "merged-bf16", tmp_path / "bf16"), tmp_path / "expected", device="cpu")
    expected = dict(packed_stream(open_source(tmp_path / "expected")))
    for name, item in packed_stream(open_source(out)):
        if isinstance(item, PackedWeight):
            assert weight_digest(item) == weight_digest(expected[name])
    with pytest.raises(ValueError, match=r"^the checkpoint holds no adapter: .* Use --to merged-bf16\.$"):
        export_checkpoint(trained(case).actor, tmp_path / "out", "peft")
    command = ["export", "--checkpoint", str(trained(case).actor), "--out", str(tmp_path / "again")]
    assert main([*command, "--to", "merged-bf16"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("all weights: 14 linears; base not packed")
    assert "the scaling of UAQ, 1.5, is undone" in told
    with pytest.raises(
        CheckpointFormatError, match=r"^the checkpoint does not fit the base: it holds 'model\..*q_proj\.bias'"
    ):
        export_checkpoint(trained(case).actor, tmp_path / "out", "merged-bf16", str(trained("ours-tied-full").base))
