"""`data`: question sets in verl's parquet schema, with verl's prompts, so that verl's own rewards apply.

Prompts, data sources and ground truths are those of verl's examples/data_preprocess/{gsm8k,math_dataset}.py, which are
not in its wheel. Of evaluation sets there is test.parquet alone, of DAPO-Math and Big-Math train.parquet alone.
Training questions that come twice or are evaluated on are left out. Two questions are the same where they differ in
case, white space, dollar signs and the punctuation at their end alone.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.model_config import is_hub_id
from verl_qerl.cli.output_dir import check_absent, new_directory

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
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
HELD_OUT = "--held-out"
HUB = "hub"
PROBLEM = {"question": str, "answer": str}  # keys of JSON lines
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")  # as verl's reward reads it

Row = dict[str, Any]


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
    if "train" in splits:
        held_out = {"its test split": _questions(splits.get("test", ())), **evaluation_questions(args.held_out)}
        splits["train"] = [splits["train"][number] for number in kept(_questions(splits["train"]), held_out)]
    if args.levels:
        splits = {split: _of_levels(rows, args.levels, split) for split, rows in splits.items()}
    write_splits(args.out, splits)
    return 0


def _questions(rows: Iterable[Row]) -> list[str]:
    return [row["extra_info"]["question"] for row in rows]


def _of_levels(rows: Iterable[Row], levels: Sequence[str], split: str) -> list[Row]:
    found = [row for row in rows if row["extra_info"]["level"] in levels]
    if not found:
        raise ValueError(f"no row of {split} is left: levels={levels}. 1-5 is accepted. Choose other levels.")
    return found


def plain(question: str) -> str:
    """A text that is the same for all ways to write a question that the module lists."""
    return re.sub(r"[\s$]", "", question).casefold().rstrip(".?!:;,")


def evaluation_questions(source: str | None) -> dict[str, list[str]]:
    """Questions of each task of `eval`.

    Args:
        source: `hub` for all tasks; a directory for those that it has, as of `eval --source`; None for none.

    Raises:
        ValueError: The directory has none, or the hub does not answer.
    """
    from verl_qerl.cli.eval.questions import TASKS, has_questions, read_questions

    if source is None:
        return {}
    folder = None if source == HUB else Path(source)
    tasks = [task for task in TASKS if folder is None or has_questions(task, folder)]
    if not tasks:
        raise ValueError(
            f"no evaluation questions are found: {HELD_OUT}={source}. {HUB!r}, or a directory with TASK/test.jsonl,"
            f" .json or .parquet of {', '.join(TASKS)}, is accepted. Check the path."
        )
    return {task: [one.text for one in read_questions(task, folder, HELD_OUT)] for task in tasks}


def kept(questions: Iterable[str], held_out: Mapping[str, Iterable[str]]) -> list[int]:
    """Numbers of the questions that come first and are not held out; says how many are left out, and why.

    Args:
        held_out: Name of an evaluation set -> its questions. What several have counts for the first of them.

    Raises:
        ValueError: None is left.
    """
    sets = {name: {plain(one) for one in evaluated} for name, evaluated in held_out.items()}
    found, seen, twice, left_out = [], set(), 0, dict.fromkeys(sets, 0)
    for number, question in enumerate(questions):
        text = plain(question)
        reason = next((name for name, evaluated in sets.items() if text in evaluated), None)
        if reason is not None:
            left_out[reason] += 1
        elif text in seen:
            twice += 1
        else:
            found.append(number)
            seen.add(text)
    evaluated = ", ".join(f"{count} of {name}" for name, count in left_out.items() if count) or "none"
    print(f"train: left out are {twice} questions that come again, and of evaluation questions {evaluated}")
    if not found:
        raise ValueError(
            "no training question is left: all are held out. Questions that are not evaluated on are accepted. Choose"
            f" another --source or {HELD_OUT}."
        )
    return found


def write_splits(out: Path, splits: Mapping[str, list[Row]]) -> None:
    """Number the rows, and write `<split>.parquet` for verl and, of questions as GSM8K's, `<split>.jsonl`.

    Args:
        out: Directory that must not exist; it appears whole or not at all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with new_directory(out) as directory:
        for split, rows in splits.items():
            for index, row in enumerate(rows):
                row["extra_info"]["index"] = index
            pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
            if rows[0]["data_source"] == GSM8K_SOURCE:
                problems = [{key: row["extra_info"][key] for key in PROBLEM} for row in rows]
                text = "".join(json.dumps(problem) + "\n" for problem in problems)
                (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")
    for split, rows in splits.items():
        print(f"{out / split}.parquet: {len(rows)} rows")


def gsm8k_prompt(question: str) -> list[dict[str, str]]:
    """The chat that verl sends for a GSM8K question."""
    return _chat(question, GSM8K_INSTRUCTION)


def gsm8k_ground_truth(answer: str) -> str:
    """The number after `####`, without thousands separators; a ValueError if there is none."""
    match = GSM8K_ANSWER.search(answer)
    if match is None or not re.search("[0-9]", match[1]):
        raise ValueError(f"an answer has no result: answer={answer!r}. `#### N` is accepted. Mend or drop the row.")
    return match.group(1).replace(",", "")


def last_boxed(solution: str) -> str:
    r"""What the last `\boxed{...}` (or `\boxed x`, or `\fbox{...}`) of a MATH solution holds, braces balanced.

    Raises:
        ValueError: There is none.
    """
    starts = list(re.finditer(r"\\(?:boxed|fbox)(?=[{ ])", solution))
    if starts:
        rest = solution[starts[-1].end() :]
        if rest.startswith(" "):
            return rest[1:].split("$")[0]
        depth = 0
        for position, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return rest[1:position]
    raise ValueError(
        f"a solution has no result: solution={solution[-80:]!r}. \\boxed{{...}} is accepted. Mend or drop the row."
    )


def check_file(path: Path, name: str, accepted: str) -> None:
    """Require a file.

    Args:
        name: What the message calls the path.
        accepted: What may be in it, with its verb.
    """
    if not path.is_file():
        what = "a directory was given for a file" if path.is_dir() else "a file is missing"
        raise FileNotFoundError(f"{what}: {name}={path}. {accepted} accepted. Check the path.")


def read_jsonl(path: Path, required: Mapping[str, type], is_growing: bool = False) -> list[Row]:
    """Read one JSON object per line.

    Args:
        required: Keys that each has, and of what kind their values are.
        is_growing: The file may still be written: a last line that is cut short is left out, which is said.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line is not such an object, or there is none.
    """
    check_file(path, "path", "JSON lines are")
    rows = []
    lines = path.read_bytes().split(b"\n")  # JSON may hold U+2028
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair, which parquet cannot hold
        except (ValueError, RecursionError) as error:
            if is_growing and number == len(lines):
                print(f"left out of {path}: its last line, which is cut short")
                continue
            raise ValueError(f"line {number} is not JSON: path={path} ({error}). Mend or drop the line.") from error
        missing = [key for key in required if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"line {number} lacks {missing}: path={path}. Give each line {list(required)}.")
        _check_kinds(row, required, f"line {number} of {path}")
        rows.append(row)
    if not rows:
        raise ValueError(f"a file is empty: path={path}. At least one line is accepted. Check the path.")
    return rows


def read_rows(path: Path, what: str, count: int | None = None) -> list[Row]:
    """The objects of JSON lines, or else of a JSON list or parquet.

    Args:
        what: `questions` or the like, for messages.
        count: So many at most, from the first.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It holds something else.
    """
    if path.suffix == ".jsonl":
        rows = read_jsonl(path, {})
    else:
        check_file(path, what, "JSON or parquet is")
        try:
            if path.suffix == ".json":
                rows = json.loads(path.read_text(encoding="utf-8-sig"))
            else:
                import pyarrow.parquet as pq

                rows = pq.read_table(path).slice(0, count).to_pylist()
        except (ValueError, OSError, RecursionError) as error:  # json's and pyarrow's are
            raise ValueError(
                f"{what} cannot be read: {path} ({error}). Objects, as JSON or parquet, are accepted. Download it"
                " again."
            ) from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{what} cannot be read: {path} holds no objects. A list of them, as JSON or parquet, is accepted. Download"
            " it again."
        )
    return rows[:count]


def columns_of(value: Any) -> Mapping[str, Any]:
    """The columns inside of a column; none where it holds something else."""
    return value if isinstance(value, Mapping) else {}


def _check_kinds(row: Mapping[str, Any], required: Mapping[str, type], where: str) -> None:
    """Require values of these kinds, and text that is not blank; `where` names the row in the error."""
    for key, kind in required.items():
        value = row.get(key)
        if not isinstance(value, kind) or (isinstance(value, str) and not value.strip()):
            accepted = "str that is not blank" if kind is str else kind.__name__
            raise ValueError(f"{where} cannot be used: {key}={value!r}. Accepted is {accepted}. Mend or drop the row.")


def _gsm8k(args: argparse.Namespace) -> dict[str, list[Row]]:
    directory, splits = _local(args.source, "jsonl"), {}
    for split in SPLITS:
        if directory:
            records = read_jsonl(directory / f"{split}.jsonl", PROBLEM)
        else:
            records = from_hub(args.source, split, "main")
            for number, record in enumerate(records, start=1):
                _check_kinds(record, PROBLEM, f"row {number} of {split}")
        splits[split] = [gsm8k_row(record, split) for record in records]
    return splits


def _math(args: argparse.Namespace) -> dict[str, list[Row]]:
    directory, splits = _local(args.source, "parquet"), {}
    for split in SPLITS:
        path = directory and directory / f"{split}.parquet"
        records = read_rows(path, "questions") if path else from_hub(args.source, split, None)
        splits[split] = [_math_row(record, split, f"row {n} of {split}") for n, record in enumerate(records, start=1)]
        if args.levels is not None:
            for number, record in enumerate(records, start=1):
                _check_kinds(record, {"level": str}, f"row {number} of {split}")
    return splits


def _training(args: argparse.Namespace) -> dict[str, list[Row]]:
    from verl_qerl.cli.eval.questions import question_of

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
        rows.append(_row(data_source, question.text, MATH_INSTRUCTION, question.truth, "train"))
        rows[-1]["extra_info"] |= {key: record[key] for key, kind in KEPT.items() if isinstance(record.get(key), kind)}
    if not rows:
        raise refused[0]
    if refused:
        print(
            f"train: left out are {len(refused)} rows without a question or an answer, the first of which: {refused[0]}"
        )
    return {"train": rows}


def _training_file(source: Path) -> Path:
    from verl_qerl.cli.eval.questions import SUFFIXES

    found = [path for path in (source, *(source / f"train.{suffix}" for suffix in SUFFIXES)) if path.is_file()]
    if not found or found[0].suffix.removeprefix(".") not in SUFFIXES:
        raise FileNotFoundError(
            f"a training set is missing: --source={source}. A .jsonl, .json or .parquet, or a directory with train of"
            " these, is accepted. Check the path, or leave --source out for the hub."
        )
    return found[0]


def _evaluation(args: argparse.Namespace) -> dict[str, list[Row]]:
    from verl_qerl.cli.eval.questions import read_questions

    source, found = EVALUATION[args.name], read_questions(args.name, args.source)
    return {"test": [_row(source, one.text, MATH_INSTRUCTION, one.truth, "test") for one in found]}


def gsm8k_row(record: Mapping[str, Any], split: str) -> Row:
    """A row of verl's schema, of a question and its answer in GSM8K's form; a ValueError if that has no `#### N`."""
    question, answer = record["question"], record["answer"]
    return _row(GSM8K_SOURCE, question, GSM8K_INSTRUCTION, gsm8k_ground_truth(answer), split, answer)


def _math_row(record: Mapping[str, Any], split: str, where: str) -> Row:
    """A row from the hub's flat columns, or from a parquet that nests them in reward_model.ground_truth."""
    nested = columns_of(columns_of(record.get("reward_model")).get("ground_truth"))
    fields = record if "solution" in record else nested or record
    problem = "problem" if fields.get("problem") else "question"
    _check_kinds(fields, {problem: str, "solution": str}, where)
    question, solution = fields[problem], fields["solution"]
    truth = last_boxed(solution)  # as verl; a column `target`, where there is one, is normalised and fails its reward
    if not truth.strip():
        raise ValueError(
            f"{where} cannot be used: solution={solution[-80:]!r}. Accepted is one whose last box is not empty. Mend or"
            " drop the row."
        )
    row = _row(MATH_SOURCE, question, MATH_INSTRUCTION, truth, split, solution)
    row["extra_info"] |= {key: record[key] for key in ("level", "type") if key in record}
    return row


def _row(source: str, question: str, instruction: str, truth: str, split: str, answer: str | None = None) -> Row:
    """A row of verl's schema; the answer is the truth alone where it is not given."""
    return {
        "data_source": source,
        "prompt": _chat(question, instruction),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "question": question, "answer": truth if answer is None else answer},
    }


def _chat(question: str, instruction: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question} {instruction}"}]


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


def from_hub(name: str, split: str, config: str | None, option: str = "--source") -> list[Row]:
    """The rows of a split of a data set of the hub.

    Raises:
        ValueError: The hub does not answer; `option` is what takes a directory instead.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split).to_list()
    except ConnectionError as error:
        raise ValueError(f"the hub did not answer: source={name}. {error}. Give a directory with {option}.") from error


def _levels(text: str) -> tuple[str, ...]:
    """`3-5` or `4` as MATH's level names."""
    match = re.fullmatch(r"([1-5])(?:-([1-5]))?", text)
    if match is None or (match[2] or match[1]) < match[1]:
        raise argparse.ArgumentTypeError(f"levels={text}. A-B with 1 <= A <= B <= 5, or one level, is accepted")
    return tuple(f"Level {level}" for level in range(int(match[1]), int(match[2] or match[1]) + 1))
