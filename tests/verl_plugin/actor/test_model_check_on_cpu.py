"""Models that a run cannot use are refused by verl's check of a run, before Ray starts."""

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from qerl_testing import random_decoder

pytest.importorskip("verl")

from verl.utils.fs import copy_to_local

MODEL = "actor_rollout_ref.model"
PACKED = ("+rollout=nvfp4", f"{MODEL}.lora_rank=8")
TEXT = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SEES = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 2}}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8_CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    }
}
PACKED_CONFIG = TEXT | {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}


@pytest.fixture
def written(tmp_path):
    def write(config: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.mark.parametrize("options", [PACKED, ("+rollout=int8",)], ids=["adapter", "all weights"])
def test_a_model_that_sees_is_refused(validate, written, options):
    path = written(SEES)
    with pytest.raises(ValueError, match=rf"^model\.path={path} is a Qwen2_5_VLForConditionalGeneration with vision_"):
        validate(*options, f"{MODEL}.path={path}")
    validate(*options, f"{MODEL}.path={written(TEXT)}")


@pytest.mark.parametrize("options", [PACKED, ("+rollout=int8",), ("+aqn.enabled=true",)], ids=str)
def test_heads_that_the_rollouts_gpus_cannot_share_alike_are_refused(validate, written, options):
    given = (*options, f"{MODEL}.path={written(TEXT | {'num_attention_heads': 28})}", "trainer.n_gpus_per_node=8")
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    with pytest.raises(ValueError, match=rf"^{shared}=8 does not divide the 28 attention heads of model\.path="):
        validate(*given, f"{shared}=8")
    validate(*given, f"{shared}=4")


def test_a_stock_run_may_have_any_model(validate, written):
    validate(f"{MODEL}.path={written(SEES)}", f"+{MODEL}.override_config.rope_theta=5e5")
    validate("algorithm.adv_estimator=gae", f"critic.model.path={written(PACKED_CONFIG)}", use_critic=True)


@pytest.mark.parametrize("path", ["nowhere", "nobody/none-such"])
def test_a_model_that_only_the_workers_reach_is_theirs_to_refuse(validate, monkeypatch, path):
    def download(*names):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    validate(*PACKED, f"{MODEL}.path={path}")


def test_the_path_of_a_critic_that_nobody_sets_is_told_as_the_default_of_verl(validate, written, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = (*PACKED, f"{MODEL}.path={written(TEXT)}", "algorithm.adv_estimator=gae")
    said = r"^no such model: critic\.model\.path=~/models/\S+ This is verl's default\. A directory .* Set it\.$"
    with pytest.raises(ValueError, match=said):
        validate(*options, use_critic=True)
    with pytest.raises(ValueError, match=r"^critic\.model\.path=null names no model\. A directory in .* Set it\.$"):
        validate(*options, "critic.model.path=null", use_critic=True)


@pytest.mark.parametrize("options", [PACKED, ("+aqn.enabled=true",)], ids=["packed", "noise alone"])
@pytest.mark.parametrize("path", ["/none/such", "~/none/such", "./none", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(validate, monkeypatch, options, path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    named = f"{MODEL}.path='{path}'"
    with pytest.raises(ValueError, match=rf"^no such model: actor_rollout_ref\.model\.path={path}\. .*A directory in "):
        validate(*options, named)
    with pytest.raises(ValueError, match=rf"^no such model: critic\.model\.path={path}\. .*A directory in "):
        validate(*options, f"critic.model.path='{path}'", use_critic=True)
    validate(*options, f"critic.model.path='{path}'")
    validate(*options, named, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    validate(named)
    files = ("reward.custom_reward_function.path", "data.custom_cls.path")
    for name, what in ((f"{MODEL}.lora_adapter_path", "adapter"), *((file, "file") for file in files)):
        with pytest.raises(ValueError, match=rf"^no such {what}: {name}={path}\. .*is accepted\. Check the path"):
            validate(*options, f"{name}='{path}'")
        validate(f"{name}='{path}'")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    validate(*options, named)


def test_a_reward_that_its_file_does_not_have_is_refused(validate, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file, reward = tmp_path / "reward.py", "reward.custom_reward_function"
    file.write_text("def compute_score(**given):\n    return 1.0\n")
    given = ("+aqn.enabled=true", f"{reward}.path={file}")
    for name in ("compute_scor", "null"):
        with pytest.raises(ValueError, match=rf"^no such function: {reward}\.name=\w+ is nowhere in {file}\. The name"):
            validate(*given, f"{reward}.name={name}")
    validate(*given)
    validate(*given[1:], f"{reward}.name=compute_scor")
    validate(*given, f"{reward}.name=other", "trainer.nnodes=2", "trainer.n_gpus_per_node=4")


def test_a_class_of_data_that_its_file_does_not_have_is_refused(validate, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file, node = tmp_path / "data.py", "data.custom_cls"
    file.write_text("class Questions:\n    pass\n")
    given = ("+aqn.enabled=true", f"{node}.path={file}")
    with pytest.raises(ValueError, match=rf"^no such class: {node}\.name=Question is nowhere in {file}\. The name"):
        validate(*given, f"{node}.name=Question")
    validate(*given, f"{node}.name=Questions")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("reward.py", "from elsewhere import *\n"),
        ("reward.py", "from elsewhere import*\n"),
        ("reward.py", "from elsewhere import \\\n    *\n"),
        ("reward.py", 'globals().update({f"{what}_score": max for what in ("compute",)})\n'),
        ("reward.py", "def __getattr__(name):\n    return max\n"),
        ("reward.pyc", "compute_scorer"),  # a name of byte code has no end that text would show
    ],
)
def test_a_reward_whose_names_its_file_does_not_spell_is_left_to_verl(validate, tmp_path, monkeypatch, file, content):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / file).write_text(content)
    validate("+aqn.enabled=true", f"reward.custom_reward_function.path={tmp_path / file}")


@pytest.mark.parametrize("options", [PACKED, ("+rollout=int8",)], ids=["adapter", "all weights"])
def test_an_ignore_that_does_not_fit_the_weights_is_refused(validate, tmp_path, monkeypatch, options):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    random_decoder("qwen2").save_pretrained(tmp_path)
    given = (*options, f"{MODEL}.path={tmp_path}")
    for ignored, sentence in (
        ("'re:.*q_proj'", "a group of linears that vLLM runs as one is ignored in part: "),
        ("lm_haed", "ignore .* names no module|lm_haed"),
    ):
        with pytest.raises(ValueError, match=sentence):
            validate(*given, f"+qerl.base.ignore=[{ignored}]")
    validate(*given, "+qerl.base.ignore=['re:.*down_proj']")
    validate(*given, "+qerl.base.ignore=['re:.*q_proj']", "trainer.nnodes=2", "trainer.n_gpus_per_node=4")


def test_weights_in_another_format_are_refused(validate, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    random_decoder("qwen2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | FP8_CONFIG))
    with pytest.raises(ValueError, match="is quantized in another format: fp8"):
        validate(*PACKED, f"{MODEL}.path={tmp_path}")


def test_a_slash_at_the_end_is_refused(validate, written, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = f"{written(TEXT)}/"
    with pytest.raises(AssertionError, match="last char"):
        copy_to_local(path)
    for name in ("path", "lora_adapter_path"):
        with pytest.raises(
            ValueError, match=rf"^verl takes no path with a slash at its end: {MODEL}\.{name}={path}\. "
        ):
            validate(*PACKED, f"{MODEL}.{name}={path}")


def test_a_folder_that_is_no_model_is_refused(validate, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json does not exist\. A directory in Hugging Face"):
        validate("+aqn.enabled=true", f"{MODEL}.path={tmp_path}")
    validate(f"{MODEL}.path={tmp_path}")


@pytest.mark.parametrize(
    ("option", "said"), [("scale=minmax", "scale=minmax"), ("ignore=['re:.*mlp.*']", r"ignore=\['re:\.\*mlp\.\*'\]")]
)
def test_a_quantized_model_has_made_its_choices(validate, written, option, said):
    options = (*PACKED, f"+qerl.base.{option}")
    path = written(PACKED_CONFIG)
    with pytest.raises(
        ValueError, match=rf"^qerl\.base\.{said} has no effect on model\.path={path}, which is quantized"
    ):
        validate(*options, f"{MODEL}.path={path}")
    validate(*PACKED, f"{MODEL}.path={path}")
    validate(*options, f"{MODEL}.path={written(TEXT)}")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rope_scaling={rope_type:yarn,factor:4.0}", r"rope_scaling=\{'rope_type': 'yarn', 'factor': 4\.0\}"),
        ("rope_theta=5e5", r"rope_theta=500000\.0"),
        ("model_config={rope_theta:5e5}", r"rope_theta=500000\.0"),
    ],
)
def test_another_position_embedding_belongs_into_config_json(validate, option, said):
    with pytest.raises(ValueError, match=rf"^model\.override_config\.{said} does not go together with \+rollout"):
        validate(*PACKED, f"+{MODEL}.override_config.{option}")
    validate(*PACKED, f"+{MODEL}.override_config.attention_dropout=0.1")


def test_noise_on_a_family_whose_norms_are_not_known_is_refused_before_the_engine_starts(validate, written):
    noisy = f"{MODEL}.path={written({'model_type': 'gemma2'})}", "+aqn.enabled=true"
    with pytest.raises(ValueError, match=r"^it is not known where model_type=gemma2 has the norms"):
        validate(*noisy)
    validate(*noisy, "+aqn.targets=[input_layernorm]")
    written({"model_type": "gemma3", "text_config": {"model_type": "llama"}})  # vLLM's to read
    validate(*noisy)


def test_noise_on_norms_that_the_weights_do_not_have_is_refused_before_the_engine_starts(
    validate, tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    random_decoder("qwen3").save_pretrained(tmp_path)
    noisy = f"{MODEL}.path={tmp_path}", "+aqn.enabled=true"
    for lost in ("input_layer_norm", "q_proj", "lm_head"):
        with pytest.raises(
            ValueError, match=rf"^aqn\.targets has \[{lost}\], .* Accepted are input_layernorm, k_norm, norm, "
        ):
            validate(*noisy, f"+aqn.targets=[input_layernorm,{lost}]")
    validate(*noisy, "+aqn.targets=[q_norm]")
    (tmp_path / "beside.safetensors").write_bytes(b"damaged")  # the model is read without it
    validate(*noisy)


def test_verl_itself_cannot_set_a_mapping():
    """What the sentence says of verl; once it can, the option should reach the rollout too."""
    from transformers import Qwen2Config
    from verl.utils.model import update_model_config

    with pytest.raises(AttributeError):
        update_model_config(Qwen2Config(), {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64}})


def test_a_quantized_critic_is_refused(validate, written):
    critic = ("algorithm.adv_estimator=gae", f"critic.model.path={written(PACKED_CONFIG)}")
    with pytest.raises(ValueError, match=r"^critic\.model\.path=.* is quantized: verl trains all weights of a critic"):
        validate(*PACKED, *critic, use_critic=True)
    validate(*PACKED, *critic)  # without a critic nothing reads it
