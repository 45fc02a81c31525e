"""Rows of verl's schema: prompts, data sources and ground truths are those of verl's examples.

They are examples/data_preprocess/{gsm8k,math_dataset}.py, which are not in verl's wheel.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_qerl.cli.data.rows import Row, check_kinds, columns_of
from verl_qerl.cli.output_dir import new_directory

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
PROBLEM = {"question": str, "answer": str}  # keys of JSON lines
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")  # as verl's reward reads it


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


def gsm8k_row(record: Mapping[str, Any], split: str) -> Row:
    """A row of verl's schema, of a question and its answer in GSM8K's form; a ValueError if that has no `#### N`."""
    question, answer = record["question"], record["answer"]
    return row_of(GSM8K_SOURCE, question, GSM8K_INSTRUCTION, gsm8k_ground_truth(answer), split, answer)


def math_row(record: Mapping[str, Any], split: str, where: str) -> Row:
    """A row from the hub's flat columns, or from a parquet that nests them in reward_model.ground_truth.

    Its truth is empty where the last box of the solution is.
    """
    nested = columns_of(columns_of(record.get("reward_model")).get("ground_truth"))
    fields = record if "solution" in record else nested or record
    problem = "problem" if fields.get("problem") else "question"
    check_kinds(fields, {problem: str, "solution": str}, where)
    question, solution = fields[problem], fields["solution"]
    truth = last_boxed(solution)  # as verl; a column `target`, where there is one, is normalised and fails its reward
    row = row_of(MATH_SOURCE, question, MATH_INSTRUCTION, truth, split, solution)
    row["extra_info"] |= {key: record[key] for key in ("level", "type") if key in record}
    return row


def row_of(source: str, question: str, instruction: str, truth: str, split: str, answer: str | None = None) -> Row:
    """A row of verl's schema; the answer is the truth alone where it is not given."""
    return {
        "data_source": source,
        "prompt": _chat(question, instruction),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "question": question, "answer": truth if answer is None else answer},
    }


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


def _chat(question: str, instruction: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question} {instruction}"}]
