"""What the driver can say of a run's adapter and critic before Ray starts; stock verl fails minutes later, in a worker.

Where the base is packed, an adapter on the head or the embeddings is refused: those are no packed linears, FSDP2 cannot
shard them with an adapter on, and the rollout has no place for one. So is a name that the model lacks, as a target or
excluded, of which PEFT says nothing where it finds another, and what leaves no linear to adapt.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_qerl.checkpoints.model_config import read_config, read_object
from verl_qerl.options.rules import MODEL
from verl_qerl.verl_plugin.config.nodes import plain

logger = logging.getLogger(__name__)

# Their names in the models of transformers, as PEFT sees them.
_NO_LAYERS = ("lm_head", "model.embed_tokens")
_UNSET = {"target_modules": "all-linear", "exclude_modules": None}  # verl's defaults


def check_adapter(config: DictConfig) -> None:
    """Refuse an adapter that the run cannot train or sample with; warn of options that its file overrules.

    Args:
        config: The whole configuration. An adapter that is no local directory is checked by the workers alone.

    Raises:
        ValueError: It is on the head or the embeddings of a packed base, or on nothing there, or of a rank above
            `model.lora_rank`.
    """
    model = plain(OmegaConf.select(config, MODEL))
    if not model.get("lora_rank"):
        return
    is_packed = OmegaConf.select(config, "qerl.base.format") is not None
    path = model.get("lora_adapter_path")
    if not path:
        if is_packed:
            _check_targets(model, "model.target_modules", "Leave them out.")
            _check_found(model)
        return
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return
    saved = {"r": 8, **read_object(file, "Save the adapter again.")}  # 8 is PEFT's default
    if is_packed:
        _check_targets(saved, f"in {file}, target_modules", "Train an adapter without them.")
    if saved["r"] > model["lora_rank"]:
        raise ValueError(
            f"model.lora_rank={model['lora_rank']} is below the rank of the adapter in {path}, r={saved['r']}: the"
            f" rollout would have no room for it. {saved['r']} or more is accepted. Set"
            f" actor_rollout_ref.model.lora_rank={saved['r']}."
        )
    _warn_of_overruled(path, saved, model)
    _warn_of_reference(path, config)


def _check_targets(options: Mapping[str, Any], where: str, remedy: str) -> None:
    targets = options.get("target_modules")
    if not targets or targets == "all-linear":  # PEFT leaves the head out of all-linear
        return
    try:
        named = _adapted(_NO_LAYERS, targets, options.get("exclude_modules"))
    except re.error as error:
        raise ValueError(
            f"{where}={targets!r} or its exclude_modules is no regular expression: {error}. Accepted is one, a list of"
            f" names such as [q_proj,v_proj], or all-linear. Correct it."
        ) from error
    if named:
        raise ValueError(
            f"{where}={targets!r} puts an adapter on {' and '.join(named)}, which a run with +rollout=... can neither"
            " train nor sample with. Linears of the layers are accepted, for example [q_proj,v_proj], or all-linear."
            f" {remedy}"
        )


def _check_found(model: Mapping[str, Any]) -> None:
    targets, excluded = model.get("target_modules"), model.get("exclude_modules")
    if targets is None or (targets == "all-linear" and not excluded):  # null: PEFT has its own for each family
        return
    leaves = _leaves(str(model.get("path")))
    linears = [name for name, is_linear in leaves.items() if is_linear and name not in _NO_LAYERS]
    if not linears:
        return
    names = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    accepted = f"a list of {names}, a regular expression of whole names such as '.*_proj'"
    for option, given, known, other in (
        ("target_modules", None if targets == "all-linear" else targets, linears, "all-linear"),
        ("exclude_modules", excluded, list(leaves), "null"),  # of a mixture its router too, which is no linear
    ):
        for each in [given] if isinstance(given, str) else [[one] for one in given or ()]:
            if not _adapted(known, each):
                raise ValueError(
                    f"model.{option}={given!r} has {each!r}, which is no linear of the layers in"
                    f" model.path={model['path']}. Accepted are {accepted}, or {other}. Correct it."
                )
    if not _adapted(linears, linears if targets == "all-linear" else targets, excluded):
        raise ValueError(
            f"model.target_modules={targets!r} and model.exclude_modules={excluded!r} leave no linear to put an adapter"
            f" on. Accepted are targets of which one or more are not excluded: {accepted}, or all-linear. Change one of"
            " the two."
        )


def _adapted(names: Iterable[str], targets: Any, excluded: Any = None) -> list[str]:
    """The modules that PEFT puts an adapter on."""
    from peft import LoraConfig  # seconds to import, which most runs do not need
    from peft.tuners.tuners_utils import check_target_module_exists

    adapter = LoraConfig(target_modules=targets, exclude_modules=excluded)
    return [name for name in names if check_target_module_exists(adapter, name)]


def _leaves(path: str) -> dict[str, bool]:
    """Module without others in it -> whether it is a linear; none of a model that the driver cannot reach or build."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        found = read_config(path)
        found.pop("quantization_config", None)
        if found.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return {}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**found))
    except (ImportError, OSError, TypeError, ValueError):
        return {}  # as in actor/model_check.py; ImportError where config.json names an attention that is not installed
    leaves = ((name, module) for name, module in model.named_modules() if not any(module.children()))
    return {name: isinstance(module, torch.nn.Linear) for name, module in leaves}


def _warn_of_overruled(path: str, saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """The options of the adapter that verl reads, if it reads one: those of the command then have no effect."""
    names = ("lora_alpha", *(name for name, unset in _UNSET.items() if model.get(name) != unset))
    overruled = [name for name in names if _as_set(model.get(name)) != _as_set(saved.get(name))]
    if overruled:
        logger.warning(
            "%s has no effect beside model.lora_adapter_path: the adapter in %s is trained on as its"
            " adapter_config.json says, with r=%s, %s.",
            ", ".join(f"model.{name}={model.get(name)}" for name in overruled),
            path,
            saved["r"],
            ", ".join(f"{name}={saved.get(name)}" for name in overruled),
        )


def _as_set(value: Any) -> Any:
    return frozenset(value) if isinstance(value, list) else value


def _warn_of_reference(path: str, config: DictConfig) -> None:
    switches = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    on = [name for name in switches if OmegaConf.select(config, name)]
    if on:
        logger.warning(
            "the reference of %s is the base without the adapter in %s, as in stock verl: the KL is above 0 from the"
            " first step on, and pulls the policy towards the base. For a KL to the policy you start from, merge the"
            " adapter into the model.",
            " and ".join(f"{name}=True" for name in on),
            path,
        )
