import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from peft import LoraConfig

from verl_qerl.verl_plugin.actor.base_record import adapter_options, base_record
from verl_qerl.verl_plugin.config.base_options import BaseOptions

PLAIN = {"r": 32, "lora_alpha": 64, "use_rslora": False, "target_modules": ["k_proj", "q_proj"]}


# Two copies, each over four ranks.
MESH = SimpleNamespace(ndim=2, size=lambda: 8, get_group=lambda dim: SimpleNamespace(size=lambda: (2, 4)[dim]))


def lora(**options):
    return LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, target_modules=["q_proj", "k_proj"], **options)


def test_plain_lora_names_what_it_computes_and_nothing_else():
    found = adapter_options(lora())
    assert found == PLAIN
    assert json.loads(json.dumps(found)) == found


def test_what_peft_empties_while_it_adapts_a_model_is_no_option():
    config = lora()
    config.target_parameters = set()  # as PEFT 0.21 leaves it on a mixture of experts
    assert adapter_options(config) == PLAIN


@pytest.mark.parametrize(
    "option", [{"use_rslora": True}, {"use_dora": True}, {"lora_dropout": 0.1}, {"rank_pattern": {"q_proj": 4}}]
)
def test_what_differs_from_the_defaults_is_named(option):
    assert adapter_options(lora(**option)) == PLAIN | option


def test_the_base_is_named_so_that_another_process_finds_it(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    record = base_record("model", BaseOptions(scale="minmax"), {"a": "0"}, lora(), MESH)
    assert Path(record.base) == (tmp_path / "model").resolve()
    assert (record.scale, record.ignore, record.digests) == ("minmax", ("lm_head",), {"a": "0"})
    assert base_record("org/model", BaseOptions(), {}, lora(), MESH).base == "org/model"


@pytest.mark.parametrize(("trained", "norms"), [(False, ()), (True, ("input_layernorm", "post_attention_layernorm"))])
def test_norms_that_are_trained_are_named(trained, norms):
    assert base_record("org/model", BaseOptions(train_norms=trained), {}, lora(), MESH).trained_norms == norms


def test_the_format_of_the_base_is_named():
    found = {form: base_record("m", BaseOptions(format=form), {}, lora(), MESH).format for form in ("nvfp4", "int8")}
    assert found == {"nvfp4": "nvfp4", "int8": "int8"}


def test_how_the_shards_lie_is_named():
    record = base_record("m", BaseOptions(), {}, lora(), MESH)
    assert (record.world_size, record.sharded_over) == (8, 4)
    older = replace(record, sharded_over=0)  # written before it was kept
    assert record.lies_as(record)
    assert record.lies_as(older)
    assert older.lies_as(record)
    assert not record.lies_as(replace(record, sharded_over=8))
    assert not older.lies_as(replace(record, world_size=4))
