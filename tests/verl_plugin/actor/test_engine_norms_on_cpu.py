"""Engines that train the norms of the layers besides the adapter."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import assert_close, rms_error_ratio
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).with_name("engine_norms_cases.py")
KINDS = ("input_layernorm", "post_attention_layernorm")
NORMS = [f"model.layers.{index}.{kind}" for index in range(2) for kind in KINDS]


@pytest.fixture(scope="module")
def drawn(models, tmp_path_factory):
    """The models of conftest.py with norms that are not 1, where rounding before and after the weight differ."""
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    for name in ("bf16", "tied", "moe"):
        shutil.copytree(models / name, folder / name)
        (file,) = (folder / name).glob("*.safetensors")
        tensors = load_file(file)
        for key in [key for key in tensors if "layernorm" in key]:
            tensors[key] = (1 + 0.2 * torch.randn(tensors[key].shape, generator=generator)).bfloat16()
        save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(drawn, fresh_process, tmp_path_factory):
    """Ranks that ran, and which of them -> case -> what engine_norms_cases.py found."""
    out = tmp_path_factory.mktemp("norms")
    runs = {
        "1": ("bf16", "tied", "moe", "peft", "lora", "full", "save"),
        "2": ("bf16", "sharded", "lora", "save", "restored from 1"),
        "again": ("restored from 1", "restored from 2"),
    }
    results = {}
    for name, cases in runs.items():
        (out / "store").unlink(missing_ok=True)
        ranks = 2 if name == "2" else 1
        fresh_process(str(SCRIPT), str(drawn), str(out), *cases, ranks=ranks)
        results |= {(name, rank): torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(ranks)}
    return results


FORWARD = [("1", 0, "bf16"), ("1", 0, "tied"), ("1", 0, "moe"), ("1", 0, "peft")]
FORWARD += [("2", rank, name) for rank in range(2) for name in ("bf16", "sharded")]


@pytest.fixture(params=FORWARD, ids=lambda case: " ".join(map(str, case)))
def case(found, request):
    ranks, rank, name = request.param
    return found[ranks, rank][name]


def test_logits_are_those_of_a_model_with_these_norms(case):
    # To the bit, though every other shift is below what bf16 tells from the weight.
    assert torch.equal(case["logits"], case["expected"])
    assert rms_error_ratio(case["logits"], case["untrained"]) > 0.02


def test_norms_that_have_learned_nothing_are_those_of_the_base(case):
    assert torch.equal(case["untrained"], case["expected untrained"])
    assert_close(case["untrained"], case["plain"], 0.02)  # without the option norms round once more


def test_the_reference_policy_has_the_norms_of_the_base(case):
    assert torch.equal(case["base"], case["expected base"])


def test_gradients_are_those_of_the_weights(case):
    assert case["gradients"].keys() == case["expected gradients"].keys() == set(NORMS)
    for name, grad in case["expected gradients"].items():
        assert_close(case["gradients"][name], grad, 5e-3)  # FSDP2 hands over bf16


def test_they_are_float32_and_in_the_adapters_group_of_the_optimizer(case):
    norms = {name: kind for name, kind in case["trainable"].items() if "layernorm" in name}
    assert list(norms.values()) == [(torch.float32, (128,))] * 4
    assert set(case["groups"].values()) == {0}


def test_a_sync_brings_them_after_the_adapter(case):
    names, numel, shifts, modules_to_save = case["sent"]
    assert all("lora_" in name for name in names)
    held = {name: tensor for name, tensor in case["held"].items() if "lora_" in name}
    assert (len(names), numel) == (len(held), sum(tensor.numel() for tensor in held.values()))
    assert sorted(shifts) == sorted(NORMS)
    for name, shift in shifts.items():
        held_shift = case["held"][f"base_model.model.{name}.modules_to_save.default.adapter_shift"]
        assert torch.equal(shift[:, 0], held_shift.bfloat16())
        assert shift.any()
    assert modules_to_save is None  # vLLM takes no adapter that has some


def test_the_digests_of_the_base_know_nothing_of_them(found):
    ours = found["1", 0]["bf16"]["digests"]
    assert len(ours) == 14
    assert ours == found["2", 1]["bf16"]["digests"] == found["2", 1]["sharded"]["digests"]


@pytest.mark.parametrize(("ranks", "name"), [("1", "lora"), ("1", "full"), ("2", "lora")])
def test_a_checkpoint_restores_them_and_their_optimizer(found, ranks, name):
    case = found[ranks, 0][name]
    assert case["moved"]
    assert (len(case["restored"]), all(case["restored"].values())) == (32, True)
    assert (len(case["optimizer"]), all(case["optimizer"])) == (32, True)
    assert case["same next step"]
    assert len([key for key in case["keys"] if key.endswith(".adapter_shift")]) == 4
    assert name == "full" or len(case["keys"]) == 32


@pytest.mark.parametrize(("saved", "read", "ranks"), [("1", "2", 1), ("2", "again", 2)])
def test_they_resume_on_another_number_of_ranks(found, saved, read, ranks):
    expected, held = found[saved, 0]["save"]["on"], found[read, 0][f"restored from {ranks}"]["on, on"]
    assert held["error"] is None
    torch.testing.assert_close(held["adapters"], expected["adapters"], rtol=0, atol=0)
    torch.testing.assert_close(held["optimizer"], expected["optimizer"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["on, off", "off, on"])
def test_a_resume_with_the_option_changed_is_refused(found, name):
    was, now = (str(part == "on") for part in name.split(", "))
    for key in (("2", 0), ("2", 1), ("again", 0)):
        refused = found[key]["restored from 1"][name]
        assert refused["error"].startswith(
            f"the checkpoint has other trained norms: qerl.base.train_norms={was}, now qerl.base.train_norms={now}, in "
        )
        assert refused["error"].endswith(f"Set +qerl.base.train_norms={was}.")
        assert refused["unchanged"]
