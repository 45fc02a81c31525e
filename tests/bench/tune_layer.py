"""Launches of kernels/rollout/w4a16_matmul, chosen in a decode layer: the fastest ones alone are not so beside others.

    python tests/bench/tune_layer.py --out verl_qerl/vllm_plugin/weights/tuned/nvidia_h200.json [--models 7B 14B]
        [--rows 8 64] [--linears qkv o down] [--tried 4]

Starts from the table that the package has, of this GPU or an H200. Each linear of the layers of bench_layer.py, with an
adapter, gets the launches that `fusing` of cli/tune/command.py names first, with both ways to make X A^T, and keeps the
one with which the layers that have it take the least time. What `tune` measures else stays: where other paths cross.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_dequantize
import bench_layer
import result_file
import rollout_arms
import torch
from qerl_testing import current_commit

from verl_qerl.cli.tune.command import fusing
from verl_qerl.kernels.rollout import w4a16_matmul
from verl_qerl.kernels.rollout.w4a16_launch import TOKENS, Launch, both_ways
from verl_qerl.vllm_plugin.weights import plans

TRIED = 10
LINEARS = tuple(bench_layer.parts(rollout_arms.SHAPES["7B"]))
LEAST_GAIN = 0.003  # of a layer's time: a part of it is noise


class Layers:
    """Decode layers of some models.

    Args:
        models: Of rollout_arms.SHAPES.
        gpu: As CUDA names it.
        device: Where they lie.
        timer: As bench_dequantize.graph_timer.
        chosen: Of LINEARS, those that get other launches.
    """

    def __init__(
        self,
        models: Sequence[str],
        gpu: str,
        device: str,
        timer: Callable[..., list[float]],
        chosen: Sequence[str] = LINEARS,
    ) -> None:
        self._timer, self._device, self._chosen = timer, device, chosen
        self._of = {
            model: [bench_layer.make_layer(rollout_arms.SHAPES[model], gpu, device) for _ in range(bench_layer.LAYERS)]
            for model in models
        }

    def linears(self) -> dict[str, tuple[tuple[int, int], list[str]]]:
        """Key of a plan -> N and K, and the models that have such a linear; the largest first."""
        found: dict[str, tuple[tuple[int, int], list[str]]] = {}
        for model, layers in self._of.items():
            for name, (K, members) in bench_layer.parts(rollout_arms.SHAPES[model]).items():
                if name in self._chosen:
                    found.setdefault(layers[0][name]["plan"], ((sum(members), K), []))[1].append(model)
        return dict(sorted(found.items(), key=lambda item: -item[1][0][0] * item[1][0][1]))

    def microseconds(self, models: Sequence[str], rows: int) -> float:
        """Of a layer with an adapter, summed over models."""
        total = 0.0
        for model in models:
            shape, layers = rollout_arms.SHAPES[model], self._of[model]
            inputs = bench_layer.make_inputs(shape, rows, 0, self._device)
            times = self._timer([functools.partial(bench_layer.run_layers, shape, layers, True, inputs)])
            total += statistics.median(times) / len(layers) * 1e6
        return total


def use(key: str, tokens: int, launch: Launch) -> None:
    """Have a plan launch this for an entry of TOKENS."""
    launches = list(plans.PLANS[key].launches)
    launches[TOKENS.index(tokens)] = launch
    plans.PLANS[key] = dataclasses.replace(plans.PLANS[key], launches=tuple(launches))


def candidates(N: int, K: int, tokens: int, present: Launch, tried: int) -> list[Launch]:
    """Launches to compare with the present one, which itself has another way to make X A^T."""
    found = [way for launch in (present, *fusing(N, K, tokens)[:tried]) for way in both_ways(tokens, launch)]
    return [launch for launch in dict.fromkeys(found) if launch != present]


def choose(layers: Layers, tokens: int, tried: int = TRIED) -> Iterator[tuple[str, Launch, float, float]]:
    """For each linear: key of its plan, launch, and microseconds of the layers that have it, before and with it."""
    for key, ((N, K), models) in layers.linears().items():
        present = plans.PLANS[key].launches[TOKENS.index(tokens)]
        others = candidates(N, K, tokens, present, tried)
        w4a16_matmul.prepare((tokens, launch) for launch in others)
        before = least = layers.microseconds(models, tokens if tokens > TOKENS[0] else 1)
        best = present
        for launch in others:
            use(key, tokens, launch)
            time = layers.microseconds(models, tokens if tokens > TOKENS[0] else 1)
            if time < least * (1 - LEAST_GAIN):
                best, least = launch, time
        use(key, tokens, best)
        yield key, best, before, least


def first_table(gpu: str) -> Path:
    """The table to start from: the shipped one of this GPU, else that of an H200, whose other fields then stay."""
    own = plans.shipped_path(gpu)
    return own if own.exists() else plans.shipped_path("NVIDIA H200")


def updated(table: dict[str, Any], launches: dict[str, dict[str, Launch]], gpu: str) -> dict[str, Any]:
    """The table with other launches, by key of a plan and entry of TOKENS."""
    rows = [
        {**row, "launches": row["launches"] | {k: [*v] for k, v in launches.get(f"{row['N']}x{row['K']}", {}).items()}}
        for row in table["rows"]
    ]
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = f"Launches chosen in decode layers with an adapter (tests/bench/tune_layer.py) at {current_commit()}."
    if gpu != table["gpu"]:
        note += f" decode_rows and times are those of {table['gpu']}."
    return {**table, "gpu": gpu, "torch": torch.__version__, "time": when, "note": note, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    parser.add_argument("--models", nargs="+", default=["14B", "7B", "32B"], choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=TOKENS, choices=TOKENS)
    parser.add_argument("--linears", nargs="+", default=LINEARS, choices=LINEARS, help="that get other launches")
    parser.add_argument("--tried", type=int, default=TRIED, help="launches tried, the most promising ones")
    args = parser.parse_args(arguments)
    gpu = torch.cuda.get_device_name()
    table = json.loads(first_table(gpu).read_text())
    timer = functools.partial(bench_dequantize.graph_timer, repetitions=20)
    layers = Layers(args.models, gpu, "cuda", timer, args.linears)
    launches: dict[str, dict[str, Launch]] = {}
    for tokens in args.rows:
        for key, launch, before, after in choose(layers, tokens, args.tried):
            launches.setdefault(key, {})[str(tokens)] = launch
            print(f"{tokens:4} rows  {key:12} {before:8.2f} -> {after:8.2f} us  {tuple(launch)}", flush=True)
        result_file.write(args.out, updated(table, launches, gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
