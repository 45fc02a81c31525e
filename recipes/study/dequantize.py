"""Writes a bf16 copy of what `python -m verl_qerl quantize` wrote in NVFP4: the same numbers, for stock verl.

    python3 recipes/study/dequantize.py --model DIR --out DIR

A run on it tells what four bits cost from what the code that computes with them does.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from verl_qerl.checkpoints.model_config import read_config
from verl_qerl.checkpoints.source import SINGLE, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.checkpoints.writer import write_tensors
from verl_qerl.cli import run_guarded
from verl_qerl.cli.model_dir import QUANTIZATION_REPORT, copy_other_files
from verl_qerl.cli.output_dir import new_directory
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize


def write(model: Path, out: Path) -> int:
    """Write the copy, with the report that names the codes; 0.

    Raises:
        ValueError: `model` is not in NVFP4.
        OSError: `out` holds something, or a file of `model` is not there.
    """
    config = read_config(model)
    if config.pop("quantization_config", None) is None:
        raise ValueError(f"not quantized: {model}. What `python -m verl_qerl quantize` wrote is accepted. Make it.")
    with new_directory(out) as folder:
        copy_other_files(model, folder)
        shutil.copy(model / QUANTIZATION_REPORT, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {}
        for name, item in packed_stream(open_source(model)):
            packed = isinstance(item, PackedWeight)
            tensors[f"{name}.weight" if packed else name] = dequantize(item, torch.bfloat16) if packed else item
        write_tensors(folder / SINGLE, tensors)
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder that `quantize` wrote")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    return run_guarded(parser, lambda: write(args.model, args.out))


if __name__ == "__main__":
    sys.exit(main())
