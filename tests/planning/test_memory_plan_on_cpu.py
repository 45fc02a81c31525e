import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl_qerl.formats import get_format
from verl_qerl.planning.memory_plan import BYTES_PER_WEIGHT, GIB, Settings, check, passes, plan, rollout_weights, table
from verl_qerl.planning.model_shape import ModelShape

QWEN = {"vocab_size": 152_064, "rms_norm_eps": 1e-6}
CONFIG_7B = QWEN | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
CONFIG_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4}
CONFIG_32B = QWEN | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
CONFIG_32B |= {"num_attention_heads": 40, "num_key_value_heads": 8}
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "h200"


def test_what_is_held_by_hand():
    shape = ModelShape(hidden=32, intermediate=64, layers=2, vocabulary=100, query=32, key_value=16)
    weights = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 64 * 32 * 3)
    adapters = 2 * 4 * (64 * 2 + 48 * 2 + 96 * 3)
    rollout, update = plan(shape, Settings(rank=4, utilization=0.5), 1e6)
    assert update.held == {
        "packed base": weights * 9 / 16,
        "embedding and head": 2 * 2 * 100 * 32,
        "adapters": 4 * adapters,
        "optimizer": 8 * adapters,
        "gradients": 4 * adapters,
    }
    assert rollout.held["vLLM"] == 5e5
    assert rollout.certain == 5e5 + update.certain - update.held["gradients"]


@pytest.mark.parametrize("name", sorted(BYTES_PER_WEIGHT))
def test_the_base_takes_what_its_format_does(name):
    shape = ModelShape.from_config(CONFIG_7B)
    held = {form: plan(shape, Settings(rank=32, format=form), 80 * GIB)[1].held for form in ("nvfp4", name)}
    dense = torch.ones(256, 1024)
    of_a_weight = get_format(name).quantize(dense).size_bytes / dense.numel()
    assert BYTES_PER_WEIGHT[name] == pytest.approx(of_a_weight, rel=5e-3)  # but for a channel's or the weight's scale
    assert held[name]["packed base"] == shape.layers * shape.layer_weights * BYTES_PER_WEIGHT[name]
    assert held[name] | {"packed base": 0} == held["nvfp4"] | {"packed base": 0}
    with pytest.raises(ValueError, match="too little GPU memory"):
        plan(shape, Settings(rank=32, format=name, utilization=0.1), 10 * held[name]["packed base"])


def test_linears_left_in_bf16_are_counted_so_on_both_sides():
    shape, mlps = ModelShape.from_config(CONFIG_7B), 28 * 3 * 18944 * 3584
    settings = Settings(rank=32, utilization=0.5)
    before, after = (
        plan(shape, replace(settings, ignore=rules), 80 * GIB) for rules in [("lm_head",), ("lm_head", "re:.*mlp.*")]
    )
    assert before == plan(shape, settings, 80 * GIB)
    added = {"packed base": -mlps * 9 / 16, "linears in bf16": mlps * 2.0}
    for name, size in added.items():
        assert [phase.held[name] - old.held.get(name, 0) for phase, old in zip(after, before, strict=True)] == [
            size
        ] * 2
    assert [phase.certain - old.certain for phase, old in zip(after, before, strict=True)] == [sum(added.values())] * 2
    of_rollout = [rollout_weights(shape, replace(settings, ignore=rules)) for rules in ((), ("re:.*mlp.*",))]
    assert of_rollout[1] - of_rollout[0] == sum(added.values())
    # A rollout that maps the actor's packed base has the others for itself.
    shared = replace(settings, share_base=True, ignore=("re:.*mlp.*",))
    assert rollout_weights(shape, shared) == 2 * (mlps + shape.head_weights)


def test_linears_left_in_bf16_are_sharded_offloaded_gathered_and_not_decoded():
    shape, layer = ModelShape.from_config(CONFIG_7B), 3 * 18944 * 3584
    settings = Settings(rank=32, gpus=2, ignore=("re:.*mlp.*",))
    for changed, held in (({}, 28 * layer), ({"offload_policy": True}, 0)):
        assert plan(shape, replace(settings, **changed), 80 * GIB)[1].held["linears in bf16"] == held
    shards = replace(settings, shard_base=True)
    parts, attention = (
        [passes(shape, s) for s in (settings, shards, replace(shards, ignore=()))],
        shape.attention_weights,
    )
    assert parts[0]["gathered"] == 2 * shape.head_weights + 4 * layer
    assert parts[1]["gathered"] == parts[0]["gathered"] + 2 * attention * 9 // 16
    assert parts[2]["one layer"] - parts[0]["one layer"] == 2 * layer


def test_what_more_gpus_take_away():
    shape = ModelShape.from_config(CONFIG_7B)
    one = plan(shape, Settings(rank=32), 80 * GIB)[1].held
    two = plan(shape, Settings(rank=32, gpus=2), 80 * GIB)[1].held
    shared = plan(shape, Settings(rank=32, gpus=2, shard_base=True), 80 * GIB)[1].held
    assert two["packed base"] == one["packed base"]
    assert all(two[name] == one[name] / 2 for name in one if name != "packed base")
    assert all(shared[name] == one[name] / 2 for name in one)


def test_what_offloading_takes_from_the_rollout():
    shape = ModelShape.from_config(CONFIG_7B)
    away = Settings(rank=32, utilization=0.5, param_offload=True, optimizer_offload=True)
    rollout, update = plan(shape, away, 80 * GIB)
    assert rollout.held == {"vLLM": 40 * GIB}
    assert update.held == plan(shape, replace(away, param_offload=False), 80 * GIB)[1].held


def test_what_a_policy_of_offloading_keeps_on_the_host():
    shape, settings = ModelShape.from_config(CONFIG_7B), Settings(rank=32, utilization=0.5)
    before, after = (plan(shape, replace(settings, offload_policy=away), 80 * GIB) for away in (False, True))
    base = before[1].held["packed base"]
    assert [phase.certain for phase in after] == [40 * GIB + base, base]
    # The head comes for as long as it is multiplied by.
    assert after[1].total - base == before[1].total - before[1].certain + 2 * shape.head_weights


def test_passes_grow_with_tokens_and_shrink_with_checkpoints_and_chunks():
    shape, settings = ModelShape.from_config(CONFIG_7B), Settings(rank=32, tokens=8192)
    size = sum(passes(shape, settings).values())
    assert sum(passes(shape, replace(settings, tokens=16384)).values()) > size
    assert sum(passes(shape, replace(settings, checkpointing=False)).values()) > 5 * size
    assert sum(passes(shape, replace(settings, whole_logits=True)).values()) > size + 8 * GIB
    assert sum(passes(shape, replace(settings, gpus=2, shard_base=True)).values()) > size


@pytest.mark.parametrize(
    ("file", "tokens", "whole_logits"),
    [("train_step_7b.json", 8 * (320 + 512), True), ("train_step_7b_ours.json", 8 * (256 + 2048), False)],
)
def test_the_7b_step_that_was_measured(file, tokens, whole_logits):
    rows = json.loads((RESULTS / file).read_text())["steps"]
    settings = Settings(rank=32, tokens=tokens, whole_logits=whole_logits, utilization=0.4)
    rollout, update = plan(ModelShape.from_config(CONFIG_7B), settings, 139.8 * GIB)
    for row in rows[1:]:
        assert rollout.total / GIB == pytest.approx(row["phases"]["gen"]["peak_gib"], rel=0.1)
        assert update.total / GIB == pytest.approx(row["phases"]["update_actor"]["peak_gib"], rel=0.1)
    if file == "train_step_7b_ours.json":  # whose KV cache keeps to its share, as that of the other does not
        assert all(1 <= rollout.total / GIB / row["phases"]["gen"]["peak_gib"] < 1.05 for row in rows)


@pytest.mark.parametrize(
    ("file", "gib", "utilization", "above"),
    [("train_step_32b_80gib.json", 139.8, 0.32, 1.02), ("../h100/train_step_32b.json", 79.2, 0.566, 1.03)],
)
def test_the_32b_steps_that_were_measured(file, gib, utilization, above):
    (_, row) = json.loads((RESULTS / file).read_text())["steps"]
    settings = Settings(rank=32, tokens=4 * (256 + 2048), utilization=utilization)
    rollout, update = plan(ModelShape.from_config(CONFIG_32B), settings, gib * GIB)
    assert 1 <= rollout.total / GIB / row["phases"]["gen"]["peak_gib"] < above
    assert update.total / GIB == pytest.approx(row["phases"]["update_actor"]["peak_gib"], rel=0.03)


def test_32b_fits_80_gib_or_is_refused():
    shape, settings = ModelShape.from_config(CONFIG_32B), Settings(rank=32, tokens=4736, utilization=0.6)
    phases = plan(shape, settings, 79.6 * GIB)
    check(phases, 79.6 * GIB)
    assert all(phase.total < 79.6 * GIB for phase in phases)
    phases = plan(shape, replace(settings, utilization=0.75), 79.6 * GIB)
    with pytest.raises(
        ValueError, match=r"^too little GPU memory .*: the rollout holds 81\.9 GiB \(vLLM 59\.7, packed"
    ):
        check(phases, 79.6 * GIB)
    with pytest.raises(ValueError, match=r"^too little GPU memory .*: the update holds 23\.2 GiB \(packed base 16\.3"):
        check(phases[1:], 20 * GIB)


def test_a_rollout_that_is_given_less_than_its_weights():
    shape, settings = ModelShape.from_config(CONFIG_32B), Settings(rank=32, utilization=0.2)
    with pytest.raises(ValueError, match=r"vLLM's weights take 19\.2 GiB .*=0\.2 of 79\.6 GiB gives it 15\.9\."):
        plan(shape, settings, 79.6 * GIB)
    plan(shape, replace(settings, tensor_parallel=2), 79.6 * GIB)
    plan(shape, replace(settings, share_base=True), 79.6 * GIB)  # the actor's, which it maps, is not its own


def test_the_table_names_every_part():
    total = 80 * GIB
    lines = table(plan(ModelShape.from_config(CONFIG_7B), Settings(rank=32, utilization=0.5), total), total).split("\n")
    assert lines[0].startswith("rollout: ")
    assert "  vLLM: 40.00" in lines
    assert "  packed base: 3.42" in lines
    assert any(line.startswith("  checkpoints: ") and line.endswith(" (estimate)") for line in lines)


def test_a_mixture_of_experts_by_hand():
    sizes = {"hidden": 32, "intermediate": 64, "layers": 3, "vocabulary": 100, "query": 32, "key_value": 16}
    experts = {"sparse": (1, 2), "experts": 8, "experts_per_token": 2, "expert_intermediate": 16}
    shape, attention = ModelShape(**sizes, **experts), 32 * 32 * 2 + 16 * 32 * 2
    settings = Settings(rank=4, tokens=10)
    _, update = plan(shape, settings, 1e6)
    assert update.held["packed base"] == 9 / 16 * (3 * attention + 64 * 32 * 3 + 2 * 8 * 16 * 32 * 3)
    assert update.held["adapters"] == 4 * 3 * 4 * (64 * 2 + 48 * 2)  # none on gates, ups and downs
    layer = 10 * (20 * 32 + 2 * (3 * 32 + 4 * 16) + 2 * (8 * 16 + 4 * 32))  # more than the dense one
    assert update.estimated["one layer"] == layer + 2 * (attention + 8 * 2 * 16 * 32)
    whole = passes(shape, replace(settings, checkpointing=False))["all layers"]
    dense = 10 * (20 * 32 + 2 * (3 * 32 + 4 * 16) + 8 * 64)
    assert whole == 2 * layer + dense + 2 * 8 * 2 * 16 * 32
    for refused in ({"shard_base": True, "gpus": 2}, {"share_base": True}, {"format": "int8"}):
        with pytest.raises(ValueError, match=r"^no plan for a mixture of experts with format="):
            plan(shape, replace(settings, **refused), 1e6)
