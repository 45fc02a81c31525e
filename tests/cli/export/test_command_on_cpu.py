"""Exports of real checkpoints, loaded by transformers and PEFT, against the log-probs of the engine that trained."""

import json
import re

import pytest

pytest.importorskip("verl")

import torch
from peft import PeftModel
from qerl_testing import TOKENS, log_probs, quantize, set_linear
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source, read_specs
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli import main, model_dir
from verl_qerl.cli.export.command import FORMS, export_checkpoint
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.reference import dequantize, relative_error
from verl_qerl.modules.adapted_linear import fuse_adapters

CASE, EXPERTS = "ours-nvfp4-lora", "ours-moe-lora"
LINEARS = [
    f"model.layers.{i}.{name}_proj"
    for i in range(2)
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
]


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory):
    """(case, form) -> directory."""
    made = {}

    def get(case, form):
        if (case, form) not in made:
            out = tmp_path_factory.mktemp("exports") / f"{case}-{form}"
            base = str(trained(case).base) if case.startswith("stock") else None
            export_checkpoint(trained(case).run / "global_step_4", out, form, base, device="cpu")
            made[case, form] = out
        return made[case, form]

    return get


def load(path, dtype=torch.bfloat16, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **options).eval()


def with_weights(path, packed_path, scale="mse"):
    """The model at `path` with the NVFP4 weights of another directory, dense in bf16."""
    model = load(path)
    for name, item in packed_stream(open_source(packed_path), NVFP4(scale=scale)):
        if isinstance(item, PackedWeight):
            set_linear(model, name, dequantize(item))
    return model


def distance(a, b):
    return (a - b).abs().mean().item()


def exact_log_probs(trained, exported, case):
    """Base and adapter as they are, in float32."""
    found = trained(case)
    model = load(found.base) if case.startswith("stock") else with_weights(models_of(found), found.base, "minmax")
    return log_probs(PeftModel.from_pretrained(model.float(), exported(case, "peft")), TOKENS)


def models_of(found):
    """A directory that transformers reads as bf16, of the same sizes as the base."""
    return found.base.parent / ("bf16" if found.base.name == "nvfp4" else found.base.name)


@pytest.mark.parametrize(
    "case", [CASE, "ours-bf16-full", "ours-tied-full", EXPERTS]
)  # stock verl rounds its rotary tables too
def test_the_adapter_in_peft_is_the_trainers_model_to_the_bit(trained, exported, case):
    found = trained(case)
    model = PeftModel.from_pretrained(with_weights(models_of(found), found.base, "minmax"), exported(case, "peft"))
    loaded = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert loaded.keys() == found.found["adapter"].keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, found.found["adapter"][name].float())  # PEFT holds adapters in float32
        parameter.data = parameter.data.bfloat16()  # FSDP2 computes with bf16
    fuse_adapters(model)  # as the trainer adds them up
    assert torch.equal(log_probs(model, TOKENS), found.found["log_probs"])


def test_the_adapter_loads_on_the_nvfp4_base_in_transformers(trained, exported):
    pytest.importorskip("compressed_tensors")
    unpacked = CompressedTensorsConfig(run_compressed=False)  # PEFT has no layer for compressed-tensors' own
    model = PeftModel.from_pretrained(load(trained(CASE).base, quantization_config=unpacked), exported(CASE, "peft"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    fuse_adapters(model)
    assert torch.equal(log_probs(model, TOKENS), trained(CASE).found["log_probs"])


@pytest.mark.parametrize("case", [CASE, "ours-tied-full", "stock-bf16-full", EXPERTS])
def test_the_merged_model_computes_like_the_trainer(trained, exported, case):
    # Trainer and merged model round the same function to bf16 in two ways. So each is about as far from the exact
    # value as the other, and they are at most the sum of both apart: twice the trainer's own error. Measured: 1.1.
    trainer, exact = trained(case).found["log_probs"], exact_log_probs(trained, exported, case)
    rounding = distance(trainer, exact)
    assert 1e-4 < rounding < 1e-2
    merged = exported(case, "merged-bf16")
    assert distance(log_probs(load(merged), TOKENS), trainer) < 2 * rounding
    # In float32 only the rounding of the merged weights is left. Measured: 0.3.
    assert distance(log_probs(load(merged, torch.float32), TOKENS), exact) < 0.6 * rounding
    assert distance(trained(case).found["before"], trainer) > 100 * rounding, "training changed next to nothing"


def test_the_merged_model_is_a_plain_bf16_model(trained, exported):
    merged = exported(CASE, "merged-bf16")
    config = json.loads((merged / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert open_source(merged).layout == "bf16"
    names = {path.name for path in trained(CASE).base.iterdir()} - {"quantization_report.json"}
    assert names | {"export_report.json"} == {path.name for path in merged.iterdir()}
    assert AutoTokenizer.from_pretrained(merged)("2 + 3") == AutoTokenizer.from_pretrained(trained(CASE).base)("2 + 3")


@pytest.mark.parametrize("form", ["merged-nvfp4", "modelopt"])
def test_a_quantized_export_is_the_quantized_merged_model(exported, tmp_path, form):
    # With the scale choice of the base, `minmax`.
    quantize_checkpoint(exported(CASE, "merged-bf16"), tmp_path / "expected", scale="minmax", device="cpu")
    expected = dict(packed_stream(open_source(tmp_path / "expected")))
    source = open_source(exported(CASE, form))
    assert source.layout == ("modelopt" if form == "modelopt" else "compressed-tensors")
    found = dict(packed_stream(source))
    assert found.keys() == expected.keys()
    for name, item in found.items():
        if isinstance(item, PackedWeight):
            assert weight_digest(item) == weight_digest(expected[name])
        else:
            assert torch.equal(item, expected[name])


def test_transformers_loads_the_quantized_export(trained, exported):
    pytest.importorskip("compressed_tensors")
    ours = log_probs(with_weights(models_of(trained(CASE)), exported(CASE, "merged-nvfp4")), TOKENS)
    assert torch.equal(log_probs(load(exported(CASE, "merged-nvfp4")), TOKENS), ours)


@pytest.mark.parametrize(("case", "dense"), [(CASE, []), (EXPERTS, ["model.layers.1.mlp.gate"])])
def test_modelopt_says_the_same_in_both_files(exported, case, dense):
    folder = exported(case, "modelopt")
    embedded = json.loads((folder / "config.json").read_text())["quantization_config"]
    beside = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert embedded["quant_algo"] == beside["quant_algo"] == "W4A16_NVFP4"
    assert embedded["ignore"] == beside["exclude_modules"] == ["lm_head", *dense]


def test_the_report_states_the_cost(trained, exported, tmp_path, capsys):
    out, step = tmp_path / "out", trained(CASE).run / "global_step_4"
    command = ["export", "--checkpoint", str(step), "--out", str(out), "--to", "merged-nvfp4", "--device", "cpu"]
    assert main([*command, "--scale", "mse"]) == 0
    report = json.loads((out / "export_report.json").read_text())
    merged, packed = (dict(stream_of(path)) for path in (exported(CASE, "merged-bf16"), out))
    assert len(report["layers"]) == 14
    for module, layer in report["layers"].items():
        assert layer["relative_error"] == pytest.approx(relative_error(merged[f"{module}.weight"], packed[module]))
        assert layer["digest"] == weight_digest(packed[module])
        assert 0 < layer["relative_update"] < 1
    down = "model.layers.0.mlp.down_proj"
    assert report["layers"][down]["digest"] == weight_digest(quantize(merged[f"{down}.weight"], "mse"))
    assert (report["scale"], report["scaling"], report["base_digest_checked"]) == ("mse", 2, True)
    table = capsys.readouterr().out
    assert "error/update" in table
    assert "takes the training back" not in table


def test_an_update_that_quantization_takes_back_is_announced(trained, tmp_path, capsys):
    # What a short run changes, 1 % of a weight and less, is below half a step of the grid nearly everywhere.
    def shrink(shard):
        for name, tensor in shard.items():
            if "lora_B" in name:
                tensor.to_local().mul_(0.01)

    actor, packed = trained(CASE).edited(tmp_path / "actor", shrink), tmp_path / "out"
    assert main(["export", "--checkpoint", str(actor), "--out", str(packed), "--to", "merged-nvfp4"]) == 0
    assert "quantization takes the training back" in capsys.readouterr().out
    base, found = (dict(packed_stream(open_source(path))) for path in (trained(CASE).base, packed))
    for name in LINEARS:
        same = (dequantize(found[name]) == dequantize(base[name])).float().mean()
        assert same > 0.97, f"nearly every weight of {name} is the base's again"


def stream_of(path):

    source = open_source(path)
    return source.tensors() if source.layout == "bf16" else packed_stream(source)


@pytest.mark.parametrize("form", FORMS)
def test_room_is_asked_for_all_tensors_that_are_written(trained, tmp_path, monkeypatch, form):
    wanted, out = [], tmp_path / "out"
    monkeypatch.setattr(model_dir, "check_free_space", lambda folder, size: wanted.append(size))
    export_checkpoint(trained(CASE).actor, out, form, device="cpu")
    assert wanted == [sum(model_dir.total_bytes(read_specs(file)) for file in out.rglob("*.safetensors"))]


@pytest.mark.parametrize("case", [CASE, "ours-bf16-full", EXPERTS])
def test_the_bar_ends_where_it_says(trained, tmp_path, capsys, case):
    export_checkpoint(trained(case).actor, tmp_path / "out", "peft", device="cpu")
    assert re.search(r"export: 100%\|.*\| (\S+)/\1 \[", capsys.readouterr().err.rpartition("\r")[2])


@pytest.mark.parametrize("form", FORMS)
def test_another_base_is_refused_and_nothing_is_left(trained, models, tmp_path, refused, form):
    other = tmp_path / "other"
    quantize_checkpoint(models / "bf16", other, scale="mse", device="cpu")
    actor, out = str(trained(CASE).actor), tmp_path / "out"
    assert "the base is not the one of the checkpoint" in refused(
        "export", "--checkpoint", actor, "--out", out, "--to", form, "--base", other, "--device", "cpu"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_else_was_trained_does_not_fit_an_adapter(trained, tmp_path):
    norm = "base_model.model.model.norm.weight"
    actor = trained("ours-bf16-full").edited(tmp_path / "actor", lambda shard: shard[norm].to_local().mul_(2))
    with pytest.raises(ValueError, match=r"its 'model.norm.weight' is not that of .* Check --base, or use --to merged"):
        export_checkpoint(actor, tmp_path / "adapter", "peft")
    assert not (tmp_path / "adapter").exists()
    report = export_checkpoint(actor, tmp_path / "merged", "merged-bf16")
    assert report["changed_besides_the_adapter"] == ["model.norm.weight"]


def test_an_existing_directory_is_refused(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="the output already exists"):
        export_checkpoint(trained(CASE).actor, tmp_path / "out", "peft")
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_a_base_that_was_not_packed_is_not_written_packed(trained, tmp_path):
    stock = trained("stock-bf16-full")
    with pytest.raises(ValueError, match=r"^the base was not packed .*base=.*bf16\. Accepted .* Use --to peft\.$"):
        export_checkpoint(stock.actor, tmp_path / "out", "base-and-adapter", str(stock.base))
    assert not list(tmp_path.iterdir())


def test_an_unknown_form_is_refused(tmp_path, refused):
    assert "invalid choice: 'gguf'" in refused(
        "export", "--checkpoint", "c", "--out", tmp_path / "out", "--to", "gguf", code=2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "peft", "--scale", "minmax"], "an option has no meaning here: --scale=minmax with --to peft"),
        (["--to", "peft"], "no checkpoint is found"),
    ],
)
def test_bad_arguments_are_said_in_a_sentence(tmp_path, refused, arguments, message):
    assert message in refused("export", "--checkpoint", tmp_path / "absent", "--out", tmp_path / "out", *arguments)
    assert not list(tmp_path.iterdir())
