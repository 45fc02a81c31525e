import re
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.algos.uaq import scaled_parameters, unfold_
from verl_qerl.cli.quantize import quantize_checkpoint
from verl_qerl.formats import get_format
from verl_qerl.formats.manifest import NAME as MANIFEST
from verl_qerl.formats.manifest import Manifest
from verl_qerl.formats.stream import quantize_stream
from verl_qerl.nvfp4.digest import weight_digest
from verl_qerl.nvfp4.stream import PackedWeight, linear_modules, open_source, stored_tensors, stream
from verl_qerl.testing import assert_close

SCRIPT = Path(__file__).with_name("engine_cases.py")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 64
    "num_key_value_heads": 1,
}
EMBEDDINGS = ["base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"]
PACKED = ("bf16", "tied", "nvfp4")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three directories: bf16, tied (with tied embeddings), and nvfp4, quantized from bf16."""
    folder = tmp_path_factory.mktemp("models")
    for name, tied in (("bf16", False), ("tied", True)):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).bfloat16()
        model.save_pretrained(folder / name)
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cpu")
    return folder


@pytest.fixture(scope="module")
def alone(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    fresh_process(
        str(SCRIPT),
        str(models),
        str(out),
        *PACKED,
        "lora",
        "full",
        "stock",
        "options",
        "registry",
        "kept dense",
        "log-probs",
        "sharded",
        "requantized",
        "uaq",
        "rounded",
    )
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sharded = ["sharded", "sharded tied", "sharded full", "sharded, then not", "log-probs", "log-probs tied"]
    fresh_process(*torchrun, str(SCRIPT), str(models), str(out), "bf16", "tied", "lora", "requantized", "uaq", "rounded", *sharded)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def expected_digests(path, scale="minmax"):
    items = stream(open_source(path), scale)
    return {name: weight_digest(item) for name, item in items if isinstance(item, PackedWeight)}


@pytest.mark.parametrize("name", PACKED)
def test_decoder_linears_are_packed_and_nothing_else(alone, name):
    found = alone[name]
    leaves = {module.rpartition(".")[2] for module in found["packed"]}
    assert (len(found["packed"]), leaves) == (14, {"base_layer"})  # under LoRA, all of them
    kinds = {name: kind.removeprefix("FSDP") for name, kind in found["types"].items()}
    assert (kinds["base_model.model.lm_head"], kinds["base_model.model.model.embed_tokens"]) == ("Linear", "Embedding")


@pytest.mark.parametrize("name", PACKED)
def test_adapters_are_float32_and_all_that_is_trained(alone, name):
    found = alone[name]
    assert len(found["trainable"]) == 28
    assert all("lora_" in name for name in found["trainable"])
    assert set(found["trainable"].values()) == {torch.float32}
    assert set(found["frozen"].values()) == {torch.bfloat16}


@pytest.mark.parametrize("name", PACKED)
def test_no_dense_copy_of_a_linear_exists(alone, name):
    assert alone[name]["dense"] == (EMBEDDINGS[:1] if name == "tied" else EMBEDDINGS)
    assert alone[name]["meta"] == []


def test_bits_are_those_of_the_checkpoint(alone, models):
    expected = expected_digests(models / "bf16")
    assert len(expected) == 14
    assert alone["bf16"]["digests"] == expected
    assert alone["nvfp4"]["digests"] == expected == expected_digests(models / "nvfp4")
    assert alone["tied"]["digests"] == expected_digests(models / "tied")


@pytest.mark.parametrize("name", PACKED)
def test_logits_are_those_of_dequantized_weights(alone, name):
    # To the bit: the same bf16 operations in the same order, on weights that are the same.
    found = alone[name]
    assert torch.equal(found["logits"], found["expected"])
    assert torch.equal(found["base"], found["expected base"])
    assert not torch.equal(found["logits"], found["base"])  # the adapters act


def test_an_nvfp4_directory_computes_like_its_bf16_source(alone):
    assert torch.equal(alone["nvfp4"]["logits"], alone["bf16"]["logits"])


@pytest.mark.parametrize("name", PACKED)
def test_the_first_adapter_carries_the_digests(alone, name):
    found = alone[name]
    assert (found["sent digests"], found["later sent digests"]) == (found["digests"], None)
    assert (found["sent rank"], found["later sent rank"]) == (8, 8)
    assert {"r", "lora_alpha", "target_modules"} <= set(found["like verl's"])


def check_sent(found):
    for before in ("", "later "):
        sent, expected = found[f"{before}sent"], found[f"{before}verl sends"]
        assert list(sent) == list(expected)
        assert (len(sent), all("lora_" in name for name in sent)) == (28, True)
        for name, tensor in expected.items():
            assert torch.equal(sent[name], tensor), name
        assert found[f"{before}pieces"] > 1
    assert not torch.equal(found["sent"][name], found["later sent"][name])


@pytest.mark.parametrize("name", PACKED)
def test_the_adapter_that_is_sent_is_the_one_verl_would_send(alone, name):
    check_sent(alone[name])


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_checkpoint_restores_adapter_and_optimizer(alone, name):
    found = alone[name]
    assert found["norm"] > 0
    assert found["moved"]
    assert (len(found["restored"]), all(found["restored"].values())) == (28, True)
    assert (len(found["optimizer"]), all(found["optimizer"])) == (28, True)
    assert found["same next step"]
    assert found["digests"]


def test_a_checkpoint_holds_no_packed_weight(alone):
    assert len(alone["lora"]["keys"]) == 28
    assert all("lora_" in key for key in alone["lora"]["keys"])
    others = [key for key in alone["full"]["keys"] if "lora_" not in key]
    assert not [key for key in others if key.endswith(("weight_scale", "weight_decode_scale", "base_layer.weight"))]
    assert len(others) == 2 + 5 + 6  # embeddings, norms, biases


def test_without_our_options_it_is_the_stock_engine(alone):
    ours, stock = range(2)
    found = alone["stock"]
    assert found["types"][ours] == found["types"][stock]
    assert "NVFP4Linear" not in found["types"][ours].values()
    assert found["dtypes"][ours] == found["dtypes"][stock]
    assert torch.equal(found["logits"][ours], found["logits"][stock])
    assert found["sent"][ours] == found["sent"][stock]


def test_options_reach_the_base(alone, models):
    found = alone["options"]
    assert found["mse"] == expected_digests(models / "bf16", "mse") != alone["bf16"]["digests"]
    assert len(found["ignore"]) == 8
    assert all(".self_attn." in name for name in found["ignore"])


def test_pefts_own_lora_layers_by_option(alone):
    found, expected = alone["options"]["peft"]
    assert torch.equal(found, expected)
    kinds = alone["options"]["kinds"]
    assert "AdaptedLinear" in kinds[True]
    assert "AdaptedLinear" not in kinds[False]


def test_what_cannot_be_is_refused(alone):
    found = alone["options"]
    assert found["liger"].startswith("model.use_liger=True is not supported on an NVFP4 base. Accepted is False.")
    assert found["triton"].startswith("model.fused_kernel_options.impl_backend=triton is not supported on an NVFP4")
    assert found["another base on rank 0"].startswith("two processes hold different base weights: 14 of 14 differ")


def test_the_registry_finds_our_engine(alone):
    assert alone["registry"] == {
        "cpu": True,
        "once": True,
        "stock": True,
        "nvidia": "QerlFSDPEngine",
        "other": "FSDPEngineWithLMHead",
    }


@pytest.mark.parametrize("name", ["bf16", "tied"])
def test_two_ranks_hold_the_same_base(alone, ranks, name):
    for found in ranks:
        assert found[name]["digests"] == alone[name]["digests"]
        assert found[name]["meta"] == []
        assert torch.equal(found[name]["base"], alone[name]["base"])
        assert torch.equal(found[name]["logits"], found[name]["expected"])
        assert found[name]["sent digests"] == alone[name]["digests"]
        check_sent(found[name])


def test_two_ranks_resume(ranks):
    for found in ranks:
        assert all(found["lora"]["restored"].values())
        assert all(found["lora"]["optimizer"])
        assert found["lora"]["same next step"]


@pytest.mark.parametrize(("name", "replicated"), [("sharded", "bf16"), ("sharded tied", "tied")])
def test_two_ranks_share_one_base(ranks, name, replicated):
    for found in ranks:
        sharded, other = found[name], found[replicated]
        assert {module for key, module in sharded["types"].items() if key.endswith(".base_layer")} == {
            "ShardedNVFP4Linear"
        }
        for part in ("digests", "sent digests", "sent rank", "trainable"):
            assert sharded[part] == other[part]
        assert sharded["sent"].keys() == other["sent"].keys()
        pairs = [(tensor, other["sent"][key]) for key, tensor in sharded["sent"].items()]
        assert all(
            torch.equal(*pair) for pair in [*pairs, *((sharded[part], other[part]) for part in ("logits", "base"))]
        )


@pytest.mark.parametrize("name", ["sharded full", "sharded, then not"])
def test_two_ranks_that_share_a_base_resume(ranks, name):
    for found in ranks:
        assert all(found[name]["restored"].values())
        assert all(found[name]["optimizer"])
        assert found[name]["same next step"]
        assert found[name]["digests"]
        assert not [key for key in found[name]["keys"] if "packed" in key]


def test_one_rank_has_nothing_to_share(alone):
    assert "ShardedNVFP4Linear" not in alone["sharded"]["types"].values()
    assert torch.equal(alone["sharded"]["logits"], alone["bf16"]["logits"])


def test_a_dense_copy_changes_no_bit_of_a_step(alone):
    packed, dense = alone["kept dense"]["norms"]
    assert packed == dense > 0


def test_log_probs_from_the_head_are_those_of_whole_logits(alone, ranks):
    cases = [alone["log-probs"], *(found[name] for found in ranks for name in ("log-probs", "log-probs tied"))]
    for found in cases:
        head, logits = found[True], found[False]
        assert_close(head["log_probs"], logits["log_probs"], 1e-6)
        assert_close(head["entropy"], logits["entropy"], 1e-5)
        assert head["grads"].keys() == logits["grads"].keys()
        assert len(head["grads"]) == 28
        for name, grad in head["grads"].items():
            assert_close(grad, logits["grads"][name], 0.05)  # the logits' gradient is rounded to bf16 once more there


def expected_stream(path, form):
    source = open_source(path)
    form = get_format(form)
    return dict(quantize_stream(stored_tensors(source), linear_modules(source, None, form.block_size, form.kind), form))


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
    expected = r"^CheckpointFormatError: .* is quantized already \(compressed-tensors\) and model\.lora_rank=0 trains"
    assert re.search(expected, alone["requantized"]["error"])


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
