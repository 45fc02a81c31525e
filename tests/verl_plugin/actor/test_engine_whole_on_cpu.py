import re
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch

from verl_qerl.algos.uaq import scaled_parameters, unfold_
from verl_qerl.checkpoints.manifest import NAME as MANIFEST
from verl_qerl.checkpoints.manifest import Manifest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_names, quantize_stream
from verl_qerl.formats import get_format

SCRIPT = Path(__file__).with_name("engine_whole_cases.py")
CASES = ("requantized", "uaq", "resumed", "rounded", "merged")


@pytest.fixture(scope="module")
def alone(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    fresh_process(str(SCRIPT), str(models), str(out), *CASES)
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    fresh_process(str(SCRIPT), str(models), str(out), *CASES, ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def expected_stream(path, form):
    source = open_source(path)
    form = get_format(form)
    return dict(quantize_stream(source.tensors(), packed_names(source, form), form))


@pytest.mark.parametrize(("name", "form"), [("bf16", "int8"), ("tied", "nvfp4")])
@pytest.mark.parametrize("world", ["alone", "rank 0", "rank 1"])
def test_without_an_adapter_what_is_sent_is_what_the_rollout_was_loaded_from(request, models, name, form, world):
    where = request.getfixturevalue("alone") if world == "alone" else request.getfixturevalue("ranks")[int(world[-1])]
    found = where["requantized"][name]
    assert (found["dtypes"], found["peft"], found["packed"]) == ({torch.float32}, None, {})
    sent, expected = found["sent"], expected_stream(models / name, form)
    manifest = Manifest.from_tensor(sent.pop(MANIFEST))
    expected.pop("lm_head.weight" if name == "tied" else "", None)
    assert sent.keys() == expected.keys() == manifest.checksums.keys()
    for key, tensor in expected.items():
        assert torch.equal(sent[key].view(torch.uint8), tensor.view(torch.uint8)), key
    later = found["later"]
    moved = [key for key in sent if not torch.equal(sent[key].view(torch.uint8), later[key].view(torch.uint8))]
    assert len(moved) > len(sent) / 2


def test_a_quantized_directory_is_not_trained_in_full(alone):
    expected = r"^CheckpointFormatError: .* is quantized already \(nvfp4\) and model\.lora_rank=0 trains"
    assert re.search(expected, alone["requantized"]["error"])


def test_a_checkpoint_of_an_adapter_is_not_for_all_weights(alone, ranks):
    for found in (alone["resumed"], *(rank["resumed"] for rank in ranks)):
        assert len(found["errors"]) == 4
        for error in found["errors"][2:]:  # of a run without +rollout
            assert re.match(r"the checkpoint is of an adapter on a base in nvfp4, now in bf16, in .* Add \+", error)
        for error in found["errors"][:2]:
            assert re.match(r"the checkpoint is of an adapter: lora_rank=8, now 0, in .* as it was, or trainer", error)
        for one, other in (found["weights"], found["saved"]):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_uaq_scales_once_and_keeps_the_function(alone, ranks):
    for found in (alone["uaq"], *(rank["uaq"] for rank in ranks)):
        assert torch.equal(*found["logits"])  # a power of two rounds nothing, not even in FSDP2's bf16
        assert torch.equal(*found["tied"])
        plain, scaled = found["sent"]  # what the rollout gets
        roles = scaled_parameters(plain)
        assert len(roles) == 14
        for name, weight in plain.items():
            factor = {"norm": 2.0, "linear": 0.5}.get(roles.get(name), 1.0)
            assert torch.equal(scaled[name], weight * factor), name


def test_uaq_trains_what_it_scaled_and_resumes_it(alone, ranks):
    for found in (alone["uaq"], *(rank["uaq"] for rank in ranks)):
        assert found["resumed"].keys() == found["saved"][1].keys()
        for name, weight in found["resumed"].items():
            assert torch.equal(weight, found["saved"][1][name]), f"{name} was scaled again"
        # Adam's first step is lr on every weight: undone, it is twice that on a scaled linear, half on its norm.
        for name, role in scaled_parameters(found["resumed"]).items():
            plain, scaled = (found["saved"][i][name] - found["sent"][i][name] for i in range(2))
            ratio = unfold_(role, scaled, 2.0).norm() / plain.norm()
            assert ratio == pytest.approx({"linear": 2.0, "norm": 0.5}[role], rel=1e-2), name


def test_uaq_names_its_base_so_that_another_process_finds_it(alone, ranks):
    for found in (alone["uaq"], *(rank["uaq"] for rank in ranks)):
        assert Path(found["base"]).is_absolute()
        assert (Path(found["base"]) / "config.json").is_file()


def test_uaq_of_another_scale_does_not_resume(alone, ranks):
    for found in (alone["uaq"], *(rank["uaq"] for rank in ranks)):
        other, none, scaled = found["refused"]
        assert other.startswith(
            "the weights of the checkpoint are scaled by uaq.scale=2, those of this run scaled by uaq.scale=1.5:"
        )
        assert none.startswith(
            "the weights of the checkpoint are scaled by uaq.scale=2, those of this run not scaled by UAQ:"
        )
        assert "Set +uaq.enabled=true +uaq.scale=2, or train from an export of it." in none
        assert "Leave out +uaq.*, or train" in scaled


@pytest.mark.parametrize("form", ["int8", "nvfp4"])  # each linear alone; q, k, v and gate, up together
def test_log_probs_of_rounded_weights_are_those_of_a_model_that_has_them(alone, ranks, form):
    for found in (alone["rounded"], *(rank["rounded"] for rank in ranks)):
        expected, before, asked, after = found[form]
        assert torch.equal(asked, expected)
        assert not torch.equal(before, asked)
        assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", ["alone", "rank 0", "rank 1"])
def test_a_merged_adapter_is_sent_as_verl_merges_it_and_the_model_is_not_touched(request, dtype, world):
    where = request.getfixturevalue("alone") if world == "alone" else request.getfixturevalue("ranks")[int(world[-1])]
    found = where["merged"][dtype]
    assert found["sent"].keys() == found["stock"].keys()
    assert {tensor.dtype for tensor in found["sent"].values()} == {torch.bfloat16}
    for name, tensor in found["stock"].items():
        assert torch.equal(found["sent"][name], tensor), name
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): t for name, t in found["before"].items()}
    changed = {name for name, tensor in found["sent"].items() if not torch.equal(tensor, base[name].bfloat16())}
    assert changed == {name for name in found["sent"] if "proj.weight" in name}
    for name, tensor in found["before"].items():
        assert torch.equal(found["after"][name], tensor), name


@pytest.mark.parametrize("what", ["lora_bias", "lora_variant", "merged_adapters", "other names", "fsdp1"])
def test_an_adapter_whose_merge_is_more_than_a_product_is_merged_by_verl(alone, what):
    assert alone["merged"][what] is None
