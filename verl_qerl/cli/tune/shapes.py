"""Which linears `python -m verl_qerl tune` measures: those of known models, and of any other by its config.json."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from verl_qerl.checkpoints.model_config import read_config
from verl_qerl.kernels.rollout.w4a16_launch import MULTIPLE
from verl_qerl.planning.model_shape import ModelShape

Shape = tuple[int, int]  # (out_features, in_features) of a fused linear as vLLM holds it


class Sizes(NamedTuple):
    """Sizes of a decoder from config.json; `intermediate` is 0 where all layers have experts."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def linears(self, ranks: int) -> list[Shape]:
        """What each rank of a tensor-parallel rollout has: some outputs of qkv and gate_up, some inputs of o and down.

        In vLLM (model_executor/layers/linear.py) ranks share a head of k and v where there are fewer.

        Raises:
            ValueError: So many ranks cannot share these.
        """
        if (
            ranks < 1
            or self.heads % ranks
            or self.intermediate % ranks
            or (self.kv_heads % ranks and ranks % self.kv_heads)
        ):
            raise ValueError(
                f"no such rollout: --tensor-parallel {ranks}. A number that divides {self.heads} heads, {self.kv_heads}"
                f" of keys and {self.intermediate} columns is accepted. Change --tensor-parallel."
            )
        heads = self.heads // ranks + 2 * max(1, self.kv_heads // ranks)
        found = [(heads * self.head_dim, self.hidden), (self.hidden, self.heads // ranks * self.head_dim)]
        if self.intermediate:
            columns = self.intermediate // ranks
            found += [(2 * columns, self.hidden), (self.hidden, columns)]
        return found


_KNOWN = {
    "qwen2.5-0.5b": Sizes(896, 4864, 14, 2, 64),
    "qwen2.5-1.5b": Sizes(1536, 8960, 12, 2),
    "qwen2.5-3b": Sizes(2048, 11008, 16, 2),
    "qwen2.5-7b": Sizes(3584, 18944, 28, 4),
    "qwen2.5-14b": Sizes(5120, 13824, 40, 8),
    "qwen2.5-32b": Sizes(5120, 27648, 40, 8),
    "qwen3-0.6b": Sizes(1024, 3072, 16, 8),
    "qwen3-1.7b": Sizes(2048, 6144, 16, 8),
    "qwen3-4b": Sizes(2560, 9728, 32, 8),
    "qwen3-8b": Sizes(4096, 12288, 32, 8),
    "qwen3-14b": Sizes(5120, 17408, 40, 8),
    "qwen3-32b": Sizes(5120, 25600, 64, 8),
    "llama-3.1-8b": Sizes(4096, 14336, 32, 8),
}
MODELS = {name: tuple(sizes.linears(1)) for name, sizes in _KNOWN.items()}


def shapes_of(models: Iterable[str], ranks: int = 1) -> list[Shape]:
    """The linears of some models that our kernel takes, in order and each once.

    Args:
        models: Names of MODELS, directories with a config.json, or such files.

    Raises:
        ValueError: A model is neither, so many ranks cannot share it, or none of its linears can be measured.
    """
    found: set[Shape] = set()
    for model in models:
        linears = (_KNOWN[model] if model in _KNOWN else _sizes(Path(model))).linears(ranks)
        taken = {shape for shape in linears if not any(size % MULTIPLE for size in shape)}
        if not taken:
            raise ValueError(
                f"nothing to measure: the linears of {model} are {linears}. Multiples of {MULTIPLE} are accepted. A"
                " rollout of it stays on vLLM's Marlin."
            )
        found |= taken
    return sorted(found)


def _sizes(path: Path) -> Sizes:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"nothing to measure: --models {path} is no model. {', '.join(MODELS)} and directories with a config.json"
            " are accepted. Check the name."
        )
    config = read_config(file)
    shape, heads = ModelShape.from_config(config), config["num_attention_heads"]
    dense = len(shape.sparse) < shape.layers
    head_dim = shape.query // heads
    return Sizes(shape.hidden, shape.intermediate if dense else 0, heads, shape.key_value // head_dim, head_dim)
