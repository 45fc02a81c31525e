"""Time and peak memory of every phase of a training step, all processes together.

Runs a verl command with its file logger on, samples the memory the driver reports for the GPUs meanwhile, and lays
verl's own timings back from the end of each step: the phases of a step follow one another.

    python tests/bench/bench_train_step.py --out FILE.json --describe "7B, random weights" -- <arguments of main_ppo>

With `--cap-gib 80` this process takes what a GPU has above that, so that the run has 80 GiB; what is reported is
without it. `rollout.gpu_memory_utilization` stays a fraction of the whole GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import result_file

# In the order verl runs them within a step (trainer_base.py: fit, _step_once).
PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "adv",
    "update_actor",
    "save_checkpoint",
    "set_noise",
    "update_weights",
)


def main() -> int:
    args, command = parse()
    ballast = take_ballast(args.cap_gib)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run that is cut keeps what it has
    code = 1
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        watch = Watch(metrics, used_gib() if ballast else 0.0)
        watch.start()
        env = os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics)}
        run = [sys.executable, "-m", "verl.trainer.main_ppo", *command, 'trainer.logger=["console","file"]']
        try:
            code = subprocess.run(run, env=env, check=False).returncode
        finally:
            watch.stop()
            rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            write(args, command, watch, [row for row in rows if "timing_s/step" in row["data"]])
    return code if watch.ends else 1


def write(args: argparse.Namespace, command: list[str], watch: "Watch", steps: list[dict]) -> None:
    """The result file, and the steps on the terminal."""
    result = {
        **result_file.header({}),
        "describe": args.describe,
        "command": command,
        "startup_s": round(watch.ends[0] - watch.began - steps[0]["data"]["timing_s/step"], 1) if watch.ends else None,
        "cap_gib": args.cap_gib,
        "peak_gib": max((gib for _, gib in watch.samples), default=None),
        "peak_gib_by_second": by_second(watch.samples),
        "steps": [lay_out(row, end, watch.samples) for row, end in zip(steps, watch.ends, strict=False)],
    }
    result_file.write(args.out, result)
    print(json.dumps(result["steps"], indent=1))


def visible_gpus(count: int, visible: str | None) -> list[int]:
    """The driver's numbers of the GPUs that the run may use.

    Args:
        visible: CUDA_VISIBLE_DEVICES, numbers with commas between them; None for all.

    Raises:
        ValueError: It names a GPU in another way, or one that the machine lacks.
    """
    if visible is None:
        return list(range(count))
    names = [name.strip() for name in visible.split(",")]
    if any(not name.isdecimal() or int(name) >= count for name in names):
        raise ValueError(
            f"not GPUs of this machine: CUDA_VISIBLE_DEVICES={visible!r}. Accepted are numbers below {count}, as 0,1."
            " Set it to those, or unset it."
        )
    return [int(name) for name in names]


def used_gib() -> float:
    """The driver's reading, of the visible GPU that has the most in use."""
    import pynvml

    pynvml.nvmlInit()
    gpus = visible_gpus(pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in gpus]
    return max(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / 2**30


def take_ballast(cap_gib: float | None) -> list:
    """Tensors that leave `cap_gib` of every GPU to others; they last as long as the list."""
    if cap_gib is None:
        return []
    import torch

    held = []
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the context is part of what is taken
            free, _ = torch.cuda.mem_get_info()
            held.append(torch.empty(max(int(free - cap_gib * 2**30), 0), dtype=torch.uint8, device=device))
    return held


def by_second(samples: list[tuple[float, float]]) -> list[float]:
    """The largest reading of each second since the first."""
    found: dict[int, float] = {}
    for at, gib in samples:
        second = int(at - samples[0][0])
        found[second] = max(gib, found.get(second, 0.0))
    return [found.get(second, 0.0) for second in range(max(found, default=-1) + 1)]


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--describe", default="")
    parser.add_argument("--cap-gib", type=float, help="memory of each GPU that the run may use")
    if "--" not in sys.argv:
        parser.error("arguments of main_ppo follow after --")
    split = sys.argv.index("--")
    return parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]


def lay_out(row: dict, end: float, samples: list[tuple[float, float]]) -> dict:
    """Seconds and peak memory of each phase of the step that was logged at `end`."""
    seconds = {phase: row["data"][key] for phase in PHASES if (key := f"timing_s/{phase}") in row["data"]}
    out: dict = {"step": row["step"], "step_s": row["data"]["timing_s/step"], "phases": {}}
    at = end - sum(seconds.values())
    for phase, duration in seconds.items():
        inside = [gib for t, gib in samples if at <= t <= at + duration]
        out["phases"][phase] = {"seconds": round(duration, 3), "peak_gib": max(inside, default=None)}
        at += duration
    out["response_tokens"] = row["data"].get("response_length/mean")
    out["tokens_per_s"] = row["data"].get("perf/throughput")
    return out


class Watch(threading.Thread):
    """Samples GPU memory ten times a second and notes when the metrics file grows."""

    def __init__(self, metrics: Path, ballast_gib: float) -> None:
        super().__init__(daemon=True)
        self._metrics = metrics
        self._ballast_gib = ballast_gib
        self._running = True
        self.began = time.time()
        self.samples: list[tuple[float, float]] = []
        self.ends: list[float] = []

    def run(self) -> None:
        seen = 0
        while self._running:
            self.samples.append((time.time(), round(used_gib() - self._ballast_gib, 2)))
            lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
            steps = sum("timing_s/step" in line for line in lines)
            self.ends += [time.time()] * (steps - seen)
            seen = steps
            time.sleep(0.1)

    def stop(self) -> None:
        self._running = False
        self.join()


if __name__ == "__main__":
    sys.exit(main())
