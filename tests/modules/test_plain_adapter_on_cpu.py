import pytest

pytest.importorskip("verl")

from peft import LoraConfig

from verl_qerl.modules.plain_adapter import check_plain
from verl_qerl.verl_plugin.actor.base_record import adapter_options


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"lora_dropout": 0.1}, {"rank_pattern": {}}, {"modules_to_save": []}]
)
def test_lora_and_rslora_go(options):
    check_plain(adapter_options(LoraConfig(r=4, target_modules=["q_proj"], **options)), "Train another.")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"down_proj": 64}),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("layers_to_transform", [0]),
        ("trainable_token_indices", [5]),
        ("target_parameters", ["mlp.experts.down_proj"]),
    ],
)
def test_what_the_rollout_would_leave_out_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"^no plain LoRA: {option}=.* are accepted.* Train another\.$"):
        check_plain(adapter_options(LoraConfig(r=8, target_modules=["q_proj"], **{option: value})), "Train another.")
