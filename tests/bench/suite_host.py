"""What the host of a suite was doing, since times that are measured beside other work mean little without it."""

import collections
import os
import time
from typing import Any

import psutil
import result_file

_BUSIEST = 8


class Host:
    """Takes samples; CPU seconds are those since the sample before."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before: dict[int, float] = {}

    def sample(self) -> dict[str, Any]:
        """One line of host.jsonl; `busiest` has CPU seconds by command."""
        seconds, threads, now = collections.defaultdict[str, float](float), 0, dict[int, float]()
        for process in psutil.process_iter(["pid", "name", "cmdline", "cpu_times", "num_threads"]):
            found = process.info
            times = found["cpu_times"]
            if times is None:  # it has just ended
                continue
            threads += found["num_threads"] or 0
            now[found["pid"]] = times.user + times.system
            name = " ".join(found["cmdline"] or [found["name"]])[:40].strip()
            seconds[name] += now[found["pid"]] - self._before.get(found["pid"], 0.0)
        self._before = now
        memory = psutil.virtual_memory()
        return {
            "seconds": round(time.monotonic() - self._start, 1),
            "load": round(os.getloadavg()[0], 1),
            "used_gib": round((memory.total - memory.available) / 2**30, 1),
            "total_gib": round(memory.total / 2**30, 1),
            "processes": len(now),
            "threads": threads,
            "busiest": {
                name: round(seconds[name], 1) for name in sorted(seconds, key=lambda name: -seconds[name])[:_BUSIEST]
            },
            "gpus": gpus(),
        }


def gpus() -> list[list[int]]:
    """[MiB in use, percent of the time busy] of each GPU; none without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    lines = result_file.output_of(command, seconds=10).splitlines()
    return [[int(part) for part in line.split(",") if part.strip().isdigit()] for line in lines]
