"""The load formats `verl_qerl_<format>`: a bf16 model is quantized while it is read, a packed one is read as it is.

Both go through `checkpoints.stream`, the reader of the actor's packed base, so that the bits are the same by
construction; the digests kept here are what the actor's are compared with.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import Source, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import PackedWeight, get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.vllm_plugin import NAMES
from verl_qerl.vllm_plugin.weights.borrowed import OPTION, attach, digests_of
from verl_qerl.vllm_plugin.weights.experts import expert_members

_OPTIONS = {"scale", "ignore", OPTION}
_DIGESTS = "verl_qerl_digests"


class QuantizingModelLoader(BaseModelLoader):
    """Loads with `--load-format verl_qerl_<format> --quantization verl_qerl_<format>`.

    `--model-loader-extra-config '{"scale": "mse", "ignore": ["lm_head"]}'` are the options of a bf16 source; only
    NVFP4 has a choice of `scale`. `share_base` takes the packed linears from the actor's process, and what is left from
    the files. A model that speculates is loaded as vLLM does.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise ValueError(
                f"unknown model_loader_extra_config {unknown}. Accepted are {sorted(_OPTIONS)}. Check the spelling."
            )
        self._form = get_format(NAMES[str(load_config.load_format)], options.get("scale"))
        self._ignore = options.get("ignore")
        self._borrows = options.get(OPTION, False)
        if not isinstance(self._borrows, bool):
            raise ValueError(
                f"no switch: model_loader_extra_config.{OPTION}={self._borrows!r}. Accepted are true and false. Choose"
                " one of them."
            )

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files, if the model is a hub id."""
        if _is_draft(model_config):
            self._stock().download_model(model_config)
            return
        self._source(model_config)

    def load_model(self, vllm_config: Any, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        """Load the model; without a quantization_config, the linears that `ignore` names stay in bf16."""
        config = vllm_config.quant_config
        if self._ignore is not None and getattr(config, "follows_loader", False):
            config.leave_dense(self._ignore)
        return super().load_model(vllm_config, model_config, prefix)

    def _stock(self) -> DefaultModelLoader:
        return DefaultModelLoader(replace(self.load_config, load_format="auto", model_loader_extra_config={}))

    def _source(self, model_config: ModelConfig) -> Source:
        # As vLLM itself finds config.json and tokenizer.
        return open_source(model_config.model, model_config.revision, self.load_config.download_dir)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill every parameter of `model`; a ValueError if one is in no file."""
        if _is_draft(model_config):
            self._stock().load_weights(model, model_config)
            return
        digests: dict[str, str] = {}
        given: set[str] = set()
        device = next(model.parameters()).device
        experts = expert_members(model)
        members = checkpoint_members(model) | experts
        if self._borrows:
            digests |= self._attach(model, members, device)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._quantized(model_config, device, digests):
                given.add(name)
                yield name, tensor

        loaded = set(model.load_weights(tensors()))
        missing = sorted((set().union(*members.values()) - given) | (set(members) - set(experts) - loaded))
        if missing:
            raise ValueError(
                f"{model_config.model} lacks {len(missing)} parameters of {type(model).__name__}, first {missing[0]!r}."
                " Every parameter must be in the checkpoint. Check that config.json belongs to these weights."
            )
        setattr(model, _DIGESTS, digests)

    def _attach(self, model: Any, members: dict[str, set[str]], device: torch.device) -> dict[str, str]:
        """Map the actor's base into the linears; their parameters are removed from `members`."""
        empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        for name in empty:
            del members[name]
        linears = {name.rpartition(".")[0] for name in empty}
        return digests_of(attach(model, {name: fused_members(model, name) for name in linears}, device))

    def _quantized(
        self, model_config: ModelConfig, device: torch.device, digests: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        source = self._source(model_config)
        if self._borrows:
            for name, tensor in source.tensors(device):
                module, _, kind = name.rpartition(".")
                if module not in digests or kind == "bias":
                    yield name, tensor
            return
        for name, item in packed_stream(source, self._form, self._ignore, device):
            if isinstance(item, PackedWeight):
                digests[name] = weight_digest(item)
                yield from named_tensors(name, item).items()
            else:
                yield name, item


def _is_draft(model_config: ModelConfig) -> bool:
    """Whether this is the model that speculates, which vLLM loads with our load format and quantizes as it is told."""
    return model_config.runner_type == "draft" and model_config.quantization not in NAMES


def checkpoint_members(model: torch.nn.Module) -> dict[str, set[str]]:
    """Parameter of `model` -> the names under which a checkpoint holds it: several where vLLM fuses linears.

    vLLM itself calls a fused parameter loaded once one member of it has come.
    """
    # Attention holds the scales of a quantized KV cache, which have defaults of their own.
    attention = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AttentionLayerBase))
    members: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        if not name.startswith(attention):
            module, _, kind = name.rpartition(".")
            members[name] = {f"{member}.{kind}" for member in fused_members(model, module)}
    return members


def fused_members(model: torch.nn.Module, module: str) -> list[str]:
    """The linears of a checkpoint that vLLM's `module` consists of, in order; itself for most."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parent, _, leaf = module.rpartition(".")
    return [f"{parent}.{member}" for member in fused.get(leaf, ())] or [module]


def base_digests(model: torch.nn.Module) -> dict[str, str]:
    """Module -> digest of the packed weights that `model` was loaded from; a ValueError if there are none."""
    digests = getattr(model, _DIGESTS, None)
    if not digests:
        raise ValueError(
            f"{type(model).__name__} holds no packed weights of ours. `+rollout=<format>` loads them with load_format "
            "verl_qerl_<format>. Remove your own engine_kwargs.vllm.load_format."
        )
    return digests
