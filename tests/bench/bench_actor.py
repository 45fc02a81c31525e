"""Forward, backward and log-prob pass of the LoRA actor: ours beside a bf16 base and bitsandbytes' NF4, in one run.

    python tests/bench/bench_actor.py --out tests/bench/results/<gpu>/actor.json [--profile DIR]
    python tests/bench/bench_actor.py --table tests/bench/results/<gpu>/actor.json

Decoder layers of real shapes with random weights, a few of each model: `*_ms` is the time of one layer, from the time
of all measured layers together. Embedding, head and log-probs are the same in every arm and are measured once per model
(`heads`). Passes run under autocast as in verl, without FSDP. Nothing is timed unless outputs and gradients of every
arm on the shared weights are as near to float32 as those of the bf16 base.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import actor_models as models
import result_file
import torch
import torch.nn as nn
from qerl_testing import rms_error_ratio
from torch.utils.checkpoint import checkpoint  # noqa: F401  (its first import is slow)

from verl_qerl.kernels.actor.log_probs import log_probs_of_labels

SEQUENCE = 1024
GATE_TOKENS = 256
GATE_FACTOR = 1.25  # of the bf16 base's error, in output and in the mean over all gradients
PHASES = ("log_prob_ms", "forward_ms", "backward_ms")


class Clock:
    """Times of passes on one device: CUDA events, or the wall clock of a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        if not self.on_gpu:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


def embeddings(shape: str, tokens: int, device: str) -> torch.Tensor:
    """[sequences, length, hidden] bf16."""
    length = min(SEQUENCE, tokens)
    generator = torch.Generator(device).manual_seed(3)
    sizes = (tokens // length, length, models.SHAPES[shape].hidden)
    return torch.randn(sizes, generator=generator, device=device).bfloat16()


def forward(model: nn.Module, x: torch.Tensor, autocast: bool = True) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        return models.stack_of(model)(inputs_embeds=x, use_cache=False).last_hidden_state


def results_of(model: nn.Module, x: torch.Tensor, autocast: bool = True) -> dict[str, torch.Tensor]:
    """Hidden states and gradients of the adapters, of a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    out = forward(model, x, autocast)
    grad = torch.randn(out.shape, generator=torch.Generator(x.device).manual_seed(4), device=x.device)
    out.backward(grad.to(out.dtype))
    found = {"out": out.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gate(base: Any, arms: dict[str, Any], device: str) -> dict[str, dict[str, float]]:
    """Errors of every arm against float32, relative to what they are errors of.

    Raises:
        RuntimeError: An arm computes something else.
    """
    x = embeddings(base.shape, GATE_TOKENS, device)
    exact = results_of(models.build(base, models.ARMS["bf16_peft"], device).float(), x.float(), autocast=False)
    errors = {}
    for name, arm in arms.items():
        found = results_of(models.build(base, arm, device), x)
        if found.keys() != exact.keys():
            raise RuntimeError(f"{name} has gradients of other tensors than the reference.")
        ratios = {key: rms_error_ratio(found[key], exact[key]) for key in exact}
        mean = statistics.mean(value for key, value in ratios.items() if key != "out")
        errors[name] = {"output": float(f"{ratios['out']:.3g}"), "gradients": float(f"{mean:.3g}")}
    for name, found in errors.items():
        if arms[name].base == "nf4":  # of other weights
            continue
        for what, value in found.items():
            if not value <= GATE_FACTOR * errors["bf16_peft"][what]:
                raise RuntimeError(f"{base.shape} {name} did not pass the gate: {errors}. Nothing is timed.")
    return errors


def measure(
    arms: dict[str, nn.Module], x: torch.Tensor, layers: int, repetitions: int
) -> dict[str, dict[str, float | None]]:
    """Milliseconds of one layer's passes, medians, and the peak of memory in a training pass with one arm alone.

    Arms take turns, so that they see the same host. `host_ms` is what it takes to launch forward and backward: about as
    long as both, and they waited for it.
    """
    clock = Clock(x.device.type)
    grad = torch.randn_like(x)
    times: dict[str, dict[str, list[float]]] = {arm: {phase: [] for phase in (*PHASES, "host_ms")} for arm in arms}
    peaks: dict[str, float] = {}
    x.requires_grad_()
    for turn in range(repetitions + 2):
        for arm, model in arms.items():
            before = start_of_peak(clock)
            training_pass(model, x, grad, clock, times[arm])
            if turn == 1 and clock.on_gpu:  # the first one takes memory for gradients
                peaks[arm] = round(torch.cuda.max_memory_allocated() / 2**30 - before + weight_gib(model), 2)
    with torch.no_grad():
        for model, found in [(arms[arm], times[arm]) for arm in arms] * (repetitions + 2):
            start = clock.mark()
            forward(model, x)
            found["log_prob_ms"].append(clock.milliseconds(start, clock.mark()))
    return {
        arm: {phase: float(f"{statistics.median(every[2:]) / layers:.4g}") for phase, every in found.items()}
        | {"peak_gib": peaks.get(arm)}
        for arm, found in times.items()
    }


def training_pass(
    model: nn.Module, x: torch.Tensor, grad: torch.Tensor, clock: Clock, times: dict[str, list[float]]
) -> None:
    began = time.perf_counter()
    start = clock.mark()
    out = forward(model, x)
    middle = clock.mark()
    out.backward(grad)
    end = clock.mark()
    times["host_ms"].append((time.perf_counter() - began) * 1e3)
    times["forward_ms"].append(clock.milliseconds(start, middle))
    times["backward_ms"].append(clock.milliseconds(middle, end))
    model.zero_grad(set_to_none=False)  # their memory is taken once
    x.grad = None


def start_of_peak(clock: Clock) -> float:
    """Forget the peak of GPU memory so far; GiB that are in use now."""
    if not clock.on_gpu:
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def measure_head(shape: str, tokens: int, device: str, repetitions: int, vocabulary: int) -> dict[str, Any]:
    """Logits and log-probs of all tokens of a micro-batch, and the way back to the hidden states."""
    clock, hidden = Clock(device), models.SHAPES[shape].hidden
    weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    x = embeddings(shape, tokens, device).view(tokens, hidden).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    forwards, backwards = [], []
    start_of_peak(clock)
    for _ in range(repetitions + 2):
        start = clock.mark()
        found = log_probs_of_labels(nn.functional.linear(x, weight), labels)
        middle = clock.mark()
        found.sum().backward()
        end = clock.mark()
        forwards.append(clock.milliseconds(start, middle))
        backwards.append(clock.milliseconds(middle, end))
    row = {"model": shape, "tokens": tokens, "forward_ms": statistics.median(forwards[2:])}
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if clock.on_gpu else None
    return row | {"backward_ms": statistics.median(backwards[2:]), "peak_gib": peak}


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weight_gib(model: nn.Module) -> float:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**30


def run_shape(shape: str, args: argparse.Namespace, device: str, arms: dict[str, Any], report: dict[str, Any]) -> None:
    layers = min(args.layers, models.SHAPES[shape].layers)
    base = models.draw_base(shape, layers, device)
    report["gate"][shape] = gate(base, arms, device)
    built = {name: models.build(base, arm, device) for name, arm in arms.items()}
    for checkpointing in (False, True):
        for model in built.values() if checkpointing else ():
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        for tokens in args.tokens:
            free()
            found = measure(built, embeddings(shape, tokens, device), layers, args.repetitions)
            for name, row in found.items():
                key = {"arm": name, "model": shape, "tokens": tokens, "checkpointing": checkpointing, "layers": layers}
                report["rows"].append(key | row | {"layer_gib": round(weight_gib(built[name]) / layers, 3)})
                if args.profile and shape == args.shapes[0] and not checkpointing:
                    path = args.profile / f"{shape}_{name}_{tokens}.txt"
                    profile(built[name], embeddings(shape, tokens, device), path)
    del built
    free()
    for tokens in args.tokens:
        report["heads"].append(measure_head(shape, tokens, device, args.repetitions, args.vocabulary))
    free()


def profile(model: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Where a training pass of the measured layers spends its time, kernel by kernel."""
    x.requires_grad_()
    with torch.profiler.profile() as found:
        forward(model, x).sum().backward()
    path.parent.mkdir(parents=True, exist_ok=True)
    sort = "self_cuda_time_total" if x.is_cuda else "self_cpu_time_total"
    path.write_text(found.key_averages().table(sort_by=sort, row_limit=40, max_name_column_width=90))
    model.zero_grad()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and measure nothing")
    parser.add_argument("--shapes", nargs="+", default=["7b", "14b", "32b"], choices=list(models.SHAPES))
    parser.add_argument("--arms", nargs="+", default=list(models.ARMS), choices=list(models.ARMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048], help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=3, help="how many of a model's layers are measured")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=models.VOCABULARY)
    parser.add_argument("--profile", type=Path, help="directory for a list of kernels of each arm, of the first shape")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.table is None):
        parser.error("give --out FILE to measure, or --table FILE")
    return args


def table(report: dict[str, Any]) -> str:
    """Markdown: one layer's step (forward and backward) of each arm, and as a multiple of the bf16 base with PEFT."""
    arms = list(dict.fromkeys(row["arm"] for row in report["rows"]))
    torch = report["versions"].get("torch") or report["torch"]  # where older files have it
    lines = [
        f"{report['gpu']}, torch {torch}, {report['commit']}; ms a layer; in brackets, times {arms[0]};"
        " * the host could not launch faster",
        "",
        "| model | tokens | checkpoints | pass | " + " | ".join(arms) + " |",
        "|" + "---|" * (4 + len(arms)),
    ]
    cases = list(dict.fromkeys((row["model"], row["tokens"], row["checkpointing"]) for row in report["rows"]))
    for model, tokens, checkpointing in cases:
        rows = {
            row["arm"]: row
            for row in report["rows"]
            if (row["model"], row["tokens"], row["checkpointing"]) == (model, tokens, checkpointing)
        }
        passes: dict[str, Callable[[dict[str, float]], float]] = {
            "step": lambda row: row["forward_ms"] + row["backward_ms"]
        }
        if not checkpointing:
            passes["log-prob"] = lambda row: row["log_prob_ms"]
        for what, value in passes.items():
            first = value(rows[arms[0]])
            cells = [
                f"{value(rows[arm]):.2f}{waits(rows[arm])} ({value(rows[arm]) / first:.2f})" if arm in rows else "-"
                for arm in arms
            ]
            lines.append(
                f"| {model} | {tokens} | {'yes' if checkpointing else 'no'} | {what} | " + " | ".join(cells) + " |"
            )
    return "\n".join([*lines, "", *(f"{arm}: not run, {why}" for arm, why in report["skipped"].items())])


def waits(row: dict[str, float]) -> str:
    """A mark where the GPU waited for the host in a training pass; files from before `host_ms` have none."""
    return "*" if row.get("host_ms", 0.0) > 0.9 * (row["forward_ms"] + row["backward_ms"]) else ""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(dict.fromkeys(["bf16_peft", *args.arms]))
    skipped = {name: why for name in names if (why := models.missing(models.ARMS[name]))}
    arms = {name: models.ARMS[name] for name in names if name not in skipped}
    report: dict[str, Any] = result_file.header({"rank": models.RANK, "sequence": SEQUENCE})
    report |= {"skipped": skipped, "gate": {}, "rows": [], "heads": []}
    for shape in args.shapes:
        run_shape(shape, args, device, arms, report)
        result_file.write(args.out, report)  # a cut run keeps what it has
        print(f"{shape} done", flush=True)
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
