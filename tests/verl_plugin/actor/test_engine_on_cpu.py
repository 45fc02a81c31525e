from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from peft import LoraConfig, get_peft_model
from qerl_testing import assert_close, random_qwen2

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.verl_plugin.config.base_options import BaseOptions

SCRIPT = Path(__file__).with_name("engine_cases.py")
EMBEDDINGS = ["base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"]
PACKED = ("bf16", "tied", "nvfp4")


@pytest.fixture(scope="module")
def alone(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    fresh_process(
        str(SCRIPT),
        str(models),
        str(out),
        *PACKED,
        "moe",
        "lora",
        "full",
        "stock",
        "options",
        "registry",
        "log-probs",
        "sharded",
        "liger",
    )
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    sharded = ["sharded", "sharded tied", "sharded full", "sharded, then not", "log-probs", "log-probs tied"]
    fresh_process(str(SCRIPT), str(models), str(out), "bf16", "tied", "moe", "lora", *sharded, ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def expected_digests(path, scale="mse"):
    items = packed_stream(open_source(path), NVFP4(scale=scale))
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


def test_experts_are_packed_and_the_attention_is_adapted(alone, models):
    found = alone["moe"]
    assert found["digests"] == expected_digests(models / "moe")
    assert len(found["digests"]) == 2 * 4 + 3 + 4 * 3
    assert [kind for kind in found["types"].values() if kind.removeprefix("FSDP") == "NVFP4Experts"]
    assert found["dense"] == EMBEDDINGS
    assert len(found["trainable"]) == 2 * 4 * 2
    assert all(".self_attn." in name for name in found["trainable"])
    assert torch.equal(found["logits"], found["expected"])
    assert torch.equal(found["base"], found["expected base"])
    assert not torch.equal(found["logits"], found["base"])
    assert (found["sent digests"], found["later sent digests"]) == (found["digests"], None)
    assert found["announced"]
    assert found["later announced"]
    check_sent(found, count=16)


def test_an_nvfp4_directory_computes_like_its_bf16_source(alone):
    assert torch.equal(alone["nvfp4"]["logits"], alone["bf16"]["logits"])


@pytest.mark.parametrize("name", PACKED)
def test_the_first_adapter_carries_the_digests(alone, name):
    found = alone[name]
    assert (found["sent digests"], found["later sent digests"]) == (found["digests"], None)
    assert found["announced"]
    assert found["later announced"]
    assert (found["sent rank"], found["later sent rank"]) == (8, 8)
    assert {"r", "lora_alpha", "target_modules"} <= set(found["like verl's"])


def check_sent(found, count=28):
    for before in ("", "later "):
        sent, expected = found[f"{before}sent"], found[f"{before}verl sends"]
        assert list(sent) == list(expected)
        assert (len(sent), all("lora_" in name for name in sent)) == (count, True)
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
    assert found["minmax"] == expected_digests(models / "bf16", "minmax") != alone["bf16"]["digests"]
    assert len(found["ignore"]) == 8
    assert all(".self_attn." in name for name in found["ignore"])


def test_pefts_own_lora_layers_where_nothing_is_fused(alone):
    found, expected = alone["options"]["peft"]
    assert torch.equal(found, expected)
    kinds = alone["options"]["kinds"]
    assert "AdaptedLinear" in kinds[True]
    assert "AdaptedLinear" not in kinds[False]


def test_what_cannot_be_is_refused(alone):
    found = alone["options"]
    assert found["liger"].startswith(
        "model.use_liger=True on a packed base of model type qwen3_moe. Accepted are llama,"
    )
    assert found["triton"].startswith("model.fused_kernel_options.impl_backend=triton is not supported on a packed")
    assert found["another base on rank 0"].startswith("two processes hold different base weights: 14 of 14 differ")


def test_liger_gets_the_packed_model_before_peft(alone):
    assert alone["liger"] == [({"fused_linear_cross_entropy": False, "swiglu": True}, True, False)]


def test_the_registry_finds_our_engine(alone):
    assert alone["registry"] == {
        "cpu": True,
        "once": True,
        "stock": True,
        "nvidia": "QerlFSDPEngine",
        "other": "FSDPEngineWithLMHead",
    }


@pytest.mark.parametrize("name", ["bf16", "tied", "moe"])
def test_two_ranks_hold_the_same_base(alone, ranks, name):
    for found in ranks:
        assert found[name]["digests"] == alone[name]["digests"]
        assert found[name]["meta"] == []
        assert torch.equal(found[name]["base"], alone[name]["base"])
        assert torch.equal(found[name]["logits"], found[name]["expected"])
        assert found[name]["sent digests"] == alone[name]["digests"]
        check_sent(found[name], count=16 if name == "moe" else 28)


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


def test_an_adapter_that_the_rollout_would_compute_in_part_is_refused(tmp_path):
    saved = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], alpha_pattern={"down_proj": 64})
    get_peft_model(random_qwen2(), saved).save_pretrained(tmp_path)
    import verl.workers.engine  # noqa: F401  first: it imports ours

    from verl_qerl.verl_plugin.actor.engine import QerlFSDPEngine

    engine = object.__new__(QerlFSDPEngine)
    engine.engine_config = SimpleNamespace(qerl=BaseOptions())
    engine.model_config = SimpleNamespace(lora_adapter_path=str(tmp_path), use_shm=False)
    with pytest.raises(ValueError, match=r"^no plain LoRA: alpha_pattern=.*merge it into the model\.$"):
        engine._build_lora_module(random_qwen2())
