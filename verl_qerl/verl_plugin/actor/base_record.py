"""The record that a checkpoint of the engine carries: its base, by name and digest, and the options of its adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig
from torch.distributed import DeviceMesh

from verl_qerl.algos.trained_norms import NORMS
from verl_qerl.checkpoints.record import BaseRecord
from verl_qerl.modules.placement.shards import sharding_group
from verl_qerl.verl_plugin.config.base_options import BaseOptions

# Written even when they are PEFT's defaults, which may change.
_ALWAYS = ("r", "lora_alpha", "use_rslora", "target_modules")
# Say nothing about what the adapter computes.
_NEVER = ("task_type", "peft_type", "peft_version", "base_model_name_or_path", "inference_mode", "auto_mapping")


def base_record(
    path: str, options: BaseOptions, digests: Mapping[str, str], adapter: PeftConfig, mesh: DeviceMesh
) -> BaseRecord:
    """The record of an engine's model."""
    return BaseRecord(
        recorded_path(path),
        str(options.scale),
        options.ignore,
        digests,
        adapter_options(adapter),
        world_size=mesh.size(),
        trained_norms=NORMS if options.train_norms else (),
        format=options.format,
        sharded_over=sharding_group(mesh).size(),
    )


def recorded_path(path: str) -> str:
    """model.path as records keep it: a directory absolute, since `export` runs anywhere; else a hub id."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def adapter_options(config: PeftConfig) -> dict[str, Any]:
    """What `config` sets, as JSON holds it; see `BaseRecord.adapter`."""
    defaults = LoraConfig().to_dict()
    found = {}
    for name, value in config.to_dict().items():
        # PEFT turns some defaults from None to an empty collection.
        set_here = name not in defaults or (value != defaults[name] and bool(value or defaults[name]))
        if name in _ALWAYS or (name not in _NEVER and set_here):
            found[name] = sorted(value) if isinstance(value, set | frozenset) else value
    return found
