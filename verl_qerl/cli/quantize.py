"""`quantize`: a bf16 checkpoint to an NVFP4 checkpoint, as a stream.

Reading, arithmetic, and digests and writing run in threads of their own, so that the slowest of them, the disk, sets
the pace. Memory: a few tensors, whatever the size of the model.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from verl_qerl import __version__
from verl_qerl.cli.output_dir import check_absent, new_directory
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.nvfp4 import SCALE_CHOICES, PackedWeight
from verl_qerl.nvfp4.checkpoint import DEFAULT_IGNORE, is_ignored, quantization_config, to_tensors
from verl_qerl.nvfp4.digest import model_digest, weight_digest
from verl_qerl.nvfp4.reader import TensorSpec
from verl_qerl.nvfp4.reference import relative_error
from verl_qerl.nvfp4.stream import Source, linear_modules, open_source, stream
from verl_qerl.nvfp4.writer import ShardedWriter, quantized_specs

REPORT = "quantization_report.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_NUM_STORING = 4  # threads; SHA-256 and writing both release the GIL
_MAX_WAITING = 8  # results between arithmetic and disk; bounds memory when the disk is slower


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("quantize", help="write an NVFP4 checkpoint of a bf16 model")
    parser.add_argument("--model", type=Path, required=True, help="directory in Hugging Face layout")
    parser.add_argument("--out", type=Path, required=True, help="new directory; appears whole or not at all")
    parser.add_argument("--scale", choices=SCALE_CHOICES, default="minmax", help="of a block (default: %(default)s)")
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules left as they are besides lm_head: exact names, or `re:` and a regular expression",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--max-shard-size", type=_size, default="5GB", help="of an output file (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize, then print the table."""
    try:
        report = quantize_checkpoint(
            args.model,
            args.out,
            scale=args.scale,
            ignore=args.ignore,
            device=args.device,
            max_shard_bytes=args.max_shard_size,
        )
    except KeyboardInterrupt:
        print(f"interrupted; {args.out} was not written", file=sys.stderr)
        return 130  # as a shell reports SIGINT
    print(_table(report))
    print(f"wrote {args.out}")
    return 0


def quantize_checkpoint(
    model: Path,
    out: Path,
    *,
    scale: str = "minmax",
    ignore: Sequence[str] = (),
    device: str = "auto",
    max_shard_bytes: int = 5 * 10**9,
) -> dict[str, Any]:
    """Quantize `model` into the new directory `out`, which appears when everything is written.

    Args:
        model: Directory in Hugging Face layout, unquantized.
        out: Absent or empty; on an error nothing is left.
        scale: Scale choice, see `nvfp4.reference.quantize_group`.
        ignore: Modules left as they are, besides lm_head.
        device: `auto`, `cpu` or `cuda`.
        max_shard_bytes: Of one output file.

    Returns:
        What is also written to `quantization_report.json`.

    Raises:
        FileExistsError: `out` holds something.
        ValueError: The source is damaged, quantized already or not for NVFP4, or an option does not fit.
    """
    check_absent(out)
    source = open_source(model)
    rules = tuple(dict.fromkeys((*DEFAULT_IGNORE, *ignore)))
    _check(source, rules)
    specs = quantized_specs(source, linear_modules(source, rules))
    where = _device(device)
    with new_directory(out) as folder:
        _check_free_space(folder, _total(specs))
        report = _write(folder, source, specs, max_shard_bytes, scale, rules, where)
        _copy_other_files(source.path, folder)
        _write_json(folder / "config.json", source.config | {"quantization_config": quantization_config(rules)})
        _write_json(folder / REPORT, report)
    return report


def _write(
    folder: Path,
    source: Source,
    specs: Mapping[str, TensorSpec],
    max_shard_bytes: int,
    scale: str,
    ignore: Sequence[str],
    device: str,
) -> dict[str, Any]:
    """Write the weights; the report."""
    started = time.perf_counter()
    with ShardedWriter(folder, specs, max_shard_bytes) as writer:
        layers = _write_tensors(writer, source, scale, ignore, device)
    seconds = time.perf_counter() - started
    return {
        "verl_qerl": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ignore": ignore,
        "seconds": round(seconds, 3),
        "read_gb_per_s": round(_total(source.specs) / 1e9 / seconds, 3),
        "bytes_before": _total(source.specs),
        "bytes_after": _total(specs),
        "model_digest": model_digest({module: layer["digest"] for module, layer in layers.items()}),
        "layers": layers,
    }


def _write_tensors(
    writer: ShardedWriter, source: Source, scale: str, ignore: Sequence[str], device: str
) -> dict[str, dict[str, Any]]:
    """Fill `writer`; the report of each layer, in the order of their names."""
    layers: dict[str, dict[str, Any]] = {}
    waiting: deque[Future[None]] = deque()
    with (
        tqdm(total=_total(source.specs), unit="B", unit_scale=True, desc="quantize") as bar,
        ThreadPoolExecutor(_NUM_STORING) as pool,
    ):

        def observe(module: str, weight: torch.Tensor, packed: PackedWeight) -> None:
            layers[module] = _layer(weight, packed, scale)
            bar.update(weight.nbytes)

        for name, item in stream(source, scale, ignore, device, observe):
            if isinstance(item, torch.Tensor):
                bar.update(item.nbytes)
            waiting.append(pool.submit(_store, writer, layers, name, item))
            if len(waiting) == _MAX_WAITING:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    return dict(sorted(layers.items()))


def _layer(weight: torch.Tensor, packed: PackedWeight, scale: str) -> dict[str, Any]:
    return {
        "shape": packed.shape,
        "scale": scale,
        "bits_per_weight": round(8 * packed.size_bytes / weight.numel(), 4),
        "relative_error": relative_error(weight, packed),
    }


def _store(
    writer: ShardedWriter, layers: dict[str, dict[str, Any]], name: str, item: PackedWeight | torch.Tensor
) -> None:
    """Runs in a thread."""
    if isinstance(item, torch.Tensor):
        writer.add(name, item)
        return
    item = item.to("cpu")
    for key, tensor in to_tensors(name, item).items():
        writer.add(key, tensor)
    layers[name]["digest"] = weight_digest(item)


def _total(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs.values())


def _check(source: Source, rules: Sequence[str]) -> None:
    if source.layout != "bf16":
        raise CheckpointFormatError(
            f"the model is quantized already: {source.path} ({source.layout}). An unquantized checkpoint is accepted. "
            "Use this directory as it is, or name the original model."
        )
    modules = {name.rpartition(".")[0] for name in source.files}
    for rule in rules:
        # A model with tied embeddings has no lm_head.
        if rule not in DEFAULT_IGNORE and not any(is_ignored(module, (rule,)) for module in modules):
            raise ValueError(
                f"nothing is ignored by {rule!r}: no module of {source.path} matches. An exact module name, or "
                "`re:` and a regular expression from its start, is accepted. Correct or remove it."
            )


def _check_free_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise ValueError(
            f"the disk is too full: free={free / 1e9:.1f} GB. The output takes {wanted / 1e9:.1f} GB. "
            "Free some space or choose another --out."
        )


def _device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("torch finds no GPU: device='cuda'. With a GPU, cuda is accepted. Use --device cpu.")
    return "cuda" if available and wanted != "cpu" else "cpu"


def _copy_other_files(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":  # transformers' name
            shutil.copytree(path, folder / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size. A number with KB, MB or GB is accepted, for example 5GB."
        )
    return size


def _table(report: dict[str, Any]) -> str:
    kinds: dict[str, list[float]] = {}
    for module, layer in report["layers"].items():
        kinds.setdefault(module.rpartition(".")[2], []).append(layer["relative_error"])
    lines = [f"{'linear':<12} {'count':>5} {'mean error':>11} {'max error':>11}"]
    for kind, errors in kinds.items():
        mean = sum(errors) / len(errors)
        lines.append(f"{kind:<12} {len(errors):>5} {mean:>11.4f} {max(errors):>11.4f}")
    before, after = report["bytes_before"] / 1e9, report["bytes_after"] / 1e9
    lines.append(
        f"{before:.3f} GB -> {after:.3f} GB in {report['seconds']:.1f} s, {report['read_gb_per_s']:.2f} GB/s read, "
        f"device {report['device']}, digest {report['model_digest']}"
    )
    return "\n".join(lines)
