"""Tokens drawn from softmax(logits / temperature), which reads the logits once.

vLLM's sampler copies the logits to float32 and passes over them some eight times more (temperature, log-softmax,
softmax, exponential noise, quotient, argmax). Drawing by the inverse of the distribution needs a sum, two uniform
numbers a row, and one block of the vocabulary again:

    sums    of exp(logits / temperature) in each block of the vocabulary        reads the logits
    draw    a block by its share of all sums, then a token by its share of it   reads one block
    rank    of the token among all, when log-probs are asked for                reads the logits

Two numbers, since one of 24 bits could not tell apart the unlikely tokens of a whole vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tokens of the vocabulary
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, with_rank: bool = False
) -> Drawn:
    """One token of each row, with the probability that softmax(logits / temperature) gives it.

    Args:
        logits: [R, V] of a floating dtype, rows of stride 1; -inf is never drawn.
        temperature: [R] float32, above 0.
        uniform: [R, 2] float32 in [0, 1): the same numbers draw the same tokens.
        with_rank: Count, too.

    Returns:
        tokens [R] int64; their log-probs [R] float32, NaN where a row has a NaN; how many tokens of the row are as
        likely or likelier [R] int64, or None.
    """
    draw = launch if logits.is_cuda else _in_torch
    return draw(logits, temperature, uniform, with_rank)


def _in_torch(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, with_rank: bool) -> Drawn:
    scaled = logits.float() / temperature[:, None]
    blocks = torch.nn.functional.pad(scaled, (0, -scaled.shape[1] % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
    largest = _finite(blocks.amax((1, 2)))
    mass = (blocks - largest[:, None, None]).exp()
    block = _pick(mass.sum(2), uniform[:, 0])
    rows = torch.arange(len(logits), device=logits.device)
    chosen = blocks[rows, block]
    chosen = (chosen - _finite(chosen.amax(1))[:, None]).exp()
    tokens = block * BLOCK + _pick(chosen, uniform[:, 1])
    value = scaled[rows, tokens]
    log_probs = value - largest - mass.sum((1, 2)).log()
    return tokens, log_probs, (scaled >= value[:, None]).sum(1) if with_rank else None


def _finite(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest == -torch.inf, 0.0, largest)


def _pick(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of the first whose running sum exceeds its part of the sum; the last of any mass when rounding has none."""
    running = mass.cumsum(1)
    index = torch.arange(mass.shape[1], device=mass.device)
    there = mass > 0
    last = torch.where(there, index, 0).amax(1)
    found = there & (running > uniform[:, None] * running.amax(1, keepdim=True))
    return torch.where(found, index, last[:, None]).amin(1)


def launch(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, with_rank: bool) -> Drawn:
    """Run the Triton kernels; as `draw_tokens`."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocabulary, BLOCK)
    largest = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    source = (logits, temperature.contiguous(), vocabulary, logits.stride(0))
    shape: Any = {"BLOCK": BLOCK, "num_warps": 8}
    scan: Any = {"BLOCKS": max(16, triton.next_power_of_2(blocks)), **shape}
    _sums_kernel[(rows, blocks)](*source, largest, sums, blocks, **shape)
    _draw_kernel[(rows,)](*source, largest, sums, blocks, uniform.contiguous(), tokens, log_probs, **scan)
    if not with_rank:
        return tokens, log_probs, None
    rank = torch.zeros_like(tokens)
    _rank_kernel[(rows, blocks)](*source, tokens, rank, **shape)
    return tokens, log_probs, rank


@triton.jit
def _block_of(logits_ptr, temperature_ptr, vocabulary, stride, row, block, BLOCK: tl.constexpr):
    n = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + row.to(tl.int64) * stride + n, mask=n < vocabulary, other=float("-inf"))
    return values.to(tl.float32) / tl.load(temperature_ptr + row)


@triton.jit
def _finite_max(values):
    largest = tl.max(values, 0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _pick_one(mass, uniform, SIZE: tl.constexpr):
    running = tl.cumsum(mass, 0)
    index = tl.arange(0, SIZE)
    there = mass > 0
    last = tl.max(tl.where(there, index, 0), 0)
    found = there & (running > uniform * tl.max(running, 0))
    return tl.min(tl.where(found, index, last), 0)


@triton.jit
def _sums_kernel(logits_ptr, temperature_ptr, vocabulary, stride, max_ptr, sum_ptr, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    values = _block_of(logits_ptr, temperature_ptr, vocabulary, stride, row, block, BLOCK)
    largest = _finite_max(values)
    tl.store(max_ptr + row * blocks + block, largest)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(values - largest), 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    vocabulary,
    stride,
    max_ptr,
    sum_ptr,
    blocks,
    uniform_ptr,
    token_ptr,
    log_prob_ptr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    sums = tl.load(sum_ptr + row * blocks + b, mask=b < blocks, other=0.0)
    # A block of -inf alone has no sum, and its maximum stands for none.
    largest = tl.load(max_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    largest = tl.where(sums == 0.0, float("-inf"), largest)
    shift = _finite_max(largest)
    mass = tl.where(sums == 0.0, 0.0, sums * tl.exp(largest - shift))
    block = _pick_one(mass, tl.load(uniform_ptr + 2 * row), BLOCKS)
    values = _block_of(logits_ptr, temperature_ptr, vocabulary, stride, row, block, BLOCK)
    chosen = _pick_one(tl.exp(values - _finite_max(values)), tl.load(uniform_ptr + 2 * row + 1), BLOCK)
    value = tl.sum(tl.where(tl.arange(0, BLOCK) == chosen, values, 0.0), 0)
    tl.store(token_ptr + row, tl.cast(block * BLOCK + chosen, tl.int64))  # type: ignore[reportOperatorIssue]
    tl.store(log_prob_ptr + row, value - shift - tl.log(tl.sum(mass, 0)))


@triton.jit
def _rank_kernel(logits_ptr, temperature_ptr, vocabulary, stride, token_ptr, rank_ptr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    values = _block_of(logits_ptr, temperature_ptr, vocabulary, stride, row, block, BLOCK)
    drawn = tl.load(logits_ptr + row.to(tl.int64) * stride + tl.load(token_ptr + row)).to(tl.float32)
    drawn = drawn / tl.load(temperature_ptr + row)
    there = block * BLOCK + tl.arange(0, BLOCK) < vocabulary  # -inf may be drawn, of a row of nothing else
    tl.atomic_add(rank_ptr + row, tl.sum((there & (values >= drawn)).to(tl.int64), 0))
