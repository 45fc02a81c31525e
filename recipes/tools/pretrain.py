"""A tokenizer and a Qwen2 trained from scratch on questions and answers, ready for verl.

    python recipes/tools/pretrain.py --data data/train.jsonl --out base [--size tiny] [--minutes 1]

The result is right sometimes, which is what reinforcement learning needs to start. Prompts go through the chat template
and the GSM8K instruction that verl uses at rollout; nothing else is learned.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat_tokenizer import END_ID, PAD_ID, encode_answers, encode_prompts, train_tokenizer
from packing import Document, collate, document_stream, packed_rows, single_rows

from verl_qerl.cli import run_guarded
from verl_qerl.cli.data.rows import read_jsonl
from verl_qerl.cli.data.schema import GSM8K_ANSWER, PROBLEM, gsm8k_ground_truth, gsm8k_prompt
from verl_qerl.cli.output_dir import check_absent, new_directory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

TOKENIZER_TEXTS = 5000  # per file; more do not change the merges of a small vocabulary
WARMUP = 0.05  # of the run
FINAL_LR = 0.05  # of the peak
CHECKS = 20  # accuracy checks per run, when a target is given


@dataclass(frozen=True)
class Size:
    """Shape and training settings of one model size.

    Widths are multiples of 128, which NVFP4 kernels take, and a head has 64, the least vLLM has a CPU kernel for.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    lr: float
    rows: int  # per batch
    row_length: int | None  # tokens; None puts one problem into a row
    prompt_weight: float  # of prompt tokens in the loss; answers have 1
    max_new_tokens: int


SIZES = {
    "tiny": Size(256, 512, 2, 4, 2, 512, 1.5e-3, 32, None, 0.0, 40),
    "small": Size(384, 1024, 6, 6, 6, 2048, 1e-3, 32, 512, 0.3, 256),
    "100m": Size(768, 2304, 12, 12, 12, 8192, 6e-4, 128, 512, 0.3, 320),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report greedy and sampled accuracy, and save; the directory appears whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines with question and answer")
    parser.add_argument("--repeats", type=int, nargs="+", help="how often a pass repeats each file (default: once)")
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1.0, help="training time at most (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, help="optimizer steps at most; the same model on any machine")
    parser.add_argument("--vocab-size", type=int, help="multiple of 64")
    parser.add_argument("--batch-size", type=int, help="rows per step")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile; pays for runs of some minutes on a GPU")
    parser.add_argument("--eval-data", type=Path, help="held-out JSON lines (default: taken out of the first file)")
    parser.add_argument("--eval-problems", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--target-accuracy", type=float, help="stop once sampled answers reach it, for example 0.3")
    parser.add_argument(
        "--hash-share",
        type=float,
        default=1.0,
        help="share of answers that keep their `#### N`; the rest end in `The answer is N.` (default: %(default)s)",
    )
    return run_guarded(parser, lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    check_absent(args.out)
    size = SIZES[args.size]
    _check(args)
    import torch

    from verl_qerl.cli.model_dir import pick_device

    sources, held_out = _read(args)
    tokenizer, documents = _tokenize(sources, size, args)
    torch.manual_seed(args.seed)
    model = build_model(size, tokenizer, pick_device(args.device))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}, {sum(map(len, documents))} problems")
    report = {"parameters": parameters, **_train(model, tokenizer, documents, held_out, args)}
    with new_directory(args.out) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(str(directory))
        (directory / "pretrain.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['steps']} steps, {report['tokens'] / 1e6:.2f} M tokens in {report['seconds']:.0f} s")
    print(
        f"accuracy on {min(args.eval_problems, len(held_out))} held-out problems: greedy "
        f"{report['greedy_accuracy']:.1%}, sampled {report['sampled_accuracy']:.1%}"
    )
    return 0


def _train(
    model: "Qwen2ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    documents: "list[list[Document]]",
    held_out: list[dict[str, str]],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Train, turn the model to bfloat16 and measure it."""
    import torch
    from torch import nn

    size = SIZES[args.size]

    def measure(count: int, sample: bool) -> float:
        return accuracy(model, tokenizer, held_out[:count], sample=sample, max_new_tokens=size.max_new_tokens)

    target = args.target_accuracy
    trained = train(
        model,
        _batches(documents, size, args),
        lr=size.lr if args.lr is None else args.lr,
        budget=Budget(60 * args.minutes, args.max_steps),
        compile_model=args.compile,
        is_good_enough=None if target is None else lambda: measure(100, sample=True) >= target,
    )
    nn.Module.to(model, torch.bfloat16)
    torch.manual_seed(args.seed)
    greedy, sampled = (measure(args.eval_problems, sample) for sample in (False, True))
    return {**asdict(trained), "greedy_accuracy": greedy, "sampled_accuracy": sampled}


def build_model(size: Size, tokenizer: "PreTrainedTokenizerFast", device: str) -> "Qwen2ForCausalLM":
    """A Qwen2 with random weights whose vocabulary is exactly the tokenizer's."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with torch.device(device):
        return Qwen2ForCausalLM(config)


def _check(args: argparse.Namespace) -> None:
    for name in ("minutes", "max_steps", "eval_problems", "batch_size", "lr"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(
                f"no such run: {name}={value}. A positive finite number is accepted. Change --{name.replace('_', '-')}."
            )
    if args.repeats is not None and (len(args.repeats) != len(args.data) or min(args.repeats) < 1):
        raise ValueError(
            f"repeats do not fit the files: repeats={args.repeats} for {len(args.data)} files. One count from 1 per "
            "file is accepted. Change --repeats."
        )
    if not 0 <= args.hash_share <= 1:
        raise ValueError(f"not a share: --hash-share={args.hash_share}. 0 to 1 is accepted. Change it.")
    if args.target_accuracy is not None and not 0 < args.target_accuracy <= 1:
        raise ValueError(
            f"the target is not a share: target_accuracy={args.target_accuracy}. 0 to 1 is accepted. Change it."
        )


def _read(args: argparse.Namespace) -> tuple[list[list[dict[str, str]]], list[dict[str, str]]]:
    """The problems of each file, and the held-out ones, whose answers have a result to compare with."""
    sources = [read_jsonl(path, PROBLEM) for path in args.data]
    if args.eval_data is not None:
        held_out = read_jsonl(args.eval_data, PROBLEM)[: args.eval_problems]
    else:
        held_out, sources[0] = sources[0][: args.eval_problems], sources[0][args.eval_problems :]
    if not sources[0]:
        raise ValueError(
            f"no problem is left to train on: eval_problems={args.eval_problems}. Fewer than {args.data[0]} holds are "
            "accepted. Lower it, or give --eval-data."
        )
    for problem in held_out:
        gsm8k_ground_truth(problem["answer"])
    return [_mix_endings(source, args.hash_share, args.seed) for source in sources], held_out


def _mix_endings(problems: list[dict[str, str]], share: float, seed: int) -> list[dict[str, str]]:
    """Let only `share` of the answers end as the reward wants, so that there is something left to learn."""
    rng = random.Random(seed)
    endings = {True: r"#### \1", False: r"The answer is \1."}
    return [{**row, "answer": GSM8K_ANSWER.sub(endings[rng.random() < share], row["answer"])} for row in problems]


def _tokenize(
    sources: list[list[dict[str, str]]], size: Size, args: argparse.Namespace
) -> "tuple[PreTrainedTokenizerFast, list[list[Document]]]":
    texts = (
        text
        for source in sources
        for row in source[:TOKENIZER_TEXTS]
        for text in ("user\n" + gsm8k_prompt(row["question"])[0]["content"], "assistant\n" + row["answer"])
    )
    tokenizer = train_tokenizer(texts, size.vocab if args.vocab_size is None else args.vocab_size)
    documents = []
    for path, source in zip(args.data, sources, strict=True):
        prompts = encode_prompts(tokenizer, [row["question"] for row in source])
        answers = encode_answers(tokenizer, [row["answer"] for row in source])
        every = [Document(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        fitting = [doc for doc in every if size.row_length is None or len(doc) <= size.row_length]
        if len(fitting) < len(every):
            print(f"{path}: {len(every) - len(fitting)} problems are longer than {size.row_length} tokens, left out")
        if not fitting:
            raise ValueError(
                f"every problem is too long: data={path}, {size.row_length} tokens are accepted. Drop the file."
            )
        documents.append(fitting)
    return tokenizer, documents


def _batches(
    documents: "list[list[Document]]", size: Size, args: argparse.Namespace
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    stream = document_stream(documents, args.repeats or [1] * len(documents), args.seed)
    num_rows = size.rows if args.batch_size is None else args.batch_size
    rows = single_rows(stream, num_rows) if size.row_length is None else packed_rows(stream, num_rows, size.row_length)
    for batch in rows:
        yield collate(batch, pad_id=PAD_ID, prompt_weight=size.prompt_weight, row_length=size.row_length)


@dataclass(frozen=True)
class Budget:
    """When training ends; the learning rate follows whichever is closer to its end."""

    seconds: float
    max_steps: int | None

    def progress(self, seconds: float, step: int) -> float:
        """Part of the run that is over, 1 or more at the end."""
        return max(seconds / self.seconds, step / self.max_steps if self.max_steps else 0.0)


@dataclass(frozen=True)
class Trained:
    """What a run of the loop did; `seconds` leaves out accuracy checks."""

    steps: int
    tokens: int
    seconds: float
    loss: float


def lr_factor(progress: float) -> float:
    """Linear warm-up, then a cosine down to FINAL_LR."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (progress + 1e-3) / WARMUP) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def train(
    model: "Qwen2ForCausalLM",
    batches: "Iterator[tuple[torch.Tensor, torch.Tensor]]",
    *,
    lr: float,
    budget: Budget,
    compile_model: bool,
    is_good_enough: Callable[[], bool] | None,
) -> Trained:
    """Train until the budget is spent or `is_good_enough`, which is asked CHECKS times per run.

    The clock starts after the first step, so that compiling does not count.

    Raises:
        ValueError: The loss is no longer finite.
    """
    import torch
    from tqdm import tqdm

    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    trunk = torch.compile(model.model, dynamic=False) if compile_model else model.model
    step = tokens = checks = 0
    seconds, loss = 0.0, math.nan
    model.train()
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}") as bar:
        while (progress := budget.progress(seconds, step)) < 1:
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_factor(progress)
            ids, weights = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            loss = _step(model, trunk, optimizer, ids, weights)
            if step:
                seconds += time.perf_counter() - start
            step, tokens = step + 1, tokens + ids.numel()
            bar.update(min(100.0, 100 * budget.progress(seconds, step)) - bar.n)
            bar.set_postfix_str(f"step {step} loss {loss:.3f}", refresh=False)
            if is_good_enough is not None and progress * CHECKS >= checks + 1:
                checks = int(progress * CHECKS)
                if is_good_enough():
                    break
    return Trained(step, tokens, seconds, loss)


def _step(
    model: "Qwen2ForCausalLM",
    trunk: "Callable[..., Any]",
    optimizer: "torch.optim.Optimizer",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
) -> float:
    """One optimizer step on the weighted next-token loss; the head sees only positions with a weight."""
    import torch
    from torch.nn import functional as F

    autocast = torch.autocast("cuda", torch.bfloat16) if ids.device.type == "cuda" else nullcontext()
    targets, weights = ids[:, 1:], weights[:, 1:]
    kept = weights > 0
    with autocast:
        hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[kept])
    losses = F.cross_entropy(logits.float(), targets[kept], reduction="none")
    loss = (losses * weights[kept]).sum() / weights[kept].sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = loss.item()
    if not math.isfinite(value):
        raise ValueError(f"training has diverged: loss={value}. A finite loss is accepted. Lower --lr.")
    return value


def accuracy(
    model: "Qwen2ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    problems: Sequence[dict[str, str]],
    *,
    sample: bool,
    max_new_tokens: int,
    batch_size: int = 100,
) -> float:
    """Share of problems answered right under GSM8K's strict rule, the last `#### N` of the answer.

    Args:
        model: In any dtype.
        tokenizer: Pads on the left here.
        problems: With `question` and `answer`.
        sample: At temperature 1 over the whole vocabulary, as verl's rollout; else greedy.
        max_new_tokens: Longer answers are cut.
    """
    import torch

    was_training = model.training
    model.eval()
    right = 0
    for at in range(0, len(problems), batch_size):
        part = problems[at : at + batch_size]
        prompts = encode_prompts(tokenizer, [problem["question"] for problem in part])
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        with torch.no_grad():
            # Its annotations name attributes that only quantized models have.
            out = model.generate(**padded, max_new_tokens=max_new_tokens, **how)  # pyright: ignore
        texts = tokenizer.batch_decode(out[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_right(text, problem["answer"]) for text, problem in zip(texts, part, strict=True))
    model.train(was_training)
    return right / len(problems)


def is_right(text: str, answer: str) -> bool:
    """Whether the last `#### N` of `text` is that of `answer`, compared as verl's gsm8k reward does."""
    found = GSM8K_ANSWER.findall(text)
    return bool(found) and found[-1].replace(",", "") == gsm8k_ground_truth(answer)


if __name__ == "__main__":
    sys.exit(main())
