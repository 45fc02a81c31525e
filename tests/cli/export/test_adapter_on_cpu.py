import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from verl_qerl.checkpoints.record import BaseRecord
from verl_qerl.cli.export.adapter import read_adapter, write_peft
from verl_qerl.cli.export.fsdp_checkpoint import Checkpoint
from verl_qerl.errors import CheckpointFormatError

SHAPES = {
    "layers.0.q_proj": (32, 16),
    "layers.0.up_proj": (48, 16),
    "layers.1.q_proj": (32, 16),
    "layers.1.up_proj": (48, 16),
    "embed_tokens": (64, 16),
}
TRAINED = ("layers.0.q_proj", "layers.1.q_proj")
OPTIONS = {"r": 4, "lora_alpha": 6, "use_rslora": False, "target_modules": ["q_proj"]}


def factors(modules=TRAINED, r=4):
    generator = torch.Generator().manual_seed(0)
    shapes = {module: SHAPES[module] for module in modules}
    return {
        module: (torch.randn(r, K, generator=generator), torch.randn(N, r, generator=generator))
        for module, (N, K) in shapes.items()
    }


def checkpoint(found=None, **options) -> Checkpoint:
    record = BaseRecord("m", "mse", (), {}, OPTIONS | options)
    return Checkpoint(Path("run"), 1, found or factors(), {}, record, {})


class Layers(nn.Module):
    """A model whose linears are those of SHAPES."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.q_proj, layer.up_proj = nn.Linear(16, 32, bias=False), nn.Linear(16, 48, bias=False)

    def prepare_inputs_for_generation(self):
        """PEFT wants a causal language model to have it."""

    def forward(self, x):
        return torch.cat([linear(x) for layer in self.layers for linear in (layer.q_proj, layer.up_proj)], dim=-1)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("modules", [TRAINED, ("layers.1.q_proj",)], ids=["both", "one layer"])
def test_peft_computes_what_we_merge(tmp_path, use_rslora, modules):
    peft = pytest.importorskip("peft")
    adapter = read_adapter(checkpoint(factors(modules), use_rslora=use_rslora, target_modules=list(modules)), SHAPES)
    write_peft(tmp_path, adapter, "base")
    model = Layers()
    x = torch.randn(3, 16)
    expected = []
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            delta = adapter.delta(name, torch.device("cpu")) if name in modules else 0
            expected.append(x @ (linear.weight + delta).T)
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(model, tmp_path)
        found = loaded.base_model(x)
    assert adapter.scaling == (3 if use_rslora else 1.5)
    torch.testing.assert_close(found, torch.cat(expected, dim=-1), rtol=1e-5, atol=1e-5)
    changed = [name for name, module in loaded.named_modules() if name.endswith("lora_A.default")]
    assert len(changed) == len(modules), "PEFT makes an adapter where none was trained"


def test_verls_own_record_is_enough_for_plain_lora(caplog):
    stock = replace(checkpoint(), record=None, lora_meta={"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"})
    adapter = read_adapter(stock, SHAPES)
    assert (adapter.r, adapter.scaling, adapter.targets) == (4, 2, ("q_proj",))
    assert caplog.text.count("verl leaves out use_rslora there") == 1  # with which training scaled by 4
    caplog.clear()
    read_adapter(checkpoint(), SHAPES)
    assert not caplog.text


@pytest.mark.parametrize(
    ("rule", "excluded", "modules"),
    [
        ([r"layers.0.q_proj", "layers.1.q_proj"], None, TRAINED),
        (r".*\.1\.(q|up)_proj", None, ("layers.1.q_proj", "layers.1.up_proj")),
        (["q_proj", "up_proj"], ["up_proj"], TRAINED),
        (["q_proj", "up_proj"], r"layers\.0.*", ("layers.1.q_proj", "layers.1.up_proj")),
    ],
)
def test_targets_are_named_by_pefts_rules(rule, excluded, modules):
    options = {"target_modules": rule} | ({"exclude_modules": excluded} if excluded else {})
    assert set(read_adapter(checkpoint(factors(modules), **options), SHAPES).factors) == set(modules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 8}, r"another rank than its configuration: 'layers.0.q_proj' has A \(4, 16\) and B \(32, 4\), r=8"),
        ({"target_modules": ["q_proj", "up_proj"]}, "'layers.0.up_proj' is not in the shards and in target_modules"),
        ({"target_modules": ["layers.0.q_proj"]}, "'layers.1.q_proj' is in the shards and not in target_modules"),
        ({"target_modules": 5}, r"names no modules: target_modules=5, exclude_modules=None in run \('int' object"),
        ({"target_modules": "("}, r"names no modules: target_modules='\(', exclude_modules=None in run \(missing \)"),
        ({"exclude_modules": 5}, r"names no modules: target_modules=\['q_proj'\], exclude_modules=5 in run"),
        ({"lora_alpha": None}, "does not say how its adapter is scaled: r=4, lora_alpha=None"),
        ({"lora_alpha": math.nan}, "does not say how its adapter is scaled: r=4, lora_alpha=nan"),
        ({"r": "4"}, "does not say how its adapter is scaled"),
    ],
)
def test_tensors_and_configuration_that_disagree_are_refused(options, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_adapter(checkpoint(**options), SHAPES)


@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}, {"init_lora_weights": "pissa"}]
)
def test_other_kinds_of_adapters_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"no plain LoRA: {name}=.*Save the model with PEFT itself\."):
        read_adapter(checkpoint(**option), SHAPES)


def test_options_of_training_alone_are_no_obstacle():
    read_adapter(checkpoint(lora_dropout=0.1, init_lora_weights="gaussian"), SHAPES)


def test_a_base_of_other_shapes_is_refused():
    with pytest.raises(CheckpointFormatError, match=r"changes \(32, 16\), the base has \(32, 32\)"):
        read_adapter(checkpoint(), SHAPES | {"layers.0.q_proj": (32, 32)})
    stock = replace(checkpoint(), record=None, lora_meta={"r": 4, "lora_alpha": 8})
    for found in (stock, checkpoint(target_modules=list(TRAINED))):
        with pytest.raises(
            CheckpointFormatError, match=r"the base has no such linear.* Name the right base with --base"
        ):
            read_adapter(found, {"layers.0.q_proj": (32, 16)})


def test_values_that_are_not_finite_are_refused():
    found = factors()
    found["layers.1.q_proj"][1][3, 2] = float("nan")
    with pytest.raises(CheckpointFormatError, match=r"'layers.1.q_proj' holds NaN or infinite values"):
        read_adapter(checkpoint(found), SHAPES)
