import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def fresh_process(warm_python) -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python on verl's CPU platform in a process of its own: verl resolves its platform once a process.

    Called with the interpreter's arguments; `fails` tells whether the exit code must differ from 0, `ranks` how many
    processes there are.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*args: str, fails: bool = False, ranks: int = 1, **env: str) -> subprocess.CompletedProcess:
        result = warm_python(*args, env=inherited | {"PYTHONPATH": path} | settings | env, ranks=ranks)
        assert (result.returncode != 0) == fails, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
        return result

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Of test_engine*.py: bf16 (Qwen2), tied (Llama, tied), nvfp4, quantized from bf16, and moe, with experts."""
    from verl_qerl.cli.quantize import quantize_checkpoint
    from verl_qerl.testing import random_decoder, random_qwen2, random_qwen3_moe

    folder = tmp_path_factory.mktemp("models")
    random_qwen2().save_pretrained(folder / "bf16")
    random_decoder("llama", tie_word_embeddings=True).save_pretrained(folder / "tied")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cpu")
    random_qwen3_moe().save_pretrained(folder / "moe")
    return folder
