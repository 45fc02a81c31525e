"""Which linears `python -m verl_qerl tune` measures: those of known models, and of any other by its config.json."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.model_config import read_config
from verl_qerl.kernels.rollout.w4a16_launch import MULTIPLE
from verl_qerl.planning.model_shape import ModelShape

Shape = tuple[int, int]  # (out_features, in_features) of a fused linear as vLLM holds it


def _linears(config: Mapping[str, Any], ranks: int) -> list[Shape]:
    """What each rank of a tensor-parallel rollout has: some outputs of qkv and gate_up, some inputs of o and down.

    In vLLM (model_executor/layers/linear.py) ranks share a head of k and v where there are fewer.

    Raises:
        ValueError: So many ranks cannot share the model, or config.json is of none that has a shape.
    """
    shape, heads = ModelShape.from_config(config), config["num_attention_heads"]
    head_size = shape.query // heads
    of_keys, columns = shape.key_value // head_size, shape.intermediate if len(shape.sparse) < shape.layers else 0
    if ranks < 1 or heads % ranks or columns % ranks or (of_keys % ranks and ranks % of_keys):
        raise ValueError(
            f"no such rollout: --tensor-parallel {ranks}. A number that divides {heads} heads, {of_keys} of keys and"
            f" {columns} columns is accepted. Change --tensor-parallel."
        )
    qkv = head_size * (heads // ranks + 2 * max(1, of_keys // ranks))
    found = [(qkv, shape.hidden), (shape.hidden, shape.query // ranks)]
    if columns:
        found += [(2 * columns // ranks, shape.hidden), (shape.hidden, columns // ranks)]
    return found


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES_OF = {
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64),
    "qwen2.5-1.5b": (1536, 8960, 12, 2, 128),
    "qwen2.5-3b": (2048, 11008, 16, 2, 128),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128),
    "qwen2.5-14b": (5120, 13824, 40, 8, 128),
    "qwen2.5-32b": (5120, 27648, 40, 8, 128),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
    "qwen3-1.7b": (2048, 6144, 16, 8, 128),
    "qwen3-4b": (2560, 9728, 32, 8, 128),
    "qwen3-8b": (4096, 12288, 32, 8, 128),
    "qwen3-14b": (5120, 17408, 40, 8, 128),
    "qwen3-32b": (5120, 25600, 64, 8, 128),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128),
}
# Layers and vocabulary are not measured: any number does.
_ANY = {"num_hidden_layers": 1, "vocab_size": 1}
_KNOWN = {name: _ANY | dict(zip(_SIZES, sizes, strict=True)) for name, sizes in _SIZES_OF.items()}
MODELS = {name: tuple(_linears(config, 1)) for name, config in _KNOWN.items()}


def shapes_of(models: Iterable[str], ranks: int = 1) -> list[Shape]:
    """The linears of some models that our kernel takes, in order and each once.

    Args:
        models: Names of MODELS, directories with a config.json, or such files.

    Raises:
        ValueError: A model is neither, so many ranks cannot share it, or none of its linears can be measured.
    """
    found: set[Shape] = set()
    for model in models:
        linears = _linears(_KNOWN[model] if model in _KNOWN else _read(Path(model)), ranks)
        taken = {shape for shape in linears if not any(size % MULTIPLE for size in shape)}
        if not taken:
            raise ValueError(
                f"nothing to measure: the linears of {model} are {linears}. Multiples of {MULTIPLE} are accepted. A"
                " rollout of it stays on vLLM's Marlin."
            )
        found |= taken
    return sorted(found)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"nothing to measure: --models {path} is no model. {', '.join(MODELS)} and directories with a config.json"
            " are accepted. Check the name."
        )
    return read_config(file)
