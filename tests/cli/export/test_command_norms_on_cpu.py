"""Exports of checkpoints whose norms were trained, against the log-probs of the engine that trained them."""

import json
import shutil

import pytest

pytest.importorskip("verl")

import torch
from peft import PeftModel
from qerl_testing import TOKENS, log_probs
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli import main
from verl_qerl.cli.export.command import export_checkpoint
from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.errors import CheckpointFormatError

CASES = ("norms-nvfp4-lora", "norms-bf16-full")
KINDS = ("input_layernorm", "post_attention_layernorm")
NORMS = [f"model.layers.{index}.{kind}" for index in range(2) for kind in KINDS]


def shifts(found) -> dict[str, torch.Tensor]:
    """Norm -> what the engine held."""
    prefix, suffix = "base_model.model.", ".modules_to_save.default.adapter_shift"
    named = found.found["adapter"].items()
    return {
        name.removeprefix(prefix).removesuffix(suffix): shift for name, shift in named if name.endswith("adapter_shift")
    }


def weights(path) -> dict[str, torch.Tensor]:
    source = open_source(path)
    items = source.tensors() if source.layout == "bf16" else packed_stream(source)
    return {name: item for name, item in items if isinstance(item, torch.Tensor)}


def distance(path, expected: torch.Tensor, adapter=None) -> float:
    """Of the model at `path`, on which an adapter is put if there is one."""
    # PEFT has no layer for compressed-tensors' own, and transformers does not convert what was packed.
    options = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if adapter else {}
    dtype = torch.bfloat16 if adapter else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **options)
    model = (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()
    return (log_probs(model, TOKENS) - expected).abs().mean().item()


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_holds_what_the_norms_have_learned(trained, case):
    found = trained(case)
    checkpoint = open_checkpoint(found.actor)
    assert list(checkpoint.norms) == NORMS
    for name, shift in shifts(found).items():
        assert torch.equal(checkpoint.norms[name], shift)
        assert (shift.dtype, bool(shift.any())) == (torch.float32, True)
    assert checkpoint.record.trained_norms == KINDS
    assert ("model.layers.0.input_layernorm.weight" in checkpoint.others) == case.endswith("full")


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_has_them_and_computes_like_the_trainer(trained, tmp_path, case, capsys):
    found = trained(case)
    out, without = tmp_path / "merged", tmp_path / "without"
    arguments = ["export", "--checkpoint", str(found.actor), "--out", str(out), "--to", "merged-bf16"]
    assert main([*arguments, "--device", "cpu"]) == 0
    report = json.loads((out / "export_report.json").read_text())
    base, merged = weights(found.base), weights(out)
    for name, shift in shifts(found).items():
        expected = base[f"{name}.weight"].float() + shift
        assert torch.equal(merged[f"{name}.weight"], expected.bfloat16())
        assert report["norms"][name]["update"] == pytest.approx(shift.norm().item())
        lost = (expected - expected.bfloat16().float()).norm().item()
        assert report["norms"][name]["lost_in_bf16"] == pytest.approx(lost)
    assert sorted(report["changed_besides_the_adapter"]) == sorted(f"{name}.weight" for name in NORMS)
    share = sum(norm["lost_in_bf16"] for norm in report["norms"].values())
    share /= sum(norm["update"] for norm in report["norms"].values())
    assert f"4 trained norms; rounding them to bf16 loses {share:.2f} of their update" in capsys.readouterr().out
    # The same model with the norms of the base is far off.
    shutil.copytree(out, without)
    put_back(without, base)
    trainer = found.found["log_probs"]
    assert distance(out, trainer) < 0.2 * distance(without, trainer)


def put_back(folder, base) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {f"{name}.weight": base[f"{name}.weight"] for name in NORMS if f"{name}.weight" in tensors}
        save_file(tensors, file, {"format": "pt"})


def test_the_base_has_them_and_the_adapter_is_beside_it(trained, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    found, out = trained(CASES[0]), tmp_path / "served"
    arguments = ["export", "--checkpoint", str(found.actor), "--out", str(out), "--to", "base-and-adapter"]
    assert main([*arguments, "--device", "cpu"]) == 0
    assert "4 trained norms" in capsys.readouterr().out
    base = dict(packed_stream(open_source(found.base)))
    for name, item in packed_stream(open_source(out)):
        if name.removesuffix(".weight") in NORMS:
            assert torch.equal(item, (base[name].float() + shifts(found)[name.removesuffix(".weight")]).bfloat16())
        elif isinstance(item, torch.Tensor):
            assert torch.equal(item, base[name])
        else:
            assert weight_digest(item) == weight_digest(base[name])
        del base[name]
    assert not base
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(out)
    apart = [distance(folder, found.found["log_probs"], out / "adapter") for folder in (out, found.base)]
    assert apart[0] < 0.2 * apart[1]


@pytest.mark.parametrize("form", ["merged-nvfp4", "modelopt"])
def test_quantized_forms_have_them(trained, tmp_path, form):
    found = trained(CASES[0])
    export_checkpoint(found.actor, tmp_path / "out", form, device="cpu")
    base, exported = weights(found.base), weights(tmp_path / "out")
    for name, shift in shifts(found).items():
        assert torch.equal(exported[f"{name}.weight"], (base[f"{name}.weight"].float() + shift).bfloat16())


def test_an_adapter_cannot_hold_them(trained, tmp_path):
    with pytest.raises(
        ValueError, match=r"^an adapter cannot hold trained norms, .*: 4 norms in .* Use --to base-and-adapter\."
    ):
        export_checkpoint(trained(CASES[0]).actor, tmp_path / "out", "peft")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_lost_them_is_refused(trained, tmp_path):
    def drop(shard):
        for name in [name for name in shard if name.endswith("adapter_shift")]:
            del shard[name]

    with pytest.raises(CheckpointFormatError, match=r"0 norms are trained, of \['input_layernorm', 'post_attention_"):
        open_checkpoint(trained(CASES[0]).edited(tmp_path / "actor", drop))


def test_values_that_are_no_numbers_are_refused(trained, tmp_path):
    def spoil(shard):
        name = next(name for name in shard if name.endswith("adapter_shift"))
        shard[name].to_local().fill_(float("nan"))

    with pytest.raises(CheckpointFormatError, match=r"what 'model\.layers\.\d\.input_layernorm' has learned holds NaN"):
        open_checkpoint(trained(CASES[0]).edited(tmp_path / "actor", spoil))


def test_a_base_without_their_place_is_refused(trained, models, tmp_path):
    name = "base_model.model.model.layers.9.input_layernorm.modules_to_save.default.adapter_shift"
    actor = trained(CASES[0]).edited(tmp_path / "actor", lambda shard: shard.update({name: torch.ones(128)}))
    with pytest.raises(CheckpointFormatError, match=r"trains the norm 'model\.layers\.9\.input_layernorm' of \(128,"):
        export_checkpoint(actor, tmp_path / "out", "merged-bf16")
