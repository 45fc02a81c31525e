"""The table of an evaluation, and that of two evaluations of the same questions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.record import write_json
from verl_qerl.cli.eval.records import Answered, read_lines, read_settings, tasks_of
from verl_qerl.cli.eval.statistics import Interval, accuracy, majority, paired, pass_at

SUMMARY = "summary.json"
_SHOWN = 3  # answers, where all are wrong
_TAIL = 300  # characters of each
# Of settings.json: what two evaluations may differ in.
_COMPARED = ("model", "adapter", "adapter_sha256", "checkpoint", "weight_files", "format", "verl_qerl", "seed")


def summarize(lines: Sequence[Answered]) -> dict[str, Any]:
    """What is said of one task; `pass_at` for 1, 2, 4, ... and all samples."""
    samples = len(lines[0].answers)
    answers = [answer for line in lines for answer in line.answers]
    found = accuracy([line.share for line in lines], samples)
    ks = sorted({1, samples, *(2**power for power in range(1, samples.bit_length()) if 2**power <= samples)})
    right = [sum(answer.right for answer in line.answers) for line in lines]
    return {
        "questions": len(lines),
        "samples": samples,
        "accuracy": found._asdict(),
        "pass_at": {str(k): sum(pass_at(one, samples, k) for one in right) / len(lines) for k in ks},
        "majority": sum(majority(line.answers) for line in lines) / len(lines),
        "mean_tokens": sum(answer.tokens for answer in answers) / len(answers),
        "cut_off": sum(answer.cut for answer in answers) / len(answers),
        "without_answer": sum(answer.answer is None for answer in answers) / len(answers),
        "boxed": sum(answer.boxed for answer in answers) / len(answers),
    }


def report(out: Path, tasks: Sequence[str]) -> int:
    """Write summary.json and print the table; what all-wrong answers look like."""
    lines = {task: read_lines(out, task) for task in tasks}
    found = {task: summarize(answered) for task, answered in lines.items()}
    write_json(out / SUMMARY, {"settings": read_settings(out), "tasks": found})
    print("\n".join(_table(found)))
    for task, answered in lines.items():
        if found[task]["accuracy"]["mean"] == 0:
            print("\n".join(_all_wrong(task, answered)))
        if found[task]["cut_off"] > 0.1:
            print(f"{task}: {found[task]['cut_off']:.0%} of the answers were cut off. Raise --max-tokens.")
    print(f"wrote {out / SUMMARY}")
    return 0


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    names = ["task", "questions", "samples", "pass@1", "95 %", "pass@k", "maj@k", "tokens", "cut off", "no answer"]
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for task, one in found.items():
        mean, low, high = Interval(**one["accuracy"])
        last = one["pass_at"][str(one["samples"])]
        cells = [task, str(one["questions"]), str(one["samples"]), f"{100 * mean:.1f}"]
        cells += [f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * last:.1f}", f"{100 * one['majority']:.1f}"]
        cells += [f"{one['mean_tokens']:.0f}", f"{one['cut_off']:.1%}", f"{one['without_answer']:.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, "k is the number of samples; the interval is over questions."]


def _all_wrong(task: str, lines: Sequence[Answered]) -> list[str]:
    text = [f"{task}: no answer is right. The first {min(_SHOWN, len(lines))} end so:"]
    for line in lines[:_SHOWN]:
        answer = line.answers[0]
        state = ", cut off" if answer.cut else ""
        text.append(f"  {line.index}: wanted {line.question.truth!r}, found {answer.answer!r}{state}, in")
        text.append(f"    {answer.text[-_TAIL:]!r}")
    return text


def compare(first: Path, second: Path) -> int:
    """Print the difference of each task that both have: second - first.

    Raises:
        ValueError: They have no task in common, or other questions in one.
    """
    ours, theirs = read_settings(first), read_settings(second)
    for name in ours | theirs:
        if name not in _COMPARED and ours.get(name) != theirs.get(name):
            print(f"{name} differs too: {ours.get(name)!r} and {theirs.get(name)!r}")
    tasks = [task for task in tasks_of(first) if task in tasks_of(second)]
    if not tasks:
        raise ValueError(
            f"no task is in both: {first} has {tasks_of(first)} and {second} has {tasks_of(second)}. The same task is"
            " accepted. Evaluate both on it."
        )
    print("| task | questions | first | second | second - first | 95 % | p |\n" + "|---" * 7 + "|")
    for task in tasks:
        print(_compared(task, read_lines(first, task), read_lines(second, task)))
    print("The interval and p are of a paired bootstrap over questions.")
    return 0


def _compared(task: str, ours: Sequence[Answered], theirs: Sequence[Answered]) -> str:
    asked = [[(line.index, line.question) for line in lines] for lines in (ours, theirs)]
    if asked[0] != asked[1]:
        raise ValueError(
            f"the questions of {task} are others: {len(ours)} and {len(theirs)} were answered. The same ones are"
            " accepted. Finish the evaluation that is not done, or evaluate both with the same --source and --limit."
        )
    shares = [[line.share for line in lines] for lines in (ours, theirs)]
    found = paired(shares[0], shares[1])
    first, second = (100 * sum(one) / len(one) for one in shares)
    interval = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
    cells = [task, str(len(ours)), f"{first:.1f}", f"{second:.1f}", f"{100 * found.mean:+.1f}", interval]
    return f"| {' | '.join([*cells, f'{found.p:.4f}'])} |"
