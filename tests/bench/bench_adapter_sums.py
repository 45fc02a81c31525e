"""How much of a young LoRA adapter arrives in the outputs of one linear, by how it is summed, and what that costs.

    python tests/bench/bench_adapter_sums.py --out tests/bench/results/<gpu>/adapter_sums.json

B is what one step of Adam makes of it, so the adapter's term is far below a rounding step of the output:

    added      two products, both rounded, then added, as PEFT and vLLM do
    in place   the term first, then `addmm_`
    whole      the same without torch's allow_bf16_reduced_precision_reduction
    actor      kernels.actor.adapted_linear
    rollout    vllm_plugin.weights.linear_ops, in bf16 by cuBLAS from --decode-rows on

Share is the mean change of the outputs over that of the term; error that of the outputs beside float64, root mean
square over their mean size. Microseconds are medians, with the host's launches.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import result_file
import rollout_arms
import torch
import torch.nn.functional as F
from qerl_testing import quantize
from small_adapter import STEP, draw, share_that_arrives

from verl_qerl.formats import reference
from verl_qerl.kernels.actor.adapted_linear import FrozenWeights, adapted_linears
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.kernels.rollout.w4a16_launch import TOKENS, guess_launch
from verl_qerl.vllm_plugin.weights import linear_ops
from verl_qerl.vllm_plugin.weights.plans import PLANS, Plan

BIAS = 4.0  # of q, k and v
PLAN = "adapter_sums"
ERROR_OUTPUTS = 2**25  # float64 products of more are left out
Product = Callable[[torch.Tensor], torch.Tensor]  # of B


def ways(
    x: torch.Tensor, W: torch.Tensor, A: torch.Tensor, bias: torch.Tensor | None, tiles: Any, decode_rows: int
) -> Iterator[tuple[str, Product]]:
    """Names and products; `tiles` are those of W."""
    low, (N, K), device = x @ A.t(), W.shape, x.device
    weights = FrozenWeights(lambda _: [W], lambda _: [W])
    plan = PLAN * x.is_cuda
    PLANS[PLAN] = Plan(tuple(guess_launch(N, K, tokens) for tokens in TOKENS), decode_rows)
    adapter = member_of_tile((N,), device), torch.zeros(len(x), dtype=torch.int64, device=device), torch.tensor([False])
    yield "added", lambda B: F.linear(x, W, bias) + F.linear(low, B)
    yield "in place", lambda B: F.linear(low, B, bias).addmm_(x, W.t())
    yield "whole", lambda B: whole(F.linear(low, B, bias), x, W)
    yield "actor", lambda B: adapted_linears(x, weights, [A], [B], [1.0], [bias])[0]
    yield "rollout", lambda B: linear_ops.lora_linear_repacked(x, *tiles, bias, plan, A, B, *adapter)


def whole(y: torch.Tensor, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """Add x W^T to y in place, without sums in bf16 of parts of K."""
    options = torch.backends.cuda.matmul
    before = options.allow_bf16_reduced_precision_reduction
    options.allow_bf16_reduced_precision_reduction = False
    try:
        return y.addmm_(x, W.t())
    finally:
        options.allow_bf16_reduced_precision_reduction = before


def measure(linears: dict[str, tuple[int, int]], rows: list[int], rank: int, decode_rows: int, device: str) -> Iterator:
    """A row for each linear, number of rows and way."""
    for name, (N, K) in linears.items():
        with_bias = name.split(".")[-1] in ("q_proj", "k_proj", "v_proj")
        bias = torch.full((N,), BIAS, dtype=torch.bfloat16, device=device) if with_bias else None
        for count in rows:
            x, W, A = draw(count, N, K, rank, device)
            packed = quantize(W)
            W = reference.dequantize(packed, torch.bfloat16)
            B = torch.full((N, rank), STEP, dtype=x.dtype, device=device)
            for way, product in ways(x, W, A, bias, repack(packed), decode_rows):
                found = {"linear": name, "N": N, "K": K, "rows": count, "bias": bias is not None, "way": way}
                found["share"] = round(share_that_arrives(product, x, A, N), 3)
                if count * N <= ERROR_OUTPUTS:
                    exact = x.double() @ W.double().t() + (x.double() @ A.double().t()) @ B.double().t()
                    exact += 0 if bias is None else bias.double()
                    error = (product(B).double() - exact).square().mean().sqrt() / exact.abs().mean()
                    found["error"] = float(f"{error.item():.3g}")
                if device == "cuda":
                    from triton.testing import do_bench

                    found["us"] = round(1e3 * do_bench(partial(product, B), warmup=5, rep=20, return_mode="median"), 1)
                yield found


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5B", choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 8192, 16384])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--decode-rows", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    options, rows = vars(args) | {"out": args.out.name}, []
    for row in measure(rollout_arms.SHAPES[args.model].linears, args.rows, args.rank, args.decode_rows, args.device):
        rows.append(row)
        print(row, flush=True)
    result_file.write(args.out, result_file.header(options) | {"rows": rows})


if __name__ == "__main__":
    main()
