import json
import re
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import OmegaConf
from qerl_testing import random_decoder, random_qwen3_moe
from safetensors.torch import load_file

from verl_qerl.cli import main
from verl_qerl.formats import get_format
from verl_qerl.planning import memory_plan

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.fixture
def model(tmp_path):
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 40, "num_key_value_heads": 8}))
    return tmp_path


def test_prints_what_fits(model, capsys):
    options = ["--gpu-gib", "79.6", "--tokens", "4736", "--utilization", "0.6"]
    assert main(["plan", "--model", str(model), *options]) == 0
    printed = capsys.readouterr().out
    assert "packed base: 16.35" in printed
    assert "update: 33." in printed
    # The rollout: 47.76 of vLLM, 16.35 + 2.90 of base and head, 1.00 + 2.00 of adapters and states, 3.25 beside.
    assert re.search(r"\nfits by the estimate, 6\.\d GiB to spare in the rollout\n$", printed)
    assert main(["plan", "--model", str(model / "config.json"), *options]) == 0


@pytest.mark.parametrize(
    ("more", "gib"),
    [
        ({"model_type": "smollm3"}, "1.45"),
        ({"model_type": "smollm3", "tie_word_embeddings": False}, "2.90"),
        ({"model_type": "align"}, "2.90"),  # its configuration has no such field
        ({"model_type": "llama"}, "2.90"),
        ({"model_type": "nobodys"}, "2.90"),
    ],
)
def test_a_family_may_have_its_head_in_its_embedding(model, capsys, more, gib):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    main(["plan", "--model", str(model), "--gpu-gib", "79.6"])
    assert f"embedding and head: {gib}" in capsys.readouterr().out


def test_the_format_of_the_base_counts(model, capsys):
    options = ["--gpu-gib", "141", "--tokens", "4736", "--utilization", "0.6", "--format", "int8"]
    assert main(["plan", "--model", str(model), *options]) == 0
    assert "packed base: 29.06" in capsys.readouterr().out


def test_linears_left_in_bf16_are_counted_as_such(model, capsys):
    file, found = model / "config.json", []
    config = json.loads(file.read_text())
    rules = {
        "named by the command": ["re:.*mlp.*"],
        "of a packed model": ["lm_head", "re:.*mlp.*"],
        "of none": ["lm_head"],
    }
    for where, ignore in rules.items():
        named = ["--ignore", *ignore] if where == "named by the command" else []
        more = {} if named else {"quantization_config": get_format("nvfp4").config(tuple(ignore))}
        file.write_text(json.dumps(config | more))
        assert main(["plan", "--model", str(model), "--gpu-gib", "200", *named]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    # 64 layers of 62.9 M weights in the attention and 424.7 M in the MLP.
    assert [out.count("\n  packed base: 2.11\n  linears in bf16: 50.62\n") for out in found] == [2, 2, 0]
    assert ["linears in bf16" in out or out.count("\n  packed base: 16.35\n") for out in found] == [True, True, 2]
    # vLLM's 100 of 200: 2.11 + 50.62 + 2.90, and 16.35 + 2.90.
    assert [re.findall(r"100.00 GiB, (\S+) are left", out) for out in found] == [["44.37"], ["44.37"], ["80.75"]]


MODELS = {
    "qwen2": (lambda: random_decoder("qwen2"), ["re:.*mlp.*", "model.layers.1.self_attn.o_proj"]),
    "phi3": (lambda: random_decoder("phi3", pad_token_id=0), [r"re:.*\.qkv_proj$"]),
    "experts": (random_qwen3_moe, [r"re:.*\.mlp\.down_proj$", "re:.*layers.1.self_attn.*"]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ignores", [False, True], ids=["default", "ignore"])
def test_counted_bytes_are_those_of_the_files(name, ignores, tmp_path, monkeypatch):
    make, rules = MODELS[name]
    bf16, packed, plans = tmp_path / "bf16", tmp_path / "packed", []
    make().save_pretrained(bf16)
    named = ["--ignore", *rules] if ignores else []
    assert main(["quantize", "--model", str(bf16), "--out", str(packed), "--device", "cpu", *named]) == 0
    plan = memory_plan.plan
    monkeypatch.setattr(memory_plan, "plan", lambda *args: plans.append((*args, plan(*args))) or plans[-1][-1])
    for options in (["--model", str(bf16), *named], ["--model", str(packed)]):
        assert main(["plan", "--gpu-gib", "80", *options]) == 0
    matrices = {n: t for n, t in load_file(packed / "model.safetensors").items() if t.ndim == 2 and ".gate.w" not in n}
    sizes = dict.fromkeys(("packed base", "linears in bf16", "embedding and head"), 0)
    for tensor_name, tensor in matrices.items():
        dense = "linears in bf16" if ".layers." in tensor_name else "embedding and head"
        sizes[dense if tensor_name.endswith(".weight") else "packed base"] += tensor.nbytes
    assert bool(sizes["linears in bf16"]) == ignores
    for shape, settings, _, (rollout, update) in plans:
        for held in (rollout.held, update.held):
            assert {part: held.get(part, 0) for part in sizes} == sizes
        assert memory_plan.rollout_weights(shape, settings) == sum(sizes.values())


@pytest.mark.parametrize(
    ("config", "ignore", "told"),
    [({}, "model.layers.64.mlp.up_proj", "nothing is ignored by 'model.layers.64.mlp.up_proj': no module of"),
     ({}, "re:.*[", r"no regular expression: 're:\.\*\[' of `ignore`"),
     ({}, r"re:.*\.k_proj$", "a group of linears that vLLM runs as one is ignored in part: ignored="),
     ({}, "re:.*layers.*", "holds no linear to quantize: ignore="),
     ({"intermediate_size": 200}, "", "in_features=200 of 'model.layers.0.mlp.down_proj' is not a multiple of 16."),
     (EXPERTS, "re:.*mlp.*", "experts are not packed: 24576 of their linears in"),
     (EXPERTS | {"quantization_config": get_format("nvfp4").config(("lm_head", "re:.*mlp.*"))}, None,
      "experts are not packed: 24576 of their linears in"),
     ({"quantization_config": get_format("nvfp4").config(("lm_head",))}, "re:.*mlp.*",
      r"an option has no meaning here: --ignore re:\.\*mlp\.\* with \S+, which is quantized \(nvfp4\)")],
    ids=["none", "regex", "part", "all", "too narrow", "experts", "packed experts", "packed"],
)  # fmt: skip
def test_what_cannot_be_packed_or_ignored_is_refused(model, refused, config, ignore, told):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert re.search(
        told, refused("plan", "--model", model, "--gpu-gib", "141", *(["--ignore", ignore] if ignore else []))
    )


def test_one_when_the_estimate_is_above(model, capsys):
    options = ["--gpu-gib", "79.6", "--tokens", "65536", "--utilization", "0.6", "--no-checkpointing"]
    assert main(["plan", "--model", str(model), *options]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"does not fit by the estimate: the update takes \d+\.\d GiB more than there is\. Lower ", last)


def test_says_last_what_certainly_does_not_fit(model, capsys):
    assert main(["plan", "--model", str(model), "--gpu-gib", "79.6", "--utilization", "0.9"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: too little GPU memory for the configuration: the rollout holds")


def test_takes_a_hub_id(model, monkeypatch, capsys):
    asked = []

    def download(*names):
        asked.append(names)
        return str(model / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert main(["plan", "--model", "owner/name", "--gpu-gib", "141"]) == 0
    assert asked == [("owner/name", "config.json")]


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("offline"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        json.JSONDecodeError("Expecting value", "<html>", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_id_that_cannot_be_reached(refused, monkeypatch, error):
    def download(*names):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert "owner/name is neither a directory nor a model of the hub that can be reached" in refused(
        "plan", "--model", "owner/name", "--gpu-gib", "141"
    )


def test_the_defaults_are_those_of_a_run(model, monkeypatch):
    planned, plan = [], memory_plan.plan
    monkeypatch.setattr(memory_plan, "plan", lambda *args: planned.append(args[1]) or plan(*args))
    main(["plan", "--model", str(model), "--gpu-gib", "141"])
    verl = pytest.importorskip("verl")
    actor = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "actor" / "actor.yaml")
    assert planned[0].tokens == actor.ppo_max_token_len_per_gpu
    assert not planned[0].whole_logits  # `+rollout=...` sets use_fused_kernels where there is an adapter


def test_a_name_without_its_owner_is_told_what_a_hub_id_is(refused):
    assert (
        "Qwen2.5-7B-Instruct does not exist. A directory in Hugging Face layout or a hub id, owner/name, is"
        in refused("plan", "--model", "Qwen2.5-7B-Instruct", "--gpu-gib", "141")
    )


def test_every_switch_counts(model, capsys):
    printed = set()
    switches = ("--shard-base", "--no-fused-kernels", "--param-offload", "--optimizer-offload", "--offload-policy")
    for options in ([], *([switch] for switch in switches)):
        base = ["--gpu-gib", "141", "--gpus", "2", "--utilization", "0.5", "--tensor-parallel", "2"]
        main(["plan", "--model", str(model), *base, *options])
        printed.add(capsys.readouterr().out)
    assert len(printed) == 6


def test_a_shared_base_is_counted_once(model, capsys):
    found = {}
    for options in ((), ("--share-base",)):
        assert main(["plan", "--model", str(model), "--gpu-gib", "79.6", "--tokens", "4736", *options]) == 0
        *parts, left, _ = capsys.readouterr().out.splitlines()
        assert parts.count("  packed base: 16.35") == 2  # the actor's, in rollout and update
        found[options] = left
    # 64 * 487 M linear weights of 9/16 bytes, which vLLM does not hold a second time.
    assert found[()] == "of vLLM's 39.80 GiB, 20.55 are left for its cache and its passes"
    assert found["--share-base",] == "of vLLM's 39.80 GiB, 36.90 are left for its cache and its passes"


def test_sharing_gives_room_to_what_has_too_little(model, capsys):
    options = ["plan", "--model", str(model), "--gpu-gib", "79.6", "--tokens", "4736", "--utilization", "0.2"]
    assert main(options) == 1
    assert "does not fit: too little GPU memory for the configuration: vLLM's weights take 19.2 GiB" in (
        capsys.readouterr().out
    )
    assert main([*options, "--share-base"]) == 0


SHARED = r"does not go together with \+qerl\.base\.share=true: "
REFUSED = {
    "--share-base --format int8": r"qerl\.base\.share=True does not go together with \+rollout=int8: it is built",
    "--share-base --tensor-parallel 2": rf"rollout\.tensor_model_parallel_size=2 {SHARED}both sides",
    "--share-base --shard-base": rf"qerl\.base\.shard=True {SHARED}both sides",
    "--share-base --param-offload": rf"fsdp_config\.param_offload=True {SHARED}the rollout computes",
    "--share-base --offload-policy": rf"fsdp_config\.offload_policy=True {SHARED}the rollout computes",
    "--share-base --utilization 0.0": rf"rollout\.gpu_memory_utilization=0\.0 {SHARED}there is no rollout",
    "--gpus 4 --tensor-parallel 3": r"tensor_model_parallel_size=3 does not divide the 4 GPUs of the run",
    "--gpus 16 --tensor-parallel 16": r"--tensor-parallel 16 of .*, which has 40 attention heads .* Divisors of 40",
    "--gpus 10 --tensor-parallel 10": r"--tensor-parallel 10 of .*, which has 40 attention heads and 8 of keys and val",
    "--shard-base --format int8": r"qerl\.base\.shard=True does not go together with \+rollout=int8: it is built",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_a_run_refuses_is_refused_here_too(model, refused, options):
    assert re.search(REFUSED[options], refused("plan", "--model", model, "--gpu-gib", "141", *options.split()))


def test_what_an_older_modelopt_wrote_beside_the_model_counts(model, refused):
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    options = ["plan", "--model", str(model), "--gpu-gib", "141"]
    assert main(options) == 0
    for more, told in (
        (["--format", "int8"], "is quantized in another format: nvfp4, and int8 is asked for"),
        (["--ignore", "re:.*self_attn.*"], "an option has no meaning here: --ignore"),
    ):
        assert told in refused(*options, *more)


def test_a_model_in_another_format_is_refused_as_by_a_run(model, refused):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (model / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(model), "--gpu-gib", "141", "--format", "int8"]) == 0
    assert "is quantized in another format: int8, and nvfp4 is asked for." in refused(
        "plan", "--model", model, "--gpu-gib", "141"
    )


@pytest.mark.parametrize(
    "option",
    ["--gpu-gib nan", "--gpu-gib inf", "--gpus 0", "--gpus -2", "--rank -5", "--tokens -100000000",
     "--tensor-parallel 0", "--utilization -0.1", "--utilization 1.5"],
)  # fmt: skip
def test_numbers_that_no_run_has(model, refused, option):
    assert f"no such run: {option}. " in refused("plan", "--model", model, "--gpu-gib", "141", *option.split())


def test_a_run_of_all_weights_has_no_plan(model, refused):
    assert "no plan: --rank 0 trains all weights. 1 or more is accepted." in refused(
        "plan", "--model", model, "--gpu-gib", "141", "--rank", "0"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "config.json does not exist."), ("{", "config.json is not JSON:"), ("[]", "config.json holds a list.")],
    ids=["none", "cut", "list"],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, refused, content, told):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert f"{tmp_path}/{told}" in refused("plan", "--model", tmp_path, "--gpu-gib", "80")
