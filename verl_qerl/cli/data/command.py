"""`data`: question sets in verl's parquet schema.

Of evaluation sets there is test.parquet alone, of DAPO-Math and Big-Math train.parquet alone. Training questions that
come twice or are evaluated on are left out.
"""

import argparse
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.model_config import is_hub_id
from verl_qerl.cli.data.held_out import HELD_OUT, HUB, evaluation_questions, kept
from verl_qerl.cli.data.rows import Row, check_kinds, from_hub, read_jsonl, read_rows
from verl_qerl.cli.data.schema import (
    GSM8K_SOURCE,
    MATH_INSTRUCTION,
    MATH_SOURCE,
    PROBLEM,
    gsm8k_row,
    math_row,
    row_of,
    write_splits,
)
from verl_qerl.cli.eval.questions import SUFFIXES, question_of, read_questions
from verl_qerl.cli.output_dir import check_absent

SPLITS = ("train", "test")
# Evaluation set -> data_source, by which verl chooses a reward: these take what the last box holds.
EVALUATION = {"math500": "HuggingFaceH4/MATH-500", "aime24": "aime24", "aime25": "aime25", "amc23": "math_dapo"}
# What open-r1 made of DAPO-Math-17k, where each question came about 100 times, and of Big-Math-RL-Verified: id of the
# hub, and data_source. DAPO-Math has whole numbers as answers; MATH's reward compares formulas too.
TRAINING = {
    "dapo-math": ("open-r1/DAPO-Math-17k-Processed", "math_dapo"),
    "big-math": ("open-r1/Big-Math-RL-Verified-Processed", MATH_SOURCE),
}
KEPT = {"source": str, "llama8b_solve_rate": float}  # of Big-Math: columns, and the kind of value that is kept
# Rows, as their authors and the hub's pages say.
PUBLISHED = {
    "gsm8k": {"train": 7473, "test": 1319},
    "math": {"train": 7500, "test": 5000},
    "dapo-math": {"train": 17398},
    "big-math": {"train": 215608},
}


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("data", help="write train.parquet and test.parquet in verl's schema")
    sets = parser.add_subparsers(required=True, metavar=f"{{gsm8k,math,{','.join((*TRAINING, *EVALUATION))}}}")
    gsm8k = sets.add_parser("gsm8k", help="GSM8K from train.jsonl and test.jsonl, or from the hub")
    gsm8k.add_argument("--source", default=GSM8K_SOURCE, help="directory or hub id (default: %(default)s)")
    gsm8k.set_defaults(make=_gsm8k, held_out=None)
    math = sets.add_parser("math", help="MATH from train.parquet and test.parquet, or from the hub")
    math.add_argument("--source", default=MATH_SOURCE, help="directory or hub id (default: %(default)s)")
    math.add_argument("--levels", type=_levels, metavar="A-B", help="keep these levels, for example 3-5")
    math.set_defaults(make=_math, held_out=None)
    training = [sets.add_parser(name, help=f"{name}, to train on: train.parquet alone") for name in TRAINING]
    for each in training:
        each.add_argument("--source", type=Path, help="file, or directory with train.jsonl, .json or .parquet")
        each.set_defaults(make=_training, held_out=HUB)
    training[1].add_argument(
        "--levels", type=_levels, metavar="A-B", dest="hub_levels", help="of the hub: these alone, as 3-5"
    )
    evaluation = [sets.add_parser(name, help=f"{name}, to evaluate on: test.parquet alone") for name in EVALUATION]
    for each in evaluation:
        each.add_argument("--source", type=Path, help="directory, as of `eval` (default: the hub)")
        each.set_defaults(make=_evaluation)
    for each in (gsm8k, math, *training):
        each.add_argument(
            HELD_OUT,
            help=f"evaluation questions that are not trained on: directory as of `eval --source`, or {HUB!r} (default:"
            f" {each.get_default('held_out') or 'those of its test split'})",
        )
    for name, each in sets.choices.items():
        each.add_argument("--out", type=Path, required=True, help="directory to create")
        each.set_defaults(run=run, name=name, levels=None, hub_levels=None)


def run(args: argparse.Namespace) -> int:
    """Write the splits; the directory appears whole or not at all."""
    check_absent(args.out)
    splits = args.make(args)
    for split, published in PUBLISHED.get(args.name, {}).items():
        if len(splits[split]) != published and not args.hub_levels:
            print(f"{args.name}: {split} has {len(splits[split])} rows, where {published} are published")
    splits = {split: _answered(rows, split) for split, rows in splits.items()}
    if "train" in splits:
        held_out = {"its test split": _questions(splits.get("test", ())), **evaluation_questions(args.held_out)}
        splits["train"] = [splits["train"][number] for number in kept(_questions(splits["train"]), held_out)]
    if args.levels:
        splits = {split: _of_levels(rows, args.levels, split) for split, rows in splits.items()}
    write_splits(args.out, splits)
    return 0


def _answered(rows: Sequence[Row], split: str) -> list[Row]:
    """The rows with an answer: two training rows of MATH have an empty box."""
    answered = [bool(row["reward_model"]["ground_truth"].strip()) for row in rows]
    if not any(answered):
        raise ValueError(f"no row of {split} has an answer. Rows with one are accepted. Check --source.")
    if not all(answered):
        first = answered.index(False) + 1
        print(f"{split}: left out are {answered.count(False)} rows without an answer, the first of them row {first}")
    return list(itertools.compress(rows, answered))


def _questions(rows: Iterable[Row]) -> list[str]:
    return [row["extra_info"]["question"] for row in rows]


def _of_levels(rows: Iterable[Row], levels: Sequence[str], split: str) -> list[Row]:
    found = [row for row in rows if row["extra_info"]["level"] in levels]
    if not found:
        raise ValueError(f"no row of {split} is left: levels={levels}. 1-5 is accepted. Choose other levels.")
    return found


def _gsm8k(args: argparse.Namespace) -> dict[str, list[Row]]:
    directory, splits = _local(args.source, "jsonl"), {}
    for split in SPLITS:
        if directory:
            records = read_jsonl(directory / f"{split}.jsonl", PROBLEM)
        else:
            records = from_hub(args.source, split, "main")
            for number, record in enumerate(records, start=1):
                check_kinds(record, PROBLEM, f"row {number} of {split}")
        splits[split] = [gsm8k_row(record, split) for record in records]
    return splits


def _math(args: argparse.Namespace) -> dict[str, list[Row]]:
    directory, splits = _local(args.source, "parquet"), {}
    for split in SPLITS:
        path = directory and directory / f"{split}.parquet"
        records = read_rows(path, "questions") if path else from_hub(args.source, split, None)
        splits[split] = [math_row(record, split, f"row {n} of {split}") for n, record in enumerate(records, start=1)]
        if args.levels is not None:
            for number, record in enumerate(records, start=1):
                check_kinds(record, {"level": str}, f"row {number} of {split}")
    return splits


def _training(args: argparse.Namespace) -> dict[str, list[Row]]:
    hub, data_source = TRAINING[args.name]
    if args.source is None:
        configs = [level.lower().replace(" ", "_") for level in args.hub_levels or ("all",)]
        records, where = [row for config in configs for row in from_hub(hub, "train", config)], hub
    elif args.hub_levels:
        raise ValueError(
            f"levels are those of the hub: --levels with --source={args.source}. --source alone is accepted, with"
            " the file of these levels. Leave --levels out."
        )
    else:
        path = _training_file(args.source)
        records, where = read_rows(path, "questions"), str(path)
    rows, refused = [], []
    for number, record in enumerate(records, start=1):
        try:
            question = question_of(record, f"row {number} of {where}")
        except ValueError as error:  # nobody can mend a set of the hub
            refused.append(error)
            continue
        rows.append(row_of(data_source, question.text, MATH_INSTRUCTION, question.truth, "train"))
        rows[-1]["extra_info"] |= {key: record[key] for key, kind in KEPT.items() if isinstance(record.get(key), kind)}
    if not rows:
        raise refused[0]
    if refused:
        print(
            f"train: left out are {len(refused)} rows without a question or an answer, the first of which: {refused[0]}"
        )
    return {"train": rows}


def _training_file(source: Path) -> Path:
    found = [path for path in (source, *(source / f"train.{suffix}" for suffix in SUFFIXES)) if path.is_file()]
    if not found or found[0].suffix.removeprefix(".") not in SUFFIXES:
        raise FileNotFoundError(
            f"a training set is missing: --source={source}. A .jsonl, .json or .parquet, or a directory with train of"
            " these, is accepted. Check the path, or leave --source out for the hub."
        )
    return found[0]


def _evaluation(args: argparse.Namespace) -> dict[str, list[Row]]:
    source, found = EVALUATION[args.name], read_questions(args.name, args.source)
    return {"test": [row_of(source, one.text, MATH_INSTRUCTION, one.truth, "test") for one in found]}


def _local(source: str, suffix: str) -> Path | None:
    """The directory with files of both splits, or None for a hub id."""
    path = Path(source)
    if path.is_dir():
        return path
    if is_hub_id(source) and not path.exists():
        return None
    what = "a file was given for a directory" if path.exists() else "no such source"
    raise FileNotFoundError(
        f"{what}: --source={source}. A directory with {' and '.join(f'{split}.{suffix}' for split in SPLITS)}, or"
        " owner/name of the hub, is accepted. Check --source."
    )


def _levels(text: str) -> tuple[str, ...]:
    """`3-5` or `4` as MATH's level names."""
    match = re.fullmatch(r"([1-5])(?:-([1-5]))?", text)
    if match is None or (match[2] or match[1]) < match[1]:
        raise argparse.ArgumentTypeError(f"levels={text}. A-B with 1 <= A <= B <= 5, or one level, is accepted")
    return tuple(f"Level {level}" for level in range(int(match[1]), int(match[2] or match[1]) + 1))
