"""`quantize --method gptq`: the texts to calibrate on, what is refused, and the weights calibrated layer by layer.

Each layer gets what the quantized layers before it put out. Memory: the hidden states of the texts (2 bytes times their
tokens times the hidden size), one layer, its inputs for a batch, and 20 bytes times the square of its widest linear's
inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_qerl.checkpoints.experts import is_expert
from verl_qerl.checkpoints.groups import groups_of_linears
from verl_qerl.checkpoints.source import Source, read_tensors
from verl_qerl.checkpoints.stream import packed_names
from verl_qerl.cli.dense_model import empty_model
from verl_qerl.cli.prompts import EMBEDDING, read_prompts, tokens_of
from verl_qerl.cli.quantize.arguments import SAMPLES, TOKENS
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, PackedWeight, WeightFormat, gptq
from verl_qerl.formats.reference import dequantize

# Whose layers transformers runs on embeddings as they are, by names that checkpoints have too.
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_TOKENS = 8192  # of a batch, padding included: enough that a GPU does not wait for launches

Observe = Callable[..., None]


@dataclass(frozen=True)
class Calibration:
    """Texts to calibrate on.

    Attributes:
        file: Parquet or JSON lines with `text`, or with `prompt`: text or chat messages.
        tokens: Tokens that are read of a row, from its start, at most; never more than the model has positions.
    """

    file: Path
    samples: int = SAMPLES
    tokens: int = TOKENS

    def read(self, source: Source, ignore: tuple[str, ...]) -> list[list[int]]:
        """Token ids of each text.

        Raises:
            FileNotFoundError: No such file.
            ValueError: It cannot be used, or has fewer tokens than a linear has inputs.
        """
        prompts = read_prompts(self.file, self.samples)
        found = tokens_of(source, prompts, self.tokens)
        count = sum(map(len, found))
        widest = max(source.specs[f"{name}.weight"].shape[1] for name in packed_names(source, ignore=ignore))
        if count < widest:
            raise ValueError(
                f"too few tokens to calibrate on: {count} of {len(found)} rows in {self.file}. At least"
                f" {widest} are needed, as many as the widest linear of {source.path} has inputs. Add rows, or raise"
                " --calibration-samples or --calibration-tokens."
            )
        return found


def check_calibrated(source: Source, form: WeightFormat) -> None:
    """Require a format and a model that are calibrated here.

    Raises:
        CheckpointFormatError: The model is quantized, has experts, or is of a family that is not known.
        ValueError: Another format.
    """
    if not isinstance(form, NVFP4):  # whose codes `formats.gptq` chooses
        raise ValueError(f"{form.name} is not calibrated: --method gptq. nvfp4 is accepted. Use --method rtn.")
    if source.format is not None:
        raise CheckpointFormatError(
            f"{source.path} is quantized ({source.format}), and --method gptq calibrates on the answers of the original"
            " model. An unquantized checkpoint is accepted. Name the original model, or use --method rtn."
        )
    expert = next((name for name in source.files if is_expert(name.rpartition(".")[0])), None)
    if expert:
        raise CheckpointFormatError(
            f"a mixture of experts is not calibrated: {expert!r} of {source.path}. Models without experts are accepted,"
            " since an expert sees only some of the tokens. Use --method rtn."
        )
    family = source.config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointFormatError(
            f"models of this family are not calibrated: model_type={family} of {source.path}. Accepted are"
            f" {', '.join(FAMILIES)}. Use --method rtn."
        )


def calibrated_stream(
    source: Source,
    form: WeightFormat,
    ignore: Sequence[str],
    device: str,
    observe: Observe,
    texts: Sequence[Sequence[int]],
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """Every tensor of an unquantized checkpoint, linears packed by GPTQ.

    Args:
        source: An unquantized checkpoint that `check_calibrated` has accepted.
        observe: Called for each linear with module, original and packed weight, and by name the `gptq.output_errors` of
            its codes and of the nearest ones.

    Yields:
        See `checkpoints.stream.packed_stream`.

    Raises:
        CheckpointFormatError: The tensors are not those of the layers that config.json describes.
        ValueError: A weight or the inputs of a linear cannot be used.
    """
    walk = _Walk(source, device)
    groups = _in_layers(walk, packed_names(source, form, ignore), form)
    inside = {name for names in walk.names for name in names}
    for name in source.files:
        if name not in inside:
            yield from read_tensors(source, [name]).items()
    batches = walk.embed(texts)
    for i in range(len(walk.names)):
        yield from _layer(walk, i, groups[i], batches, form, observe)


class _Batch(NamedTuple):
    """Texts of about the same length, padded behind their ends, which causal attention does not see.

    Attributes:
        hidden: [texts, tokens, hidden size] bf16, the inputs of a layer.
        kept: [texts, tokens] bool, False for padding.
    """

    hidden: torch.Tensor
    kept: torch.Tensor


class _Walk:
    """The layers of a model without their weights, one of which runs at a time.

    The model's own forward pass runs it, which knows masks and positions: others pass on what they get.
    """

    def __init__(self, source: Source, device: str) -> None:
        self.source, self.device = source, device
        self._decoder = empty_model(source.path).model
        self._decoder.register_module("norm", torch.nn.Identity())
        self._decoder.rotary_emb.to(device)
        self._layers = list(self._decoder.layers)
        of_layer: dict[str, list[str]] = {f"model.layers.{i}": [] for i in range(len(self._layers))}
        for name in source.files:
            of_layer.get(".".join(name.split(".")[:3]), []).append(name)
        self.names = list(of_layer.values())
        for layer, module in zip(self._layers, of_layer, strict=True):
            self._check({f"{module}.{name}": tuple(weight.shape) for name, weight in layer.named_parameters()})
        self._check({EMBEDDING: tuple(self._decoder.embed_tokens.weight.shape)})

    def _check(self, needed: Mapping[str, tuple[int, ...]]) -> None:
        specs = self.source.specs
        lacking = sorted(name for name, shape in needed.items() if name not in specs or specs[name].shape != shape)
        if lacking:
            raise CheckpointFormatError(
                f"{self.source.path} lacks {lacking[0]!r} of shape {needed[lacking[0]]}, which transformers needs to"
                " run the layers. All tensors of config.json's model by its names are accepted. Save the model again"
                " with transformers."
            )

    def embed(self, texts: Sequence[Sequence[int]]) -> list[_Batch]:
        """The inputs of the first layer, those of the longest texts first."""
        table, found = read_tensors(self.source, [EMBEDDING])[EMBEDDING], []
        rows = [torch.tensor(ids) for ids in sorted(texts, key=len, reverse=True)]
        while rows:
            count = max(1, _TOKENS // len(rows[0]))
            taken, rows = rows[:count], rows[count:]
            ids = torch.nn.utils.rnn.pad_sequence(taken, batch_first=True, padding_value=-1)
            hidden = table[ids.clamp_min(0)].bfloat16()
            found.append(_Batch(hidden.to(self.device), (ids >= 0).to(self.device)))
        return found

    def hold(self, i: int, weights: Mapping[str, torch.Tensor]) -> Any:
        """Give layer i weights, by the names of the checkpoint; the layer."""
        layer, prefix = self._layers[i], f"model.layers.{i}."
        held = {name: weights[prefix + name].bfloat16() for name, _ in layer.named_parameters()}
        layer.load_state_dict(held, strict=False, assign=True)
        passing = _Passing()
        layers = [layer if i == j else passing for j in range(len(self._layers))]
        self._decoder.register_module("layers", torch.nn.ModuleList(layers))
        return layer

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer that was held last makes of [texts, tokens, hidden]."""
        with torch.inference_mode():
            return self._decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state

    def release(self, i: int) -> None:
        """Free a layer's weights."""
        self._layers[i].to("meta")


class _Passing(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def _in_layers(walk: _Walk, linears: set[str], form: WeightFormat) -> list[list[list[str]]]:
    """The linears of each layer that `form` quantizes together; they share their inputs."""
    modules = ({name.removesuffix(".weight") for name in names} for names in walk.names)
    found = [groups_of_linears(linears & of_layer, form) for of_layer in modules]
    outside = linears - {module for groups in found for group in groups for module in group}
    if outside:
        raise CheckpointFormatError(
            f"{min(outside)!r} of {walk.source.path} belongs to no layer that transformers runs: it has"
            f" {len(walk.names)}. Linears of these layers are calibrated. Name it in --ignore, or use --method rtn."
        )
    return found


def _layer(
    walk: _Walk, i: int, groups: list[list[str]], batches: list[_Batch], form: WeightFormat, observe: Observe
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """The tensors of a layer; `batches` become what the next one gets."""
    tensors = read_tensors(walk.source, walk.names[i], walk.device)
    moments = _moments(walk, i, tensors, groups, batches)
    for members in groups:
        weights = {module: tensors[f"{module}.weight"] for module in members}
        seen = moments.pop(members[0]).matrix()
        rounded = form.quantize_group(weights)
        for module, packed in gptq.calibrate(weights, rounded, seen).items():
            weight = weights[module]
            found, nearest = gptq.output_errors(weight, (packed, rounded[module]), seen)
            observe(module, weight, packed, output_error=found, rtn_output_error=nearest)
            tensors[f"{module}.weight"] = dequantize(packed)
            yield module, packed
    if i + 1 < len(walk.names):
        walk.hold(i, tensors)
        for at, (hidden, kept) in enumerate(batches):
            batches[at] = _Batch(walk.run(hidden), kept)
    walk.release(i)
    done = {f"{module}.weight" for members in groups for module in members}
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in done)


def _moments(
    walk: _Walk, i: int, tensors: Mapping[str, torch.Tensor], groups: list[list[str]], batches: list[_Batch]
) -> dict[str, gptq.InputMoments]:
    """The moments of the inputs of each group, by the name of its first member."""
    layer, found, hooks = walk.hold(i, tensors), {}, []
    inputs: dict[str, torch.Tensor] = {}
    for first, *_ in groups:
        found[first] = gptq.InputMoments(tensors[f"{first}.weight"].shape[1], walk.device)
        linear = layer.get_submodule(first.removeprefix(f"model.layers.{i}."))
        hooks.append(linear.register_forward_pre_hook(lambda _, args, first=first: inputs.update({first: args[0]})))
    for hidden, kept in batches:
        walk.run(hidden)
        for first, moments in found.items():
            moments.add(inputs.pop(first)[kept])
    for hook in hooks:
        hook.remove()
    return found
