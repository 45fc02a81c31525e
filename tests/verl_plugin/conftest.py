import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def fresh_process() -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python on verl's CPU platform in a process of its own: verl resolves its platform once a process.

    Called with the interpreter's arguments; `fails` tells whether the exit code must differ from 0.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*args: str, fails: bool = False, **env: str) -> subprocess.CompletedProcess:
        result = subprocess.run(
            [sys.executable, *args],
            env=inherited | {"PYTHONPATH": path} | settings | env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (result.returncode != 0) == fails, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
        return result

    return run
