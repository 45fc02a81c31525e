r"""Questions of the study, in verl's parquet schema: one prompt for both tasks, which asks for `\boxed{}`.

    python3 recipes/study/prepare.py --out DIR [--gsm8k DIR] [--math DIR] [--math500 FILE]

Without folders both sets come from the hub. OUT/gsm8k and OUT/math get train.parquet (all of GSM8K; levels 3 to 5 of
MATH), test.parquet (GSM8K's 1,319 questions; MATH-500, or without its file 500 of MATH's test questions) and
val.parquet, 256 of the test questions. OUT/gsm8k/calibration.jsonl has 512 training questions with their solutions,
for `python -m verl_qerl quantize --method gptq --calibration`.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_qerl.cli import main as verl_qerl
from verl_qerl.cli import run_guarded
from verl_qerl.cli.data.rows import read_rows
from verl_qerl.cli.data.schema import GSM8K_SOURCE, MATH_INSTRUCTION, MATH_SOURCE
from verl_qerl.cli.output_dir import check_absent, new_directory

LEVELS = ("Level 3", "Level 4", "Level 5")
SOME, MANY, TEXTS = 256, 500, 512
Row = dict[str, Any]


def asked(question: str | None) -> str:
    """What the model is asked, in both tasks."""
    return f"{question} {MATH_INSTRUCTION}"


def published(task: str, source: str, folder: Path) -> dict[str, list[Row]]:
    """Rows of both splits, as `python -m verl_qerl data` writes them; what cannot be read ends the program."""
    import pyarrow.parquet as pq

    verl_qerl(["data", task, "--source", source, "--out", str(folder / task)])
    return {split: pq.read_table(folder / task / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def questions(task: str, splits: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The rows with the study's prompt, and without their solutions."""
    for row in (row for rows in splits.values() for row in rows):
        info = row["extra_info"]
        row["data_source"] = task
        row["prompt"] = [{"role": "user", "content": asked(info["question"])}]
        row["extra_info"] = {key: info[key] for key in ("split", "index", "level") if key in info}
    return splits


def texts(train: list[Row]) -> str:
    """JSON lines with a `text` each."""
    infos = [row["extra_info"] for row in train]
    drawn = random.Random(0).sample(infos, min(TEXTS, len(infos)))
    lines = [{"text": f"{asked(info['question'])}\n{info['answer']}"} for info in drawn]
    return "".join(json.dumps(line) + "\n" for line in lines)


def math500(rows: list[Row], file: Path | None) -> list[Row]:
    """The rows that the file names by `prompt` (or `problem`), or MANY others.

    Raises:
        ValueError: The rows lack one, or the file has none.
    """
    if file is None:
        return random.Random(0).sample(rows, min(MANY, len(rows)))
    by_prompt = {row["prompt"][0]["content"]: row for row in rows}
    named = [record.get("prompt") or record.get("problem") for record in read_rows(file, "questions of --math500")]
    found = [by_prompt.get(asked(question)) for question in named]
    missing = found.count(None)
    if missing:
        raise ValueError(f"{missing} of {len(named)} questions of {file} are not in MATH's test split. Check --math.")
    return [row for row in found if row is not None]


def write(folder: Path, splits: dict[str, list[Row]]) -> None:
    """A parquet file for each split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    tests = splits["test"]
    splits["val"] = random.Random(0).sample(tests, min(SOME, len(tests)))
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--gsm8k", default=GSM8K_SOURCE, help="folder with train.jsonl and test.jsonl, or a hub id")
    parser.add_argument("--math", default=MATH_SOURCE, help="folder with train.parquet and test.parquet, or a hub id")
    parser.add_argument("--math500", type=Path, help="JSON list of MATH-500's questions")
    return run_guarded(parser, lambda: prepare(parser.parse_args(arguments)))


def prepare(args: argparse.Namespace) -> int:
    """Write both tasks; the folder appears whole or not at all."""
    check_absent(args.out)
    with tempfile.TemporaryDirectory() as temporary:
        gsm8k = published("gsm8k", args.gsm8k, Path(temporary))
        math = questions("math", published("math", args.math, Path(temporary)))
    calibration = texts(gsm8k["train"])
    math["train"] = [row for row in math["train"] if row["extra_info"].get("level") in LEVELS]
    if not math["train"]:
        raise ValueError(
            f"no question to train on: of --math={args.math} none has a `level` that is {', '.join(LEVELS)}. MATH as"
            " published is accepted. Check --math."
        )
    math["test"] = math500(math["test"], args.math500)
    tasks = {"gsm8k": questions("gsm8k", gsm8k), "math": math}
    with new_directory(args.out) as folder:
        for task, splits in tasks.items():
            write(folder / task, splits)
        (folder / "gsm8k" / "calibration.jsonl").write_text(calibration, encoding="utf-8")
    for task, splits in tasks.items():
        for split, rows in splits.items():
            print(f"{args.out / task / split}.parquet: {len(rows)} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
