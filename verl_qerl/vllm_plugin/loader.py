"""The load format `verl_qerl_nvfp4`: a bf16 model is quantized while it is read, an NVFP4 one is read as it is.

Both go through `nvfp4.stream`, the reader of the actor, so that the bits are the same by construction; the digests kept
here are what the actor's are compared with.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from verl_qerl.nvfp4.checkpoint import to_tensors
from verl_qerl.nvfp4.digest import weight_digest
from verl_qerl.nvfp4.format import PackedWeight
from verl_qerl.nvfp4.stream import open_source, stream

_OPTIONS = {"scale", "ignore"}
_DIGESTS = "verl_qerl_digests"


class NVFP4ModelLoader(BaseModelLoader):
    """Loads with `--load-format verl_qerl_nvfp4 --quantization verl_qerl_nvfp4`.

    `--model-loader-extra-config '{"scale": "minmax", "ignore": ["lm_head"]}'` are the options of a bf16 source.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise ValueError(
                f"unknown model_loader_extra_config {unknown}. Accepted are {sorted(_OPTIONS)}. Check the spelling."
            )
        self._options = options

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files, if the model is a hub id."""
        open_source(model_config.model)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill every parameter of `model`.

        Raises:
            ValueError: A parameter is in no file.
        """
        digests: dict[str, str] = {}
        given: set[str] = set()
        device = next(model.parameters()).device
        loaded = model.load_weights(self._tensors(model_config.model, device, digests, given))
        missing = sorted((_required(model) - set(loaded)) | _lost_members(model, given))
        if missing:
            raise ValueError(
                f"{model_config.model} lacks {len(missing)} parameters of {type(model).__name__}, first {missing[0]!r}."
                " Every parameter must be in the checkpoint. Check that config.json belongs to these weights."
            )
        setattr(model, _DIGESTS, digests)

    def _tensors(
        self, path: str, device: torch.device, digests: dict[str, str], given: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, item in stream(open_source(path), device=device, **self._options):
            if isinstance(item, PackedWeight):
                digests[name] = weight_digest(item)
                tensors = to_tensors(name, item)
            else:
                tensors = {name: item}
            given.update(tensors)
            yield from tensors.items()


def _required(model: Any) -> set[str]:
    # Attention holds the scales of a quantized KV cache, which have defaults of their own.
    attention = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AttentionLayerBase))
    return {name for name, _ in model.named_parameters() if not name.startswith(attention)}


def _lost_members(model: torch.nn.Module, given: set[str]) -> set[str]:
    # vLLM calls a fused parameter loaded once one member of it has come; the rest would be uninitialized memory.
    lost: set[str] = set()
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        members = {f"{parent}.{member}.{kind}" for member in fused.get(leaf, ())}
        if members & given:
            lost |= members - given
    return lost


def base_digests(model: torch.nn.Module) -> dict[str, str]:
    """Module -> digest of the packed weights that `model` was loaded from.

    Raises:
        ValueError: The model was not loaded by NVFP4ModelLoader.
    """
    digests = getattr(model, _DIGESTS, None)
    if not digests:
        raise ValueError(
            f"{type(model).__name__} holds no packed weights of ours. `+rollout=nvfp4` loads them with load_format "
            "verl_qerl_nvfp4. Remove your own engine_kwargs.vllm.load_format."
        )
    return digests
