"""Decoder layers of real shapes with random weights, held in each of the ways that bench_actor.py compares."""

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import rollout_arms
import torch
import torch.nn as nn
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import BLOCK_SIZE, nvfp4_weight
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.adapted_linear import fuse_adapters
from verl_qerl.modules.convert import replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear

# Of Qwen2.5; "tiny" is for a CPU.
SHAPES = {name.lower(): rollout_arms.SHAPES[name] for name in ("1.5B", "7B", "14B", "32B")}
SHAPES["tiny"] = rollout_arms.Shape(64, 96, 2, 4, 2)
VOCABULARY = 152_064
RANK, ALPHA = 32, 64


@dataclass(frozen=True)
class Arm:
    """A way to hold the base and to compute the adapters.

    Attributes:
        base: bf16, nvfp4 or nf4.
        fused: Whether the adapters are fused; else they are PEFT's.
    """

    base: str
    fused: bool = False


ARMS = {
    "bf16_peft": Arm("bf16"),
    "bf16_fused": Arm("bf16", fused=True),
    "nvfp4_peft": Arm("nvfp4"),
    "nvfp4_fused": Arm("nvfp4", fused=True),
    "nf4_peft": Arm("nf4"),
}


def missing(arm: Arm) -> str | None:
    """Why an arm cannot run here, or None."""
    if arm.base != "nf4":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"bitsandbytes: {error}"
    return None


def versions() -> dict[str, str]:
    """Of what the arms are made of; what is not installed is left out."""
    found = {}
    for name in ("transformers", "peft", "bitsandbytes"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True)
class Base:
    """Packed weights of the decoder linears of one shape; every arm but nf4 computes with exactly these values.

    Attributes:
        shape: A key of SHAPES.
    """

    shape: str
    layers: int
    packed: dict[str, PackedWeight]

    def to(self, device: str) -> "Base":
        """The same on another device."""
        return Base(self.shape, self.layers, {name: weight.to(device) for name, weight in self.packed.items()})


def draw_base(shape: str, layers: int, device: str) -> Base:
    """Random codes and block scales, about as large as trained weights (0.02)."""
    generator = torch.Generator(device).manual_seed(0)
    packed = {}
    for name, linear in skeleton(shape, layers).named_modules():
        if isinstance(linear, nn.Linear) and ".layers." in name:
            packed[name] = random_packed(linear.out_features, linear.in_features, generator)
    return Base(shape, layers, packed)


def random_packed(N: int, K: int, generator: torch.Generator) -> PackedWeight:
    """A packed weight drawn bit by bit on the generator's device: no dense weight is made and nothing is quantized."""
    device = generator.device
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.randint(0x70, 0x7F, (N, K // BLOCK_SIZE), dtype=torch.uint8, device=device, generator=generator)
    return nvfp4_weight(codes, scale.view(torch.float8_e4m3fn), torch.tensor(2.0**-15, device=device))


def build(base: Base, arm: Arm, device: str, kind: type[NVFP4Linear] = NVFP4Linear) -> nn.Module:
    """The PEFT model of an arm, in bf16, adapters as if trained; `kind` holds its packed linears."""
    model = skeleton(base.shape, base.layers)
    if arm.base == "nvfp4":
        for name, linear in replace_linears(model, lambda name: ".layers." in name, kind).items():
            linear.fill(base.packed[name])
    _materialize(model, base, device)
    if arm.base == "nf4":
        _to_nf4(model, device)
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    peft_model = get_peft_model(model.to(device), config)
    generator = torch.Generator(device).manual_seed(2)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
            parameter.data.normal_(std=0.02, generator=generator)
    if arm.fused and fuse_adapters(peft_model) != 7 * base.layers:
        raise RuntimeError("not every linear was fused")
    return peft_model.train()


def stack_of(model: nn.Module) -> nn.Module:
    """The decoder layers and their final norm: embeddings in, hidden states out."""
    return model.get_submodule("base_model.model.model")


def skeleton(shape: str, layers: int, vocabulary: int = 16) -> Qwen2ForCausalLM:
    """The model of a shape on the meta device."""
    found = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=found.hidden,
        intermediate_size=found.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=found.heads,
        num_key_value_heads=found.kv_heads,
        attn_implementation="sdpa",
    )
    with init_empty_weights(include_buffers=False):
        return Qwen2ForCausalLM(config)


def _materialize(model: nn.Module, base: Base, device: str) -> None:
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        if not parameter.is_meta:
            continue
        if module_name in base.packed and leaf == "weight":
            value = dequantize(base.packed[module_name])
        else:
            value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            value = value.fill_(1) if "norm" in name else value.normal_(std=0.02, generator=generator)
        setattr(model.get_submodule(module_name), leaf, nn.Parameter(value, requires_grad=False))


def _to_nf4(model: nn.Module, device: str) -> None:
    import bitsandbytes as bnb

    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or ".layers." not in name:
            continue
        bias = linear.bias is not None
        sizes = linear.in_features, linear.out_features
        packed = bnb.nn.Linear4bit(*sizes, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        options = {"quant_type": "nf4", "compress_statistics": True, "module": packed}
        packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
        packed.bias = linear.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed.to(device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # where PEFT looks
