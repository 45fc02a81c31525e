"""`export`: turns a checkpoint of a verl run (LoRA, or with UAQ) into what vLLM, transformers and PEFT load.

The weights pass as a stream; what re-quantization costs is measured on the way.
"""

import argparse
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from verl_qerl import __version__
from verl_qerl.checkpoints.digest import model_digest
from verl_qerl.checkpoints.record import write_json
from verl_qerl.checkpoints.stream import pack
from verl_qerl.checkpoints.writer import ShardedWriter, quantized_specs
from verl_qerl.cli import model_dir
from verl_qerl.cli.export.adapter import Adapter, read_adapter, write_peft
from verl_qerl.cli.export.arguments import FORMS, LAYOUTS, WITH_BASE
from verl_qerl.cli.export.fsdp_checkpoint import Checkpoint, open_checkpoint
from verl_qerl.cli.export.merge import Base, Merge, open_base
from verl_qerl.cli.output_dir import new_directory
from verl_qerl.formats import PackedWeight, get_format
from verl_qerl.formats.nvfp4_layout import modelopt_config, modelopt_legacy_config
from verl_qerl.formats.reference import relative_error
from verl_qerl.formats.tensor_spec import TensorSpec


def run(args: argparse.Namespace) -> int:
    """Export, then print what it cost."""
    how = {"scale": args.scale, "device": args.device, "max_shard_bytes": args.max_shard_size}
    report = export_checkpoint(args.checkpoint, args.out, args.to, args.base, **how)
    print(summary(report))
    print(f"wrote {args.out}")
    return 0


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    form: str,
    base: str | None = None,
    *,
    scale: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = 5 * 10**9,
) -> dict[str, Any]:
    """Export `checkpoint` into the new directory `out`, which appears when everything is written.

    Args:
        checkpoint: See `fsdp_checkpoint.open_checkpoint`.
        form: One of FORMS.
        out: Absent or empty; on an error nothing is left.
        base: Directory or hub id, in place of the base that the checkpoint names; the bits must be the same.
        scale: Scale choice of a quantized export; None for the base's own, or the default where that is not known.

    Returns:
        What is also written to `export_report.json`.

    Raises:
        FileExistsError: `out` holds something.
        FileNotFoundError: There is no checkpoint.
        ValueError: Checkpoint and base do not go together, or one is damaged.
    """
    trained = open_checkpoint(checkpoint)
    found = open_base(base, trained)
    adapter = read_adapter(trained, found.shapes)
    check_trained(form, trained, adapter)
    check_base(form, found)
    where, total = model_dir.pick_device(device), model_dir.total_bytes(found.specs)
    started = time.perf_counter()
    with new_directory(out) as folder, tqdm(total=total, unit="B", unit_scale=True, desc="export") as bar:
        export = _Export(folder, form, Merge(found, adapter, trained, where, bar.update), scale, max_shard_bytes)
        layers = export.write(out)
        report = export.report(layers) | {"seconds": round(time.perf_counter() - started, 3)}
        write_json(folder / model_dir.EXPORT_REPORT, report)
    return report


class _Export:
    """One export into `folder`."""

    def __init__(self, folder: Path, form: str, merge: Merge, scale: str | None, max_shard_bytes: int) -> None:
        self.folder, self.form, self.merge, self.max_shard_bytes = folder, form, merge, max_shard_bytes
        self.base, self.adapter, self.checkpoint = merge.base, merge.adapter, merge.checkpoint
        self.format = get_format("nvfp4", scale or (self.base.scale if form in LAYOUTS else None))

    def write(self, out: Path) -> dict[str, dict[str, Any]]:
        """Write everything but the report, for the final place `out`; what is to be said of each layer."""
        layers: dict[str, dict[str, Any]] = {}
        if self.form == "peft":
            self._write_peft()
        elif self.form == WITH_BASE:
            self._write_packed(self.merge.beside_the_adapter(), "compressed-tensors")
            (self.folder / "adapter").mkdir()
            write_peft(self.folder / "adapter", self.adapter, str(out.absolute()))
        elif self.form == "merged-bf16":
            config = {k: v for k, v in self.base.source.config.items() if k != "quantization_config"}
            self._write_model(self.merge.tensors(), self.base.specs, config)
        else:
            layers = self._write_quantized()
        for module, update in self.merge.relative_update.items():
            layers.setdefault(module, {})["relative_update"] = update
        return dict(sorted(layers.items()))

    def report(self, layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What `export_report.json` holds, but for the time."""
        report: dict[str, Any] = {
            "verl_qerl": __version__,
            "torch": torch.__version__,
            "device": model_dir.device_name(self.merge.device),
            "to": self.form,
            "checkpoint": str(self.checkpoint.folder),
            "world_size": self.checkpoint.world_size,
            "base": self.base.name,
            "base_digest": model_digest(self.merge.digests) if self.merge.digests else None,
            "base_digest_checked": self.base.record is not None,
            "r": self.adapter.r,
            "lora_alpha": self.adapter.alpha,
            "scaling": self.adapter.scaling,
            "changed_besides_the_adapter": self.merge.changed,
            "norms": {
                name: {"update": update, "lost_in_bf16": lost}
                for name, (update, lost) in sorted(self.merge.norm_updates.items())
            },
            "uaq_scale": self.checkpoint.uaq["scale"] if self.checkpoint.uaq else None,
            "layers": layers,
        }
        if self.form in LAYOUTS:
            report["scale"] = self.format.scale
        return report

    def _write_peft(self) -> None:
        model_dir.check_free_space(self.folder, self.adapter.size_bytes)
        for _ in self.merge.tensors():  # to check the base, and to find what changed
            pass
        if changed := self.merge.changed:
            raise ValueError(
                f"an adapter alone cannot hold this checkpoint: its {changed[0]!r} is not that of {self.base.name}"
                f" ({len(changed)} tensors besides LoRA). The base of the run is accepted, if they were not trained,"
                " and else merged models. Check --base, or use --to merged-bf16."
            )
        name = self.base.name  # a directory is found from everywhere, a hub id is no path
        write_peft(self.folder, self.adapter, str(Path(name).absolute()) if Path(name).is_dir() else name)

    def _write_model(
        self,
        items: Iterable[tuple[str, PackedWeight | torch.Tensor]],
        specs: Mapping[str, TensorSpec],
        config: dict[str, Any],
        layout: str = "compressed-tensors",
    ) -> dict[str, str]:
        """Weights, configuration and tokenizer; the digests of packed weights."""
        beside = self.adapter.size_bytes if self.form == WITH_BASE else 0
        model_dir.check_free_space(self.folder, model_dir.total_bytes(specs) + beside)
        with ShardedWriter(self.folder, specs, self.max_shard_bytes) as writer:
            digests = model_dir.store(writer, items, layout)
        model_dir.copy_other_files(self.base.source.path, self.folder)
        write_json(self.folder / "config.json", model_dir.in_bf16(config))
        return digests

    def _write_quantized(self) -> dict[str, dict[str, Any]]:
        layers: dict[str, dict[str, Any]] = {}

        def observe(module: str, weight: torch.Tensor, packed: PackedWeight) -> None:
            layers[module] = {"shape": packed.shape, "relative_error": relative_error(weight, packed)}

        items = pack(self.merge.tensors(), self.base.linears, self.format, observe)
        digests = self._write_packed(items, LAYOUTS[self.form])
        for module, layer in layers.items():
            layer |= {"digest": digests[module], "relative_update": 0.0}
        return layers

    def _write_packed(self, items: Iterable[tuple[str, PackedWeight | torch.Tensor]], layout: str) -> dict[str, str]:
        """A quantized model in a layout; digests of its packed weights."""
        make = modelopt_config if layout == "modelopt" else self.format.config
        config = self.base.source.config | {"quantization_config": make(self.base.ignore)}
        specs = quantized_specs(self.base.specs, self.base.linears, self.format, layout)
        digests = self._write_model(items, specs, config, layout)
        if layout == "modelopt":
            write_json(self.folder / "hf_quant_config.json", modelopt_legacy_config(self.base.ignore))
        return digests


def check_base(form: str, base: Base) -> None:
    """Refuse a form that the base has not."""
    if form in (WITH_BASE, *LAYOUTS) and base.format != "nvfp4":
        raise ValueError(
            f"a model on a base in another format is not written packed here: to={form}, base={base.name} in"
            f" {base.format}. Accepted are peft and merged-bf16. Use --to merged-bf16, then `python -m verl_qerl"
            f" quantize --format {base.format}`."
        )
    if form == WITH_BASE and not base.is_packed:
        raise ValueError(
            f"the base was not packed while the adapter was trained: to={form}, base={base.name}. Accepted are peft"
            " and the merged forms. Use --to peft."
        )


def check_trained(form: str, checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Refuse a form that cannot hold what was trained."""
    if form in ("peft", WITH_BASE) and not adapter.factors:
        raise ValueError(
            f"the checkpoint holds no adapter: {checkpoint.folder} is of a run of all weights. Accepted with it are"
            " merged-bf16, merged-nvfp4 and modelopt. Use --to merged-bf16."
        )
    if form == "peft" and checkpoint.norms:
        raise ValueError(
            f"an adapter cannot hold trained norms, which vLLM would not load: {len(checkpoint.norms)} norms in"
            f" {checkpoint.folder}. Accepted with them are {', '.join(FORMS[1:])}. Use --to {WITH_BASE}."
        )


def summary(report: Mapping[str, Any]) -> str:
    """What was exported, and for a quantized form the cost by kind of linear."""
    trained = f"adapter: r={report['r']}, scaling {report['scaling']:g}, " if report["r"] else "all weights: "
    checked = "as the checkpoint names its packed linears (the base's other tensors are not compared)"
    named = checked if report["base_digest_checked"] else "which the checkpoint does not name"
    lines = [f"{trained}{len(report['layers'])} linears; base {report['base_digest'] or 'not packed'}, {named}"]
    if changed := report["changed_besides_the_adapter"]:
        beside = "adapter" if report["r"] else "linears"
        lines.append(f"{len(changed)} tensors besides the {beside} come from the checkpoint")
    if report.get("norms"):
        update, lost = (sum(norm[part] for norm in report["norms"].values()) for part in ("update", "lost_in_bf16"))
        share = f"{lost / update:.2f} of their update" if update else "no update"
        lines.append(f"{len(report['norms'])} trained norms; rounding them to bf16 loses {share}")
    if report.get("uaq_scale"):
        lines.append(f"the scaling of UAQ, {report['uaq_scale']:g}, is undone")
    if "scale" in report:
        lines += _costs(report)
    return "\n".join(lines)


def _costs(report: Mapping[str, Any]) -> list[str]:
    """Errors and updates relative to the merged weights, in Frobenius norms, by kind of linear.

    At `error/update` 1 quantization moves a weight as far as training did.
    """
    quantized = {module: layer for module, layer in report["layers"].items() if "relative_error" in layer}
    kinds: dict[str, list[dict[str, float]]] = {}
    for module, layer in quantized.items():
        kinds.setdefault(module.rpartition(".")[2], []).append(layer)
    columns = f"{'mean error':>11} {'max error':>11} {'mean update':>12} {'error/update':>13}"
    lines = [f"{'linear':<12} {'count':>5} {columns}"]
    for kind, layers in kinds.items():
        errors = [layer["relative_error"] for layer in layers]
        error, update = fmean(errors), fmean(layer["relative_update"] for layer in layers)
        ratio = f"{error / update:.2f}" if update else "-"
        lines.append(f"{kind:<12} {len(layers):>5} {error:>11.2e} {max(errors):>11.2e} {update:>12.2e} {ratio:>13}")
    if others := len(report["layers"]) - len(quantized):
        lines.append(f"{others} trained linears stay in bf16")
    updates = sum(layer["relative_update"] for layer in quantized.values())
    if sum(layer["relative_error"] for layer in quantized.values()) > 0.9 * updates > 0:
        other = "Serve the base with the adapter (--to base-and-adapter or peft), or use" if report["r"] else "Use"
        lines.append(
            "quantization takes the training back: the error is as large as the update, so this model is about as far "
            f"from the trained one as the base is. {other} --to merged-bf16."
        )
    return lines
