import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from accelerate import init_empty_weights
from qerl_testing import quantize_group, random_decoder, random_qwen3_moe
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4
from verl_qerl.formats.ignore import is_ignored
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.convert import packed_linears
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear
from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
from verl_qerl.verl_plugin.config.base_options import BaseOptions
from verl_qerl.verl_plugin.rollout.server import describe_checkpoint

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a Qwen2 of two layers, its tensors changed by `edit`; the same tensors for the same options."""

    def write(edit=None, tied=False, config=None):
        path = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                nn.init.normal_(parameter, mean=0.5, std=0.1)
        model.save_pretrained(path)
        if edit:
            tensors = load_file(path / "model.safetensors")
            edit(tensors)
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        if config:
            config.save_pretrained(path)
        return path

    return write


def read(path: Path, options: BaseOptions | None = None, dtype=torch.bfloat16):
    options = options or BaseOptions()
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = None
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    linears = build_skeleton(model, str(path), options.ignore)
    load_packed(model, linears, str(path), options, dtype)
    return model


def digests(model):
    return {name: weight_digest(linear.packed()) for name, linear in packed_linears(model)}


def expected_digests(path, scale="mse"):
    tensors = load_file(path / "model.safetensors")
    found = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        groups = [[f"self_attn.{kind}_proj" for kind in "qkv"], ["self_attn.o_proj"]]
        groups += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
        for group in groups:
            weights = {f"{prefix}.{leaf}": tensors[f"{prefix}.{leaf}.weight"] for leaf in group}
            found |= {name: weight_digest(item) for name, item in quantize_group(weights, scale).items()}
    return found


@pytest.mark.parametrize("scale", ["mse", "minmax"])
def test_linears_hold_the_quantized_checkpoint(checkpoint, scale):
    path = checkpoint()
    model = read(path, BaseOptions(scale=scale))
    assert digests(model) == expected_digests(path, scale)
    assert len(digests(model)) == 14
    assert type(model.lm_head) is nn.Linear


def test_everything_else_holds_the_checkpoint(checkpoint):
    path = checkpoint()
    stored = load_file(path / "model.safetensors")
    model = read(path)
    found = dict(model.named_parameters())
    packed = {f"{name}.weight" for name in digests(model)}
    assert set(found) == set(stored) - packed
    assert all(torch.equal(parameter, stored[name]) for name, parameter in found.items())
    assert not any(tensor.is_meta for tensor in [*found.values(), *model.buffers()])
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()  # rotary tables are there


def test_no_dense_weight_is_left(checkpoint):
    model = read(checkpoint())
    smallest = 32 * 64  # k_proj
    dense = [name for name, tensor in model.named_parameters() if tensor.numel() >= smallest]
    assert dense == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(b.dtype == torch.uint8 for name, b in model.named_buffers() if ".layers." in name)


def assert_dense_logits(path, model, *others):
    """The logits are those of transformers' model with the decoded weights."""
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for name, linear in packed_linears(model):
        dense.get_submodule(name).weight.data = dequantize(linear.packed())
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    for one in (model, *others):
        assert torch.equal(one(tokens).logits, dense(tokens).logits)


def test_the_model_computes_with_the_dequantized_weights(checkpoint):
    path = checkpoint()
    assert_dense_logits(path, read(path))


def test_the_dtype_is_that_of_what_is_not_packed(checkpoint):
    model = read(checkpoint(), dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert digests(model) == expected_digests(checkpoint())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "phi3"])
def test_every_family_computes_with_the_dequantized_weights(tmp_path, family, tied):
    more = {"pad_token_id": 0} if family == "phi3" else {}  # fused linears on disk: qkv_proj and gate_up_proj
    random_decoder(family, gain=3, tie_word_embeddings=tied, **more).save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", device="cpu")
    model, packed = read(tmp_path / "bf16"), read(tmp_path / "nvfp4")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert not model.lm_head.weight.is_meta
    assert digests(packed) == digests(model)
    assert len(digests(model)) == 2 * (4 if family == "phi3" else 7)
    assert_dense_logits(tmp_path / "bf16", model, packed)


def test_an_nvfp4_directory_gives_the_same_bits(checkpoint, tmp_path):
    path = checkpoint()
    quantize_checkpoint(path, tmp_path / "nvfp4", device="cpu")
    packed = read(tmp_path / "nvfp4", BaseOptions(scale="minmax"))  # the option is for bf16 ones
    dense = read(path)
    assert digests(packed) == digests(dense)
    assert all(torch.equal(a, b) for a, b in zip(packed.parameters(), dense.parameters(), strict=True))


def test_ignored_modules_stay_dense(checkpoint, tmp_path):
    path = checkpoint()
    rules = ("lm_head", "re:.*down_proj", "model.layers.0.self_attn.o_proj")
    model = read(path, BaseOptions(ignore=rules))
    dense = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    left_out = {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", rules[2]}
    assert dense == {"lm_head", *left_out}
    quantize_checkpoint(path, tmp_path / "nvfp4", ignore=rules, device="cpu")
    assert digests(read(tmp_path / "nvfp4")) == digests(model)  # an NVFP4 directory brings its own list


def as_modelopt(folder, ignore):
    """Rewrite a directory in ModelOpt's names, with its wildcards."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.replace(".weight_packed", ".weight")
        if name.endswith(".weight_global_scale"):
            name, tensor = name.replace("global_scale", "scale_2"), (1 / tensor).reshape(())
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ignore}


def as_targets(folder, targets):
    config = NVFP4().config(["lm_head"])
    config["config_groups"]["group_0"]["targets"] = targets
    return config


@pytest.mark.parametrize(
    ("describe", "patterns"),
    [(as_modelopt, ["lm_head", "model.layers.0.self_attn*"]), (as_targets, ["re:.*mlp.*", "re:.*1.self_attn.*"])],
    ids=["wildcards of ModelOpt", "targets of compressed-tensors"],
)
def test_rollout_and_actor_leave_out_what_patterns_of_others_mean(checkpoint, tmp_path, describe, patterns):
    path, folder = checkpoint(), tmp_path / "nvfp4"
    rules = ("lm_head", r"re:model\.layers\.0\.self_attn.*")
    quantize_checkpoint(path, folder, ignore=rules, device="cpu")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = describe(folder, patterns)
    (folder / "config.json").write_text(json.dumps(config))
    model = read(folder)
    assert digests(model) == digests(read(path, BaseOptions(ignore=rules)))
    dense = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert dense == {"lm_head", *(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo")}
    kwargs = {}
    describe_checkpoint(kwargs, str(folder))
    told = kwargs["hf_overrides"]["quantization_config"]["ignore"]
    assert {name for name, _ in dense_linears(path) if is_ignored(name, told)} == dense


def dense_linears(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]


def replace(name, tensor):
    def edit(tensors):
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.bfloat16()

    return edit


NORM, QUERY = "model.layers.0.input_layernorm.weight", f"{ATTENTION}.q_proj.weight"
BAD = {
    "one-too-many": (replace("model.layers.0.mlp.bias", torch.ones(4)), "holds 'model.layers.0.mlp.bias', for which"),
    "a-layer-too-many": (
        replace("model.layers.2.mlp.up_proj.weight", torch.ones(96, 64)),
        "packs 'model.layers.2.mlp.up_proj', which is no linear of the model",
    ),
    "bias-too-many": (replace("model.layers.0.mlp.up_proj.bias", torch.ones(96)), "holds 'model.layers.0.mlp.up_proj"),
    "a-norm-missing": (replace(NORM, None), f"lacks 1 parameters, first '{NORM}'"),
    "a-linear-missing": (
        replace(QUERY, None),
        f"holds no packed weight for 1 linears, first '{ATTENTION}.q_proj'",
    ),
    "norm-of-wrong-shape": (replace(NORM, torch.ones(32)), f"holds '{NORM}' of (32,), the model (64,)"),
    "linear-of-wrong-shape": (
        replace(QUERY, torch.ones(48, 64)),
        f"holds '{ATTENTION}.q_proj' of (48, 64), the model (64, 64)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_gives_one_sentence(checkpoint, case):
    edit, sentence = BAD[case]
    path = checkpoint(edit)
    with pytest.raises(CheckpointFormatError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path} {sentence}")
    assert (
        "Tensors and Qwen2ForCausalLM must match one to one. Check that config.json belongs to these weights." in text
    )


def test_what_transformers_leaves_in_the_file_stays_there(checkpoint, monkeypatch):
    path = checkpoint(replace("model.layers.1.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    assert digests(read(path)) == digests(read(checkpoint()))
    path = checkpoint(replace("mtp.layers.0.norm.weight", torch.ones(64)))
    with pytest.raises(CheckpointFormatError, match=r"holds 'mtp\.layers"):
        read(path)
    monkeypatch.setattr(Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    assert digests(read(path)) == digests(read(checkpoint()))


def test_another_architecture_gives_one_sentence(checkpoint):
    path = checkpoint(config=LlamaConfig(**SIZES, tie_word_embeddings=False))  # no biases
    with pytest.raises(
        CheckpointFormatError, match=r"holds 'model\.layers\.0\.self_attn\.[kqv]_proj\.bias', for which"
    ):
        read(path)


def test_an_architecture_without_decoder_layers_gives_one_sentence(checkpoint):
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"no linear of Sequential matched\. Its linears are 0\."):
        build_skeleton(model, str(checkpoint()), ("lm_head",))


def test_the_skeleton_takes_no_memory(checkpoint):
    path = checkpoint()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    linears = build_skeleton(model, str(path), ("lm_head",))
    assert len(linears) == 14
    assert all(isinstance(model.get_submodule(name), NVFP4Linear) for name in linears)
    assert all(tensor.is_meta for linear in linears.values() for tensor in (linear.weight, linear.weight_scale))


def test_biases_of_packed_linears_are_frozen(checkpoint):
    model = read(checkpoint())
    biases = [linear.bias for _, linear in packed_linears(model) if linear.bias is not None]
    assert len(biases) == 6
    assert not any(bias.requires_grad for bias in biases)


def test_experts_are_not_spread_over_ranks(tmp_path):
    random_qwen3_moe().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = random_qwen3_moe()
    with pytest.raises(ValueError, match=r"^experts cannot be spread over ranks: qerl\.base\.shard=true, 12"):
        build_skeleton(model, str(tmp_path), ("lm_head",), ShardedNVFP4Linear)
