"""vLLM is found when a distribution of another name ships it."""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

real_version = importlib.metadata.version


def version_without_vllm(name: str) -> str:
    """Hide a distribution named vllm, if there is one."""
    if name == "vllm":
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)


importlib.metadata.version = version_without_vllm
with tempfile.TemporaryDirectory() as folder:
    info = Path(folder, "vllm_other-0.24.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-other\nVersion: 0.24.0\n")
    (info / "top_level.txt").write_text("vllm\n")
    Path(folder, "vllm", "distributed").mkdir(parents=True)
    Path(folder, "vllm", "__init__.py").write_text("LLM = object\n")
    Path(folder, "vllm", "distributed", "__init__.py").write_text("parallel_state = object\n")
    sys.path.insert(0, folder)
    try:
        from verl.third_party.vllm import vllm_version
    except ValueError as error:
        raise AssertionError(f"the package vllm of the distribution vllm-other was not found: {error}") from error
assert vllm_version == "0.24.0", f"verl took {vllm_version} for the version of vLLM"
