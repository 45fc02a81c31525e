"""What the benchmarks of a model's first updates share: texts, their log-probs and gradient, and the command."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import result_file
import torch
from transformers import AutoModelForCausalLM

from verl_qerl.cli.data.rows import read_rows
from verl_qerl.cli.prompts import load_tokenizer, token_ids

Text = tuple[torch.Tensor, int]  # ids [1, L] of a question and its answer, tokens of the prompt


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Values of bf16, in float32."""
    return tensor.bfloat16().float()


def read_texts(model: Path, questions: Path, count: int) -> list[Text]:
    """As many questions with their answers."""
    tokenizer, texts = load_tokenizer(model, chats=True), []
    for row in read_rows(questions, "questions", count):
        prompt = token_ids(tokenizer, [{"role": "user", "content": row["question"]}])
        texts.append((torch.tensor([prompt + token_ids(tokenizer, row["answer"])]), len(prompt)))
    return texts


def log_probs(model: Any, text: Text) -> torch.Tensor:
    """[answer's tokens, V]."""
    ids, prompt = text
    logits = model(input_ids=ids, logits_to_keep=ids.shape[1] - prompt + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def of_tokens(found: torch.Tensor, text: Text) -> torch.Tensor:
    """Log-probs of the answer's own tokens."""
    ids, prompt = text
    return found.gather(1, ids[0, prompt:, None])[:, 0]


def learn(model: Any, texts: list[Text]) -> None:
    """Add the gradient of the answers' negative log-probs."""
    for text in texts:
        (-of_tokens(log_probs(model, text), text).mean()).backward()


def run(
    description: str | None,
    measure: Callable[..., Iterator[dict[str, Any]]],
    texts: int,
    updates: Sequence[int],
    lr: float,
) -> None:
    """Run the command of a benchmark, and write its result file anew after each row.

    Args:
        description: Of the command.
        measure: Rows of (model, texts of the gradient, other texts, numbers of updates, learning rate).
        texts: Default of `--texts`, as `updates` and `lr` are of theirs.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--texts", type=int, default=texts, help="for the gradient, and as many that are asked")
    parser.add_argument("--updates", type=int, nargs="+", default=list(updates))
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    read = read_texts(args.model, args.questions, 2 * args.texts)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rows = []
    for row in measure(model, read[: args.texts], read[args.texts :], args.updates, args.lr):
        rows.append(row)
        print(row, flush=True)
        result_file.write(args.out, result_file.header(options) | {"rows": rows})
