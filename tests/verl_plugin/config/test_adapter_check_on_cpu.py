"""Adapters that cannot be trained or sampled with are refused by verl's check of a run, before Ray starts."""

import json
import re

import pytest
from qerl_testing import random_qwen3_moe

pytest.importorskip("verl")

from verl_qerl.verl_plugin.config import adapter_check

PACKED = ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")
MODEL = "actor_rollout_ref.model"


@pytest.fixture
def adapter(tmp_path):
    """Writes adapter_config.json; returns the option that names it."""

    def write(**options) -> str:
        (tmp_path / "adapter").mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **options}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        return f"{MODEL}.lora_adapter_path={tmp_path / 'adapter'}"

    return write


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        ("[q_proj,v_proj,lm_head]", "lm_head"),
        ("[q_proj,embed_tokens]", "model.embed_tokens"),
        ("[model.embed_tokens,lm_head]", "lm_head and model.embed_tokens"),
        ("lm_head", "lm_head"),
        ("'(.*q_proj|lm_head)'", "lm_head"),
        ("'.*(_proj|_tokens)'", "model.embed_tokens"),
    ],
)
def test_an_adapter_on_the_head_or_the_embeddings_is_refused(validate, adapter, targets, named):
    sentence = rf"^model\.target_modules=.* puts an adapter on {named}, which .* Linears of the layers are accepted"
    with pytest.raises(ValueError, match=sentence):
        validate(*PACKED, f"{MODEL}.target_modules={targets}")


@pytest.mark.parametrize("options", [["target_modules='(['"], ["target_modules=[q_proj]", "exclude_modules='(['"]])
def test_what_is_no_regular_expression_is_refused(validate, options):
    with pytest.raises(
        ValueError, match=r"^model\.target_modules=.* is no regular expression: .* Accepted is one, a list"
    ):
        validate(*PACKED, *(f"{MODEL}.{option}" for option in options))


@pytest.mark.parametrize(
    "targets", ["all-linear", "[q_proj,v_proj]", "'.*_proj'", r"'.*\.(q_proj|lm_head)'", "'model.layers.*head_proj'"]
)
def test_other_targets_are_accepted(validate, targets):
    validate(*PACKED, f"{MODEL}.target_modules={targets}")


@pytest.mark.parametrize("quantized", [{}, {"quantization_config": {"quant_method": "compressed-tensors"}}])
@pytest.mark.parametrize(
    ("targets", "named"),
    [("[q_proj,v_porj]", "['v_porj']"), ("[norm]", "['norm']"), ("'.*v_porj'", "'.*v_porj'"), ("v_proj", "'v_proj'")],
)
def test_a_target_that_the_model_lacks_is_refused(validate, tmp_path, quantized, targets, named):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 1, **quantized}))
    path = f"{MODEL}.path={tmp_path}"
    sentence = rf"has {re.escape(named)}, which is no linear .* are a list of down_proj, gate_proj, .*, v_proj, a reg"
    with pytest.raises(ValueError, match=sentence):
        validate(*PACKED, path, f"{MODEL}.target_modules={targets}")
    for found in ("[q_proj,v_proj]", "'.*v_proj'", "all-linear", "null"):
        validate(*PACKED, path, f"{MODEL}.target_modules={found}")
    validate(path, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules={targets}")


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,v_proj]"])
@pytest.mark.parametrize(
    ("excluded", "sentence"),
    [
        (
            "[q_proj,v_porj]",
            r"exclude_modules=\['q_proj', 'v_porj'\] has \['v_porj'\], which is no linear .* or null\.",
        ),
        ("[mlp]", r"exclude_modules=\['mlp'\] has \['mlp'\], which is no linear "),
        ("'.*proj'", r"target_modules=.* and model\.exclude_modules='\.\*proj' leave no linear to put an adapter on"),
    ],
)
def test_what_is_excluded_has_to_be_in_the_model_and_to_leave_something(
    validate, tmp_path, targets, excluded, sentence
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 1}))
    options = (f"{MODEL}.path={tmp_path}", f"{MODEL}.target_modules={targets}")
    with pytest.raises(ValueError, match=rf"^model\.{sentence}"):
        validate(*PACKED, *options, f"{MODEL}.exclude_modules={excluded}")
    for found in ("[q_proj]", "[lm_head,k_proj]", "'.*q_proj'", "null"):
        validate(*PACKED, *options, f"{MODEL}.exclude_modules={found}")


def test_a_router_may_be_excluded(validate, tmp_path):
    random_qwen3_moe().config.save_pretrained(tmp_path)
    options = (*PACKED, f"{MODEL}.path={tmp_path}", f"{MODEL}.target_modules=[q_proj]")
    validate(*options, f"{MODEL}.exclude_modules=[gate]")
    with pytest.raises(ValueError, match=r"^model\.exclude_modules=\['gaet'\] has \['gaet'\], which is no linear"):
        validate(*options, f"{MODEL}.exclude_modules=[gaet]")


def test_targets_of_an_empty_list_are_refused(validate, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"^model\.target_modules=\[\] and .* leave no linear to put an adapter on"):
        validate(*PACKED, f"{MODEL}.path={tmp_path}", f"{MODEL}.target_modules=[]")


def test_what_is_excluded_is_no_target(validate):
    validate(*PACKED, f"{MODEL}.target_modules=[q_proj,lm_head]", f"{MODEL}.exclude_modules=[lm_head]")


@pytest.mark.parametrize("rollout", [(), ("+aqn.enabled=true",)], ids=["stock", "noise alone"])
def test_a_bf16_rollout_has_verls_own_rules(validate, rollout):
    validate(f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,lm_head]", *rollout)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ".*embed_tokens"])
def test_an_adapter_that_is_read_is_looked_at_too(validate, adapter, tmp_path, targets):
    path = re.escape(str(tmp_path / "adapter" / "adapter_config.json"))
    with pytest.raises(ValueError, match=rf"^in {path}, target_modules=.* puts an adapter on "):
        validate(*PACKED, adapter(target_modules=targets))


def test_its_rank_must_fit(validate, adapter):
    with pytest.raises(ValueError, match=r"^model\.lora_rank=8 is below the rank of the adapter in .*, r=16: .* Set"):
        validate(*PACKED, adapter(r=16))
    validate("+rollout=nvfp4", f"{MODEL}.lora_rank=16", adapter(r=16))
    validate(*PACKED, adapter(r=4))


def test_a_stock_run_is_left_alone(validate, adapter):
    options = (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=64", "actor_rollout_ref.actor.use_kl_loss=True")
    assert validate(*options, adapter(r=16, target_modules=["lm_head"]), of=adapter_check) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([f"{MODEL}.lora_alpha=64"], "model.lora_alpha=64"),
        ([f"{MODEL}.target_modules=[q_proj,v_proj]"], "model.target_modules=['q_proj', 'v_proj']"),
        ([f"{MODEL}.exclude_modules=[k_proj]"], "model.exclude_modules=['k_proj']"),
    ],
)
def test_options_that_the_adapter_overrules_are_named(validate, adapter, given, said):
    (message,) = validate(*PACKED, adapter(), *given, of=adapter_check)
    assert message.startswith(f"{said} has no effect beside model.lora_adapter_path: the adapter in ")


def test_options_that_agree_are_not_mentioned(validate, adapter):
    given = (f"{MODEL}.lora_alpha=16", f"{MODEL}.target_modules=[v_proj,q_proj]")
    assert validate(*PACKED, adapter(target_modules=["q_proj", "v_proj"]), *given, of=adapter_check) == []


@pytest.mark.parametrize("switch", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_the_reference_is_the_base_without_the_adapter_and_it_is_said(validate, adapter, switch):
    (message,) = validate(*PACKED, adapter(), f"{switch}=True", of=adapter_check)
    assert message.startswith(f"the reference of {switch}=True is the base without the adapter in ")
    assert validate(*PACKED, f"{switch}=True", of=adapter_check) == []
