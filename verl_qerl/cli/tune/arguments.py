"""The arguments of `tune`, apart from its code: torch takes seconds to import."""

import argparse
from pathlib import Path
from typing import Any

from verl_qerl.cli.tune.shapes import MODELS


def add_parser(subparsers: Any) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "tune",
        help="measure which kernel a rollout should use for which batch on this GPU",
        description="Measure where the kernels of a rollout cross on this GPU.",
    )
    names = ", ".join(MODELS)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), metavar="MODEL", help=f"directory of a model, or one of {names}"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="that share the rollout")
    parser.add_argument(
        "--out", type=Path, help="default: where the rollout looks for it; what it has of other linears stays"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure."""
    from verl_qerl.cli.tune import command

    return command.run(args)
