"""The arguments of `eval`, apart from its code: torch takes seconds to import."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from verl_qerl.cli.eval.questions import PROMPT, TASKS, check_prompt, parse_tasks
from verl_qerl.cli.quantize.arguments import FORMATS

STOCK = "stock"


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("eval", help="accuracy of a model, an adapter or a checkpoint, with intervals")
    parser.add_argument("--model", help="directory or hub id; with --checkpoint in place of the base that it names")
    parser.add_argument("--adapter", type=Path, help="PEFT directory")
    parser.add_argument("--checkpoint", type=Path, help="of a run: its folder, a step's, or that of the shards")
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="directory for the answers; one that is there is gone on with")
    parser.add_argument("--source", type=Path, help="directory with TASK/test.jsonl, .json or .parquet (default: hub)")
    parser.add_argument(
        "--format",
        choices=(*FORMATS, STOCK),
        help=f"of the linears (default: that of the files); {STOCK}: vLLM's own loaders and kernels",
    )
    parser.add_argument("--samples", type=int, default=1, help="answers a question (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of an answer (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="what the user says (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="ask the first questions of each task only")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="that share a model")
    parser.add_argument(
        "--data-parallel",
        type=int,
        default=1,
        metavar="ENGINES",
        help="that share the questions, each on --tensor-parallel GPUs of its own (default: %(default)s)",
    )
    parser.add_argument("--memory", type=float, help="share of a GPU's memory (default: vLLM's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="DIR", help="evaluate nothing: the second --out less the first, paired"
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Look at the arguments, then evaluate or compare."""
    if args.compare:
        for name, value in vars(args).items():
            if name not in ("compare", "run") and value != parser.get_default(name):
                raise ValueError(
                    f"an option has no meaning here: --{name.replace('_', '-')}={value} with --compare. Two directories"
                    " alone are accepted. Leave it out."
                )
        from verl_qerl.cli.eval import report

        return report.compare(*args.compare)
    args.tasks = parse_tasks(args.tasks)
    check_prompt(args.prompt)
    _check(args)
    from verl_qerl.cli.eval.answers import check_installed

    check_installed()
    from verl_qerl.cli.eval import command

    return command.run(args)


def _check(args: argparse.Namespace) -> None:
    """Refuse what is out of range, or does not go together."""
    counts = ("samples", "max_tokens", "limit", "tensor_parallel", "data_parallel")
    for name, least in (*((name, 1) for name in counts), ("temperature", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ValueError(f"too small: --{name.replace('_', '-')}={value}. {least} or more is accepted. Raise it.")
    for name in ("top_p", "memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"not a share: --{name.replace('_', '-')}={value}. Above 0, to 1, is accepted. Change it.")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(
            f"all samples would be the same: --samples={args.samples} with --temperature=0. A temperature above 0 is"
            " accepted with several samples. Raise it, or leave --samples out."
        )
    if args.out is None or (args.model is None and args.checkpoint is None):
        lacking = "--out" if args.out is None else "--model"
        raise ValueError(
            f"an argument is missing: {lacking}. --out with --model or --checkpoint, or --compare, is accepted. Add it."
        )
    if args.adapter and args.checkpoint:
        raise ValueError(
            f"two adapters are named: --adapter={args.adapter} and --checkpoint={args.checkpoint}. One is accepted."
            " Leave one of them out."
        )
