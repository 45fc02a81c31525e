"""Writes a bf16 copy of what `python -m verl_qerl quantize` wrote in NVFP4: the same numbers, for stock verl.

    python3 recipes/study/dequantize.py --model DIR --out DIR

A run on it tells what four bits cost from what the code that computes with them does.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from verl_qerl.checkpoints.dense_source import dense_source
from verl_qerl.checkpoints.source import SINGLE, open_source
from verl_qerl.checkpoints.stream import check_held
from verl_qerl.checkpoints.writer import write_tensors
from verl_qerl.cli import run_guarded
from verl_qerl.cli.model_dir import QUANTIZATION_REPORT, copy_other_files
from verl_qerl.cli.output_dir import new_directory
from verl_qerl.formats import DEFAULT_FORMAT


def write(model: Path, out: Path) -> int:
    """Write the copy, with the report that names the codes; 0.

    Raises:
        ValueError: `model` is not in NVFP4.
        OSError: `out` holds something, or a file of `model` is not there.
    """
    source = open_source(model)
    if source.format is None:
        raise ValueError(f"not quantized: {model}. What `python -m verl_qerl quantize` wrote is accepted. Make it.")
    check_held(source, DEFAULT_FORMAT)
    dense = dense_source(source)
    with new_directory(out) as folder:
        copy_other_files(model, folder)
        shutil.copy(model / QUANTIZATION_REPORT, folder)
        (folder / "config.json").write_text(json.dumps(dense.config, indent=2))
        write_tensors(folder / SINGLE, dict(dense.tensors()))
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
