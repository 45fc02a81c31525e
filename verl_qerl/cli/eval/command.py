"""`eval`: ask what has not been answered yet, judge and keep each answer, and print the table."""

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_qerl import __version__
from verl_qerl.cli.eval.engines import CHECKED, Work, gpus, in_processes, judged
from verl_qerl.cli.eval.questions import SLOT, TASKS, Question, read_questions
from verl_qerl.cli.eval.records import Answered, append, check_questions, open_records, read_lines
from verl_qerl.cli.eval.report import report
from verl_qerl.cli.eval.served import ADAPTER, served
from verl_qerl.cli.export.fsdp_checkpoint import shards_folder
from verl_qerl.cli.output_dir import claimed
from verl_qerl.cli.prompts import load_tokenizer, token_ids
from verl_qerl.vllm_plugin.offline import EngineOptions

_SAMPLING = ("samples", "temperature", "top_p", "max_tokens", "prompt", "seed")


@dataclass(frozen=True)
class Prompt:
    """A question that is to be answered, with its chat as token ids."""

    task: str
    index: int
    question: Question
    tokens: list[int]


def run(args: argparse.Namespace) -> int:
    """Evaluate, then print the table."""
    devices = gpus(args.data_parallel, args.tensor_parallel)
    questions = {task: _questions(task, args.source) for task in args.tasks}
    if args.checkpoint:  # a run that goes on may save its next step meanwhile
        args.checkpoint = shards_folder(args.checkpoint)
    with claimed(args.out):
        open_records(args.out, settings(args))
        missing = _unanswered(args.out, questions, args.limit)
        if missing:
            with served(args.model, args.adapter, args.checkpoint, args.format, args.out) as found:
                asked = encode(found.model, missing, args.prompt)
                answer(_options(found, args, asked), devices, asked, args)
        return report(args.out, args.tasks)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for an evaluation to go on."""
    given = {name: getattr(args, name) for name in _SAMPLING}
    adapter = (args.adapter / ADAPTER) if args.adapter else None
    where = {
        "model": str(Path(args.model).resolve()) if args.model and Path(args.model).exists() else args.model,
        "adapter": str(args.adapter.resolve()) if args.adapter else None,
        "adapter_sha256": hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter and adapter.is_file() else None,
        "checkpoint": str(args.checkpoint.resolve()) if args.checkpoint else None,
        "weight_files": _weight_files(args.model, args.checkpoint),
        "format": args.format,
    }
    return {"verl_qerl": __version__, **where, **given}


def _weight_files(model: str | None, checkpoint: Path | None) -> str | None:
    """What another training at the same path changes of the files; None for those of the hub."""
    files = [*checkpoint.glob("model_world_size_*")] if checkpoint else []
    files += [file for file in Path(model).glob("*") if file.suffix in (".safetensors", ".bin")] if model else []
    found = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if not found:
        return None
    size, last = sum(size for _, size, _ in found), max(written for *_, written in found)
    digest = hashlib.sha256(str(found).encode()).hexdigest()[:16]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last / 1e9))
    return f"{len(found)} of {size} bytes, last written {when}, {digest}"


def _questions(task: str, source: Path | None) -> list[Question]:
    found = read_questions(task, source)
    if len(found) != TASKS[task].count:
        print(f"{task}: {len(found)} questions, where {TASKS[task].count} are published")
    return found


def _unanswered(
    out: Path, questions: Mapping[str, Sequence[Question]], limit: int | None
) -> list[tuple[str, int, Question]]:
    missing = []
    for task, asked in questions.items():
        lines = read_lines(out, task)
        check_questions(lines, asked, f"{out / task}.jsonl")
        done = {line.index for line in lines}
        if done:
            print(f"{task}: {len(done)} of {len(asked)} questions were answered before")
        missing += [(task, index, question) for index, question in enumerate(asked[:limit]) if index not in done]
    return missing


def encode(model: str, missing: Sequence[tuple[str, int, Question]], prompt: str) -> list[Prompt]:
    """Each question as a chat up to the assistant's turn."""
    tokenizer = load_tokenizer(model, chats=True)
    chats = [[{"role": "user", "content": prompt.replace(SLOT, question.text)}] for _, _, question in missing]
    return [Prompt(*what, token_ids(tokenizer, chat)) for what, chat in zip(missing, chats, strict=True)]


def _options(found: EngineOptions, args: argparse.Namespace, asked: Sequence[Prompt]) -> EngineOptions:
    from transformers import AutoConfig

    longest = max(len(one.tokens) for one in asked)
    length = longest + max(args.max_tokens, CHECKED) + 1  # scoring an answer adds a token
    room = getattr(AutoConfig.from_pretrained(found.model), "max_position_embeddings", None)
    if room is not None and length > room:
        remedy = f"At most {room - longest - 1} is accepted. Lower --max-tokens."
        if room - longest - 1 < CHECKED:
            remedy = f"Questions of at most {room - CHECKED - 1} are accepted. Choose other --tasks."
        raise ValueError(
            f"answers do not fit the model: --max-tokens={args.max_tokens} after a question of {longest} tokens, where"
            f" it has {room} positions. {remedy}"
        )
    chosen = {"tensor_parallel": args.tensor_parallel, "memory": args.memory, "seed": args.seed}
    return replace(found, max_model_len=length, **chosen)


def answer(
    options: EngineOptions, devices: Sequence[str | None], asked: Sequence[Prompt], args: argparse.Namespace
) -> None:
    """Answer all questions by an engine for each of `devices` (see `gpus`), and record each when it is answered."""
    sampling = {"n": args.samples, "temperature": args.temperature, "max_tokens": args.max_tokens}
    if args.temperature > 0:
        sampling["top_p"] = args.top_p
    work = Work(options, [one.tokens for one in asked], [one.question.truth for one in asked], sampling)
    found = in_processes(work, devices) if args.data_parallel > 1 else judged(work)
    right = answers = 0
    with closing(found), tqdm(total=len(asked), desc="eval", unit="question") as bar:
        for number, each in found:
            one = asked[number]
            append(args.out, one.task, Answered(one.index, one.question, each))
            right, answers = right + sum(answer.right for answer in each), answers + len(each)
            bar.set_postfix_str(f"{right / answers:.1%} right")
            bar.update()
