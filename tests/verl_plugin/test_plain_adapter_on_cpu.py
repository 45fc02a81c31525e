from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from peft import LoraConfig, get_peft_model

from verl_qerl.testing import random_qwen2
from verl_qerl.verl_plugin.config import BaseOptions
from verl_qerl.verl_plugin.plain_adapter import check_plain


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"lora_dropout": 0.1}, {"rank_pattern": {}}, {"modules_to_save": []}]
)
def test_lora_and_rslora_go(options):
    check_plain(LoraConfig(r=4, target_modules=["q_proj"], **options))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"down_proj": 64}),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_what_the_rollout_would_leave_out_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"leave out a part of the adapter: {option}=.*Accepted is "):
        check_plain(LoraConfig(r=8, target_modules=["q_proj"], **{option: value}))


def test_the_engine_refuses_one_that_it_reads(tmp_path):
    saved = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], alpha_pattern={"down_proj": 64})
    get_peft_model(random_qwen2(), saved).save_pretrained(tmp_path)
    import verl.workers.engine  # noqa: F401  first: it imports ours

    from verl_qerl.verl_plugin.engine import QerlFSDPEngine

    engine = object.__new__(QerlFSDPEngine)
    engine.engine_config = SimpleNamespace(qerl=BaseOptions())
    engine.model_config = SimpleNamespace(lora_adapter_path=str(tmp_path), use_shm=False)
    with pytest.raises(ValueError, match=r"a part of the adapter: alpha_pattern="):
        engine._build_lora_module(random_qwen2())
