"""An NVFP4 checkpoint of a real shape with random weights, written bit by bit: 32B (20 GB) takes as long as the disk.

    python tests/bench/random_checkpoint.py --shape 32b --out DIR [--bf16] [--tokenizer DIR]

Tensors are drawn on the GPU where there is one; no dense copy of a packed weight is made. Without --tokenizer one is
trained on generated word problems, so that nothing is fetched: those of recipes/tools/word_problems.py fit it.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import actor_models as models
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_qerl.checkpoints.writer import ShardedWriter, quantized_specs
from verl_qerl.cli.data.schema import gsm8k_prompt
from verl_qerl.cli.model_dir import check_free_space, store, total_bytes
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.ignore import DEFAULT_IGNORE, is_packed_module
from verl_qerl.formats.tensor_spec import TensorSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "tools"))
from chat_tokenizer import train_tokenizer
from word_problems import generate

SHARD_BYTES = 4 << 30


def write_checkpoint(
    shape: str,
    out: Path,
    layers: int | None = None,
    vocabulary: int = models.VOCABULARY,
    packed: bool = True,
    tokenizer: Path | None = None,
) -> int:
    """Write the directory.

    Args:
        shape: Of actor_models.SHAPES.
        out: The directory, which must not exist.
        layers: Fewer than the model has.
        vocabulary: Rows of embedding and head.
        packed: NVFP4 linears; False writes bf16.
        tokenizer: Folder of the one to take; a rollout never says what it lacks.

    Returns:
        Bytes of its tensors.
    """
    model = models.skeleton(shape, layers or models.SHAPES[shape].layers, vocabulary)
    dense = {name: TensorSpec("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    linears = [
        name
        for name, module in model.named_modules()
        if packed and isinstance(module, torch.nn.Linear) and is_packed_module(name, DEFAULT_IGNORE)
    ]
    specs = quantized_specs(dense, linears)
    out.mkdir(parents=True)
    check_free_space(out, total_bytes(specs))
    with ShardedWriter(out, specs, SHARD_BYTES) as writer:
        store(writer, _items(dense, set(linears)))
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    if packed:
        model.config.quantization_config = NVFP4().config()
    model.config.save_pretrained(out)
    (AutoTokenizer.from_pretrained(tokenizer) if tokenizer else _word_problems()).save_pretrained(str(out))
    return total_bytes(specs)


def _word_problems() -> PreTrainedTokenizerBase:
    problems = generate(2000, max_steps=2, max_number=9, seed=0)
    texts = (text for p in problems for text in (gsm8k_prompt(p.question)[0]["content"], p.answer))
    return train_tokenizer(texts, 320)


def _items(dense: dict[str, TensorSpec], linears: set[str]) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    for name, spec in dense.items():
        module = name.removesuffix(".weight")
        if module in linears and module != name:
            yield module, models.random_packed(*spec.shape, generator)
        elif "norm" in name:
            yield name, torch.ones(spec.shape, dtype=torch.bfloat16)
        else:
            value = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
            yield name, value.normal_(std=0.02, generator=generator)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(models.SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--bf16", action="store_true", help="nothing packed, for the baseline")
    parser.add_argument("--tokenizer", type=Path, help="folder of another one than word problems give")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    size = write_checkpoint(args.shape, args.out, args.layers, packed=not args.bf16, tokenizer=args.tokenizer)
    print(f"{size / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
