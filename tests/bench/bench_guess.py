"""Launches for linears that no table has: what is guessed beside what was measured, a linear at a time.

    python tests/bench/bench_guess.py --out tests/bench/results/<gpu>/guess.json

For each linear of the shipped table: microseconds of `kernels.rollout.w4a16_matmul` with an adapter under the launch of
the table (`measured`), the model's guess with both ways to make X A^T (`guess`, `guess_each`), and the launch of the
nearest other linear of the table (`nearest`), if it is one for this linear too.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import result_file

from verl_qerl.cli.tune.command import tiled_copies, time_with_adapter
from verl_qerl.kernels.rollout import w4a16_matmul
from verl_qerl.kernels.rollout.w4a16_launch import (
    EACH,
    GATHERED,
    TOKENS,
    Launch,
    both_ways,
    guess_launch,
    launch_candidates,
)
from verl_qerl.vllm_plugin.weights import plans


def choices(row: dict[str, Any], others: list[dict[str, Any]], tokens: int) -> dict[str, Launch]:
    """Name -> launch for so many rows of the linear of `row`."""
    launches = {(other["N"], other["K"]): other["launches"] for other in others}
    N, K = row["N"], row["K"]
    near = launches[plans.closest(launches, (N, K))]
    guess = guess_launch(N, K, tokens)
    found = {"measured": Launch(*row["launches"][str(tokens)]), "guess": guess}
    each = guess._replace(intermediate=EACH)
    if each in both_ways(tokens, guess):
        found["guess_each"] = each
    nearest = Launch(*near[str(tokens)])
    can = nearest._replace(intermediate=GATHERED) in launch_candidates(N, K, tokens)
    return found | ({"nearest": nearest} if can else {})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    table = plans.read_table(plans.shipped_path("NVIDIA H200"))
    assert table is not None
    of_all = {
        (row["N"], row["K"], tokens): choices(row, [other for other in table["rows"] if other is not row], tokens)
        for row in table["rows"]
        for tokens in TOKENS
    }
    w4a16_matmul.prepare((tokens, launch) for (_, _, tokens), found in of_all.items() for launch in found.values())
    result: dict[str, Any] = {**result_file.header({}), "rows": []}
    for N, K in sorted({(N, K) for N, K, _ in of_all}):
        packed = tiled_copies(N, K)
        for tokens in TOKENS:
            us = {name: time_with_adapter(tokens, packed, launch) for name, launch in of_all[N, K, tokens].items()}
            result["rows"].append({"N": N, "K": K, "tokens": tokens, "us": us})
        result_file.write(args.out, result)
    print(summary(result["rows"]))
    return 0


def summary(rows: list[dict[str, Any]]) -> str:
    """Median and largest time of each choice, that of the measured launch being 1, by rows of x."""
    lines = ["| rows | choice | median | most |", "|---|---|---|---|"]
    for tokens in TOKENS:
        of = [row["us"] for row in rows if row["tokens"] == tokens]
        for name in dict.fromkeys(name for us in of for name in us if name != "measured"):
            ratios = [us[name] / us["measured"] for us in of if name in us]
            lines.append(f"| {tokens} | {name} | {statistics.median(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
