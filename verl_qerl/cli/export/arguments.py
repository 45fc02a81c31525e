"""The arguments of `export`, apart from its code: torch takes seconds to import."""

import argparse
from pathlib import Path
from typing import Any

from verl_qerl.cli.output_dir import check_absent
from verl_qerl.cli.quantize.arguments import SCALE_CHOICES, parse_size

# Form of the export -> layout of its packed weights on disk, made of the merged model.
LAYOUTS = {"merged-nvfp4": "compressed-tensors", "modelopt": "modelopt"}
WITH_BASE = "base-and-adapter"
FORMS = ("peft", WITH_BASE, "merged-bf16", *LAYOUTS)


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("export", help="write the adapter or the merged model of a training checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a run, of a step, or of its shards")
    parser.add_argument("--out", type=Path, required=True, help="new directory; appears whole or not at all")
    parser.add_argument("--to", choices=FORMS, required=True, help="what to write")
    parser.add_argument("--base", help="directory or hub id, in place of the one that the checkpoint names")
    parser.add_argument("--scale", choices=SCALE_CHOICES, help="of a block when quantized (default: as the base's)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--max-shard-size", type=parse_size, default="5GB", help="of a file (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at options that do not go together, then export."""
    if args.scale is not None and args.to not in LAYOUTS:
        raise ValueError(
            f"an option has no meaning here: --scale={args.scale} with --to {args.to}. It is accepted with "
            f"{' and '.join(LAYOUTS)}. Leave it out."
        )
    check_absent(args.out)
    from verl_qerl.cli.export import command

    return command.run(args)
