"""The engine on bases in the neighbours of NVFP4; NVFP4: test_engine_on_cpu.py."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import get_format
from verl_qerl.modules.format_linear import PACKED_LINEARS

SCRIPT = Path(__file__).with_name("engine_format_cases.py")
FORMS = ("fp8", "int8", "mxfp4")
each_base = pytest.mark.parametrize("case", [*FORMS, *(f"{name} directory" for name in FORMS), "tied"])


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """The models of conftest.py, and bf16 quantized to each format."""
    from verl_qerl.cli.quantize.command import quantize_checkpoint

    folder = tmp_path_factory.mktemp("formats")
    for name in ("bf16", "tied", "moe"):
        (folder / name).symlink_to(models / name)
    for name in FORMS:
        quantize_checkpoint(models / "bf16", folder / name, form=name, device="cpu")
    return folder


@pytest.fixture(scope="module")
def alone(folder, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    cases = [*FORMS, *(f"{name} directory" for name in FORMS), "tied", "resume", "refused"]
    fresh_process(str(SCRIPT), str(folder), str(out), *cases)
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(folder, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    fresh_process(str(SCRIPT), str(folder), str(out), "int8", "mxfp4 directory", "resume", ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def form_of(case):
    return "int8" if case == "tied" else case.partition(" ")[0]


def expected_digests(path, name):
    items = packed_stream(open_source(path), get_format(name))
    return {module: weight_digest(item) for module, item in items if not isinstance(item, torch.Tensor)}


@each_base
def test_decoder_linears_are_packed_in_the_format_and_adapters_train(alone, case):
    found, name = alone[case], form_of(case)
    kinds = [found["types"][module].removeprefix("FSDP") for module in found["packed"]]
    assert kinds == [PACKED_LINEARS[name].__name__] * 14
    assert len(found["trainable"]) == 28
    assert all("lora_" in module for module in found["trainable"])
    assert len(found["dense"]) == (1 if case == "tied" else 2)  # embedding and head
    assert found["meta"] == []


@each_base
def test_bits_are_those_of_the_reader_and_travel_with_the_first_adapter(alone, folder, case):
    found = alone[case]
    assert found["digests"] == expected_digests(folder / ("tied" if case == "tied" else "bf16"), form_of(case))
    assert (found["sent digests"], found["later sent digests"]) == (found["digests"], None)
    for before in ("", "later "):
        sent, verls = found[f"{before}sent"], found[f"{before}verl sends"]
        assert len(sent) == 28
        assert all(torch.equal(sent[name], verls[name]) for name in verls)


@each_base
def test_logits_are_those_of_dequantized_weights(alone, case):
    found = alone[case]
    assert torch.equal(found["logits"], found["expected"])
    assert torch.equal(found["base"], found["expected base"])
    assert not torch.equal(found["logits"], found["base"])  # the adapters act


@pytest.mark.parametrize("name", FORMS)
def test_a_packed_directory_computes_like_its_bf16_source(alone, name):
    assert torch.equal(alone[name]["logits"], alone[f"{name} directory"]["logits"])


def test_formats_differ(alone):
    assert not torch.equal(alone["int8"]["base"], alone["fp8"]["base"])
    assert not torch.equal(alone["mxfp4"]["base"], alone["fp8"]["base"])


def test_a_checkpoint_restores_adapter_and_optimizer(alone, ranks):
    for found in (alone["resume"], *(rank["resume"] for rank in ranks)):
        assert (len(found["restored"]), all(found["restored"].values())) == (28, True)
        assert all(found["optimizer"])
        assert found["same next step"]
        assert found["digests"]
        assert all("lora_" in key for key in found["keys"])


@pytest.mark.parametrize("case", ["int8", "mxfp4 directory"])
def test_two_ranks_hold_the_same_base(alone, ranks, case):
    for found in ranks:
        assert found[case]["digests"] == alone[case]["digests"]
        assert torch.equal(found[case]["base"], alone[case]["base"])
        assert torch.equal(found[case]["logits"], found[case]["expected"])


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("another format", "is quantized in another format: int8, and fp8 is asked for. Accepted are"),
        ("nvfp4", "is quantized in another format: int8, and nvfp4 is asked for. Accepted are"),
        ("experts", "a mixture of experts is packed in another format: int8, first 'model.layers."),
        ("checkpoint", "the checkpoint is of a base in another format: int8, now fp8, in"),
    ],
)
def test_what_does_not_go_together_is_refused(alone, case, sentence):
    kind, _, message = alone["refused"][case].partition(": ")
    assert kind == "CheckpointFormatError"
    assert sentence in message
