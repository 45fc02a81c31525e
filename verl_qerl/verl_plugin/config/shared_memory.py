"""Copies of models in the host's memory, which runs with `use_shm` read: verl takes one whose files have the sizes.

An adapter that was trained again, or a model that was quantized again, has the sizes of the one before.
"""

import hashlib
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from verl.utils.fs import verify_copy

_ROOT = Path("/dev/shm/verl-cache")


def check_copies(config: DictConfig) -> None:
    """Refuse with a ValueError a copy of another time than its directory; other nodes' copies are not looked at."""
    for model in ("actor_rollout_ref.model", "critic.model"):
        for name in ("path", "lora_adapter_path") if OmegaConf.select(config, f"{model}.use_shm") else ():
            path = OmegaConf.select(config, f"{model}.{name}")
            if path and Path(path).is_dir():
                _check_copy(f"{model}.{name}", Path(path))


def _check_copy(option: str, path: Path) -> None:
    source = Path(os.path.abspath(path))
    copy = _ROOT / hashlib.md5(str(source).encode()).hexdigest() / source.name  # as verl's copy_to_shm names it
    if not copy.is_dir() or not verify_copy(str(source), str(copy)):
        return  # verl makes one
    files = (file for file in sorted(source.rglob("*")) if file.is_file())
    changed = [file for file in files if file.stat().st_mtime != (copy / file.relative_to(source)).stat().st_mtime]
    if changed:
        raise ValueError(
            f"{option}={path} has changed since it was copied to {copy}, first {changed[0].name}, and with use_shm=True"
            f" verl would read the older copy. One of now is needed. Remove it: rm -r {copy.parent}"
        )
