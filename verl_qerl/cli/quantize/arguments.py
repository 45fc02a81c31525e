"""The arguments of `quantize`, apart from its code: torch takes seconds to import."""

import argparse
import re
from pathlib import Path
from typing import Any

from verl_qerl.cli.output_dir import check_absent
from verl_qerl.vllm_plugin import NAMES

FORMATS = tuple(NAMES.values())  # formats.FORMATS imports torch
SCALE_CHOICES = ("mse", "minmax")  # the first is the default
METHODS = ("rtn", "gptq")  # the first is the default
SAMPLES, TOKENS = 512, 2048  # to calibrate on
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("quantize", help="write a quantized checkpoint of a bf16 model")
    parser.add_argument("--model", type=Path, required=True, help="directory in Hugging Face layout, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="new directory; appears whole or not at all")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="(default: %(default)s)")
    parser.add_argument("--scale", choices=SCALE_CHOICES, help=f"of a block of nvfp4 (default: {SCALE_CHOICES[0]})")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="rtn: nearest codes; gptq: those that keep a linear's outputs on the texts of --calibration, of nvfp4"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="for gptq: .parquet or .jsonl with `text`, or with `prompt`, text or chats as `data` writes",
    )
    parser.add_argument("--calibration-samples", type=int, metavar="N", help=f"rows read at most (default: {SAMPLES})")
    parser.add_argument(
        "--calibration-tokens", type=int, metavar="N", help=f"of a row, from its start, at most (default: {TOKENS})"
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules left as they are besides lm_head and routers: exact names, or `re:` and a regular expression",
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="take a quantized model by the weights that it stands for: NVFP4, MXFP4, INT8, FP8 a tensor, row or block;"
        " its rounding stays, and errors are those beside it",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--max-shard-size", type=parse_size, default="5GB", help="of an output file (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at output and options, then quantize."""
    check_absent(args.out)
    _check_calibration(args)
    from verl_qerl.cli.quantize import command

    return command.run(args)


def _check_calibration(args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    sizes = {f"--calibration-{name}": getattr(args, f"calibration_{name}") for name in ("samples", "tokens")}
    given = {name: value for name, value in {"--calibration": args.calibration, **sizes}.items() if value is not None}
    if args.method != "gptq" and given:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"an option has no meaning here: {name}={value} with --method {args.method}. It is accepted with gptq."
            " Leave it out, or add --method gptq."
        )
    if args.method == "gptq" and args.calibration is None:
        raise ValueError(
            "an argument is missing: --calibration. With --method gptq .parquet or .jsonl of texts is needed. Add it."
        )
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"too small: {name}={value}. 1 or more is accepted. Raise it.")


def parse_size(text: str) -> int:
    """Bytes of `5GB` and the like, for argparse; an ArgumentTypeError if it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size. A number with KB, MB or GB is accepted, for example 5GB."
        )
    return size
