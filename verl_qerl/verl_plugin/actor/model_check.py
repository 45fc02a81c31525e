"""What the driver can say of a run's models before Ray starts, from their config.json."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_qerl.algos.noise_places import FAMILIES, check_places
from verl_qerl.checkpoints.model_config import is_hub_id, read_config, senses
from verl_qerl.checkpoints.quantization_config import described
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import check_held, packed_names
from verl_qerl.formats import get_format
from verl_qerl.options.rules import LORA_RANK, MODEL, ROLLOUT
from verl_qerl.verl_plugin.actor.liger import check_liger
from verl_qerl.verl_plugin.config.apply import aqn_options
from verl_qerl.verl_plugin.config.nodes import paths_are_here, plain
from verl_qerl.verl_plugin.config.values import default_of

_SHARED = f"{ROLLOUT}.tensor_model_parallel_size"
# How a model that is not quantized is to be.
_CHOICES = ("qerl.base.scale", "qerl.base.ignore")
# What a file of the user's has a name in.
_OF_FILES = {"reward.custom_reward_function": "function", "data.custom_cls": "class"}
# By which a Python file has names that it does not spell.
_UNSPELLED = r"import[\s\\]*\*|\b(globals|setattr|exec|__getattr__)\b"


def check_models(config: DictConfig, use_critic: bool) -> None:
    """Refuse models that a run cannot train or sample with.

    Args:
        config: The whole configuration. Models that the driver cannot reach are checked by the workers alone.

    Raises:
        ValueError: With `+rollout=...`, model.path is no text model or quantized beside choices of how to quantize it,
            override_config has options of its position embedding, or `check_liger` refuses; with noise, `check_places`
            refuses, or its weights lack a norm that gets it; or vLLM cannot share its attention heads alike; or the
            critic's path is quantized; or a path of a run on this machine does not exist, ends in a slash, is of a
            model without config.json, or of a file without the function of the reward or the class of the data set.
    """
    if paths_are_here(config):
        for model in (MODEL, "critic.model") if use_critic else (MODEL,):
            path = _existing(config, f"{model}.path", "model", "A directory in Hugging Face layout or a hub id")
            if Path(path).is_dir():
                read_config(path)
        _existing(config, f"{MODEL}.lora_adapter_path", "adapter", "A PEFT directory or a hub id")
        for node, what in _OF_FILES.items():
            _check_file(config, node, what, Path(_existing(config, f"{node}.path", "file", "A Python file")))
    path, aqn = str(OmegaConf.select(config, f"{MODEL}.path")), aqn_options(config)
    quantized = OmegaConf.select(config, "qerl.base.format") is not None
    found = _config_of(path) if quantized or aqn.enabled else {}
    _check_heads(path, found.get("num_attention_heads"), OmegaConf.select(config, _SHARED))
    if quantized:
        _check_text(path, found)
        _check_choices(config, path, found)
        if _has_weights(config, Path(path)):
            _check_linears(config, Path(path))
        if OmegaConf.select(config, LORA_RANK) or OmegaConf.select(config, f"{MODEL}.lora.rank"):
            check_liger(config, found.get("model_type"))
        _check_override(plain(OmegaConf.select(config, f"{MODEL}.override_config")) or {})
    if aqn.enabled and found.get("model_type") and "text_config" not in found and not senses(found):
        check_places(found["model_type"], aqn.targets)  # of a model in parts the engine says it
        if found["model_type"] in FAMILIES and _has_weights(config, Path(path)):
            _check_norms(Path(path), aqn.norms)
    path = str(OmegaConf.select(config, "critic.model.path"))
    if use_critic and _config_of(path).get("quantization_config"):
        raise ValueError(
            f"critic.model.path={path} is quantized: verl trains all weights of a critic, and cannot train packed ones."
            " A bf16 model is accepted. Set critic.model.path to the one that this was made of."
        )


def _existing(config: DictConfig, name: str, what: str, accepted: str) -> str:
    given, default = OmegaConf.select(config, name), default_of(name)
    if given is None and default is not None:
        raise ValueError(f"{name}=null names no {what}. {accepted} is accepted. Set it.")
    path = str(given)
    if "/" in path and "://" not in path and not is_hub_id(path) and not Path(path).exists():
        note, remedy = " verl does not expand `~`: $HOME does." if path.startswith("~") else "", "Check the path."
        if path == default:
            note, remedy = " This is verl's default.", "Set it."
        raise ValueError(f"no such {what}: {name}={path}.{note} {accepted} is accepted. {remedy}")
    if path.endswith("/"):
        raise ValueError(
            f"verl takes no path with a slash at its end: {name}={path}. {path.rstrip('/')} is accepted. Set it."
        )
    return path


def _check_file(config: DictConfig, node: str, what: str, path: Path) -> None:
    """Refuse a name that the user's file has nowhere; the file is not run, which may need what workers alone have."""
    if not path.is_file() or path.suffix != ".py":  # verl takes byte code too
        return
    name = str(OmegaConf.select(config, f"{node}.name"))
    text = path.read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{re.escape(name)}\b|{_UNSPELLED}", text):
        raise ValueError(
            f"no such {what}: {node}.name={name} is nowhere in {path}. The name of one that this file has is"
            " accepted. Correct it."
        )


def _config_of(path: str) -> dict[str, Any]:
    try:
        return read_config(path)
    except (ValueError, OSError):
        return {}  # the workers may reach it, and say what is wrong with it if they cannot


def _check_text(path: str, found: dict[str, Any]) -> None:
    parts = senses(found)
    if parts:
        raise ValueError(
            f"model.path={path} is a {(found.get('architectures') or ['model'])[0]} with {parts[0]}, which +rollout=..."
            " does not quantize. Models of text alone are accepted. Choose one, or leave out +rollout=..."
        )


def _check_heads(path: str, heads: Any, shared: Any) -> None:
    if type(heads) is int and shared and heads % shared:  # vLLM's own rule
        raise ValueError(
            f"{_SHARED}={shared} does not divide the {heads} attention heads of model.path={path}. Accepted are"
            " divisors of both them and the GPUs. Lower it."
        )


def _check_choices(config: DictConfig, path: str, found: dict[str, Any]) -> None:
    named = [name for name in _CHOICES if OmegaConf.select(config, name) is not None]
    if named and described(found):
        value = plain(OmegaConf.select(config, named[0]))
        raise ValueError(
            f"{named[0]}={value} has no effect on model.path={path}, which is quantized already and keeps its own."
            " Accepted is null, or a bf16 model. Leave it out, or name the model that this was made of."
        )


def _has_weights(config: DictConfig, path: Path) -> bool:
    return paths_are_here(config) and any(path.glob("*.safetensors"))


def _check_linears(config: DictConfig, path: Path) -> None:
    """Refuse weights that the format cannot hold, and an `ignore` that does not fit them."""
    source, form = open_source(path), get_format(OmegaConf.select(config, "qerl.base.format"))
    check_held(source, form)
    packed_names(source, form, plain(OmegaConf.select(config, "qerl.base.ignore")))


def _check_norms(path: Path, norms: tuple[str, ...]) -> None:
    """Refuse names of norms that no vector of the weights has; in FAMILIES the rollout's norms have the same names."""
    try:
        specs = open_source(path).specs
    except (ValueError, OSError):
        return  # in a run without `+rollout=...` others read them, who may be able to
    vectors = (name.split(".")[-2:] for name, spec in specs.items() if len(spec.shape) == 1)
    present = {parts[0] for parts in vectors if "norm" in parts[0] and parts[1:] == ["weight"]}
    lost = sorted(set(norms) - present)
    if present and lost:
        raise ValueError(
            f"aqn.targets has [{','.join(lost)}], which no norm of model.path={path} is called. Accepted are"
            f" {', '.join(sorted(present))}. Correct `+aqn.targets=[...]`."
        )


def _check_override(override: dict[str, Any]) -> None:
    options = override.get("model_config") or override  # as verl reads it
    rope = [name for name in options if name.startswith("rope_")]
    if rope:
        raise ValueError(
            f"model.override_config.{rope[0]}={options[rope[0]]} does not go together with +rollout=...: it would reach"
            " the actor alone, and verl 0.9.1 cannot set an option that is a mapping. A model whose config.json says so"
            " is accepted, which both sides read. Write it there and leave the option out."
        )
