"""`quantize`: turns a bf16 checkpoint into one in NVFP4 or another format, as a stream.

Reading, arithmetic, and digests and writing run in threads of their own, so that the slowest of them, the disk, sets
the pace. Memory: a few tensors, whatever the size of the model; more with texts to calibrate on, see
`calibration.calibrated_stream`.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from verl_qerl import __version__
from verl_qerl.checkpoints.dense_source import dense_source
from verl_qerl.checkpoints.digest import model_digest
from verl_qerl.checkpoints.model_config import senses
from verl_qerl.checkpoints.record import write_json
from verl_qerl.checkpoints.source import Source, open_source, weights_of_layers
from verl_qerl.checkpoints.stream import check_held, packed_names, packed_stream
from verl_qerl.checkpoints.writer import ShardedWriter, quantized_specs
from verl_qerl.cli import model_dir
from verl_qerl.cli.dense_model import is_tied
from verl_qerl.cli.output_dir import new_directory
from verl_qerl.cli.quantize.arguments import SAMPLES, TOKENS
from verl_qerl.cli.quantize.calibration import FAMILIES, Calibration, calibrated_stream, check_calibrated
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import PackedWeight, WeightFormat, get_format
from verl_qerl.formats.ignore import DEFAULT_IGNORE, ROUTER, is_router
from verl_qerl.formats.reference import relative_error
from verl_qerl.formats.tensor_spec import TensorSpec

# As packed_stream, of which `observe` alone is left to be given.
Pack = Callable[..., Iterator[tuple[str, PackedWeight | torch.Tensor]]]


def run(args: argparse.Namespace) -> int:
    """Quantize, then print the table."""
    calibration = None
    if args.method == "gptq":
        samples, tokens = args.calibration_samples or SAMPLES, args.calibration_tokens or TOKENS
        calibration = Calibration(args.calibration, samples, tokens)
    report = quantize_checkpoint(
        args.model,
        args.out,
        form=args.format,
        scale=args.scale,
        ignore=args.ignore,
        device=args.device,
        max_shard_bytes=args.max_shard_size,
        requantize=args.requantize,
        calibration=calibration,
    )
    print(_table(report))
    print(f"wrote {args.out}")
    return 0


def quantize_checkpoint(
    model: Path,
    out: Path,
    *,
    form: str = "nvfp4",
    scale: str | None = None,
    ignore: Sequence[str] = (),
    device: str = "auto",
    max_shard_bytes: int = 5 * 10**9,
    requantize: bool = False,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Quantize `model` into the new directory `out`, which appears when everything is written.

    Args:
        model: Directory in Hugging Face layout, unquantized.
        out: Absent or empty; on an error nothing is left.
        scale: Scale choice of the format, see `WeightFormat`; None is its default.
        ignore: Modules left as they are, besides lm_head.
        requantize: Take a quantized `model` by the weights that it stands for; what it left as it is stays so.
        calibration: Texts for GPTQ; without, weights are rounded to the nearest codes.

    Returns:
        What is also written to `quantization_report.json`.

    Raises:
        FileExistsError: `out` holds something.
        ValueError: The source is damaged, quantized already or not for the format, or an option does not fit.
    """
    chosen = get_format(form, scale)
    source, rules, stored = _open(model, chosen, ignore, requantize, calibration is not None)
    specs = quantized_specs(source.specs, packed_names(source, chosen, rules), chosen)
    where = model_dir.pick_device(device)
    texts = calibration.read(source, rules) if calibration else ()
    stream = partial(calibrated_stream, texts=texts) if texts else packed_stream
    with new_directory(out) as folder:
        pack = partial(stream, source, chosen, rules, where)
        written = _write(folder, specs, max_shard_bytes, model_dir.total_bytes(source.specs), pack)
        report = {
            "verl_qerl": __version__,
            "torch": torch.__version__,
            "device": model_dir.device_name(where),
            "format": form,
            "method": "gptq" if texts else "rtn",
            **({"calibration": {"samples": len(texts), "tokens": sum(map(len, texts))}} if texts else {}),
            "ignore": rules,
            "source": stored or "unquantized",
            **written,
        }
        model_dir.copy_other_files(source.path, folder)
        config = source.config | {"quantization_config": chosen.config(rules)}
        if not chosen.quantizes_activations:  # transformers decodes these to bf16, whatever the norms are in
            config = model_dir.in_bf16(config)
        write_json(folder / "config.json", config)
        write_json(folder / model_dir.QUANTIZATION_REPORT, report)
    return report


def _open(
    model: Path, form: WeightFormat, ignore: Sequence[str], requantize: bool, calibrates: bool
) -> tuple[Source, tuple[str, ...], str | None]:
    """The model as it is to be quantized, what of it is left as it is, and the format that it is stored in."""
    source = open_source(model)
    stored = source.format
    rules = tuple(dict.fromkeys((*DEFAULT_IGNORE, *ignore)))
    if calibrates:
        check_calibrated(source, form)
    if requantize and stored is not None:
        source = dense_source(source)
        rules = (*rules, *sorted(source.linears(rules) - source.modules))  # what the quantized model left as it is
    if source.format is not None:
        raise CheckpointFormatError(
            f"the model is quantized already: {source.path} ({source.format}). An unquantized checkpoint is accepted. "
            "Use this directory as it is, name the original model, or add --requantize."
        )
    _check_kind(source)
    _check_alike(source)
    check_held(source, form)
    if any(is_router(name.rpartition(".")[0]) for name in source.files):
        rules = (*rules, ROUTER)
    return source, rules, stored


def _check_kind(source: Source) -> None:
    """Refuse what no run takes: a model that sees or hears, and one without a head, which would be drawn at random."""
    parts = senses(source.config)
    if parts:
        raise CheckpointFormatError(
            f"no model of text alone: {source.path} has {parts[0]} in its config.json, and a run with +rollout=..."
            " refuses it. Models of text alone are accepted. Choose one."
        )
    classes = source.config.get("architectures") or [""]
    if str(classes[0]).endswith("ForCausalLM") and "lm_head.weight" not in source.specs and not is_tied(source.config):
        raise CheckpointFormatError(
            f"the head is missing: {source.path} has no lm_head.weight, and tie_word_embeddings of its config.json is"
            " false. A head of this name, or true for a model that uses its embeddings as one, is accepted. Download it"
            " again; families whose head has another name are not quantized."
        )


def _check_alike(source: Source) -> None:
    """Refuse a layer that lacks a weight which another has, of families whose layers are known to be alike."""
    family = source.config.get("model_type")
    if family not in FAMILIES:
        return
    found = weights_of_layers(source.specs)
    every = set().union(*found.values())
    lacking = min(((i, name) for i, names in found.items() for name in every - names), default=None)
    if lacking is not None:
        raise CheckpointFormatError(
            f"{source.path} holds no {lacking[1]!r} of layer {lacking[0]}, and other layers have one. Every layer of a"
            f" {family} model must have the same parts. Download the model again."
        )


def _write(folder: Path, specs: dict[str, TensorSpec], max_shard_bytes: int, before: int, pack: Pack) -> dict[str, Any]:
    """Write the tensors of `specs`, from `before` bytes of a model; their part of the report."""
    after = model_dir.total_bytes(specs)
    model_dir.check_free_space(folder, after)
    layers: dict[str, dict[str, Any]] = {}
    bar = tqdm(total=before, unit="B", unit_scale=True, desc="quantize")

    def observe(module: str, weight: torch.Tensor, packed: PackedWeight, **outputs: float) -> None:
        layers[module] = _layer(weight, packed) | outputs
        bar.update(weight.nbytes)

    def items() -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
        for name, item in pack(observe=observe):
            if isinstance(item, torch.Tensor):
                model_dir.check_finite(name, item)
                bar.update(item.nbytes)
            yield name, item

    started = time.perf_counter()
    with ShardedWriter(folder, specs, max_shard_bytes) as writer, bar:
        for module, digest in model_dir.store(writer, items()).items():
            layers[module]["digest"] = digest
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 3),
        "read_gb_per_s": round(before / 1e9 / seconds, 3),
        "bytes_before": before,
        "bytes_after": after,
        "model_digest": model_digest({module: layer["digest"] for module, layer in layers.items()}),
        "layers": dict(sorted(layers.items())),
    }


def _layer(weight: torch.Tensor, packed: PackedWeight) -> dict[str, Any]:
    return {
        "shape": packed.shape,
        "scale": packed.form.scale,
        "bits_per_weight": round(8 * packed.size_bytes / weight.numel(), 4),
        "relative_error": relative_error(weight, packed),
    }


def _table(report: dict[str, Any]) -> str:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for module, layer in report["layers"].items():
        kinds.setdefault(module.rpartition(".")[2], []).append(layer)
    calibrated = report["method"] == "gptq"
    of_outputs = f" {'of outputs':>11} {'by rtn':>11}" if calibrated else ""
    lines = [f"{'linear':<12} {'count':>5} {'mean error':>11} {'max error':>11}{of_outputs}"]
    for kind, layers in kinds.items():
        errors = [layer["relative_error"] for layer in layers]
        line = f"{kind:<12} {len(layers):>5} {fmean(errors):>11.4f} {max(errors):>11.4f}"
        for key in ("output_error", "rtn_output_error") if calibrated else ():
            line += f" {fmean(layer[key] for layer in layers):>11.4f}"
        lines.append(line)
    if report["source"] != "unquantized":
        lines.append(f"errors are those beside the {report['source']} weights of the source, not beside the original's")
    before, after = report["bytes_before"] / 1e9, report["bytes_after"] / 1e9
    lines.append(
        f"{before:.3f} GB -> {after:.3f} GB in {report['seconds']:.1f} s, {report['read_gb_per_s']:.2f} GB/s read, "
        f"device {report['device']}, digest {report['model_digest']}"
    )
    return "\n".join(lines)
