"""The training loop and the accuracy check of `pretrain`."""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_qerl.cli.chat_tokenizer import encode_prompts
from verl_qerl.cli.data import gsm8k_ground_truth

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

WARMUP = 0.05  # of the run
FINAL_LR = 0.05  # of the peak
CHECKS = 20  # accuracy checks per run, when a target is given


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
        batch_size: Problems generated together.
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
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return bool(found) and found[-1].replace(",", "") == gsm8k_ground_truth(answer)
