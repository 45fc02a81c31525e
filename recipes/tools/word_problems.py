"""Seeded arithmetic word problems with GSM8K's answer format: one line per step, then `#### N`.

    python recipes/tools/word_problems.py --out DIR [--num-train 20000] [--max-number 9]

writes what `python -m verl_qerl data gsm8k` writes of GSM8K, and verl grades them alike.

A problem is a start ("Mia has 4 apples." or "Mia has 3 boxes with 4 apples in each."), further events that add or take
away, and a question. The sentences are few and the numbers small on purpose: a model of a million parameters learns
them in about a minute on a CPU.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_qerl.cli import run_guarded
from verl_qerl.cli.data.schema import gsm8k_row, write_splits
from verl_qerl.cli.output_dir import check_absent

NAMES = ("Anna", "Ben", "Emma", "Hugo", "Ida", "Jack", "Mia", "Noah")
OBJECTS = ("apples", "balls", "books", "cards", "coins", "keys", "pens", "toys")
BOXES = ("bags", "boxes")
ADDITIONS = ("{name} buys {b} more.", "{name} finds {b} more.")
SUBTRACTIONS = ("{name} gives away {b}.", "{name} loses {b}.")
MAX_FACTOR = 5  # boxes per problem, so that products stay in the range the sums already cover


@dataclass(frozen=True)
class WordProblem:
    """A question and its worked answer; `answer` ends in `#### N`."""

    question: str
    answer: str


def generate(num_problems: int, *, max_steps: int, max_number: int, seed: int) -> list[WordProblem]:
    """Draw `num_problems` problems with pairwise different questions.

    Args:
        num_problems: At least 1.
        max_steps: 1 to 3; each problem has one to this many steps.
        max_number: At least 2; the largest number in a question.
        seed: Of the generator; the same arguments give the same list.

    Raises:
        ValueError: An argument is out of range, or so many different problems do not exist.
    """
    _check(num_problems, max_steps, max_number)
    problems: dict[str, WordProblem] = {}
    draws = _draws(max_steps, max_number, seed)
    # Repeats grow as the space fills up; 20 draws per problem reach about all of it and still end.
    for _, problem in zip(range(20 * num_problems), draws, strict=False):
        problems.setdefault(problem.question, problem)
        if len(problems) == num_problems:
            return list(problems.values())
    raise ValueError(
        f"only {len(problems)} different problems were found: num_problems={num_problems}, max_steps={max_steps}, "
        f"max_number={max_number}. "
        "Fewer problems or larger numbers are accepted. Lower --num-train or raise --max-number."
    )


def _check(num_problems: int, max_steps: int, max_number: int) -> None:
    if num_problems < 1:
        raise ValueError(f"no problems were asked for: num_problems={num_problems}. At least 1 is accepted. Raise it.")
    if not 1 <= max_steps <= 3:
        raise ValueError(f"the number of steps is out of range: max_steps={max_steps}. 1 to 3 is accepted. Choose one.")
    if max_number < 2:
        raise ValueError(f"the numbers are too small: max_number={max_number}. At least 2 is accepted. Raise it.")


def _draws(max_steps: int, max_number: int, seed: int) -> Iterator[WordProblem]:
    rng = random.Random(seed)
    while True:
        yield _draw(rng, rng.randint(1, max_steps), max_number)


def _draw(rng: random.Random, num_steps: int, max_number: int) -> WordProblem:
    """One problem; the running total never gets below zero."""
    name, objects = rng.choice(NAMES), rng.choice(OBJECTS)
    lines: list[str] = []
    if rng.random() < 0.25:
        boxes, total = rng.randint(2, min(MAX_FACTOR, max_number)), rng.randint(2, max_number)
        sentences = [f"{name} has {boxes} {rng.choice(BOXES)} with {total} {objects} in each."]
        lines.append(f"{boxes}*{total}={boxes * total}")
        total *= boxes
    else:
        total = rng.randint(1, max_number)
        sentences = [f"{name} has {total} {objects}."]
    while len(lines) < num_steps:
        change = rng.randint(1, max_number)
        is_addition = rng.random() < 0.5 or change > total
        sentence = rng.choice(ADDITIONS if is_addition else SUBTRACTIONS)
        sentences.append(sentence.format(name=name, b=change))
        after = total + change if is_addition else total - change
        lines.append(f"{total}{'+' if is_addition else '-'}{change}={after}")
        total = after
    question = f"{' '.join(sentences)} How many {objects} does {name} have now?"
    return WordProblem(question, "\n".join([*lines, f"#### {total}"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Write train.parquet and test.parquet in verl's schema, and the same problems as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--num-train", type=int, default=20000)
    parser.add_argument("--num-test", type=int, default=200)
    parser.add_argument("--max-steps", type=int, default=2, help="steps per problem, 1 to 3 (default: %(default)s)")
    parser.add_argument("--max-number", type=int, default=9, help="largest number asked (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return run_guarded(parser, lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    check_absent(args.out)
    for option, count in (("--num-train", args.num_train), ("--num-test", args.num_test)):
        if count < 1:
            raise ValueError(f"a split would be empty: {option}={count}. At least 1 is accepted. Raise it.")
    problems = generate(
        args.num_train + args.num_test, max_steps=args.max_steps, max_number=args.max_number, seed=args.seed
    )
    parts = {"train": problems[: args.num_train], "test": problems[args.num_train :]}
    write_splits(
        args.out,
        {split: [gsm8k_row(asdict(p), split) for p in part] for split, part in parts.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
