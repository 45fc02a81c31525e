"""What `export` prints."""

from collections.abc import Mapping
from typing import Any


def summary(report: Mapping[str, Any]) -> str:
    """What was exported, and for a quantized form the cost by kind of linear."""
    trained = f"adapter: r={report['r']}, scaling {report['scaling']:g}, " if report["r"] else "all weights: "
    lines = [
        f"{trained}{len(report['layers'])} linears; base "
        f"{report['base_digest'] or 'not packed'}, "
        + (
            "as the checkpoint names its packed linears (the base's other tensors are not compared)"
            if report["base_digest_checked"]
            else "which the checkpoint does not name"
        )
    ]
    if report["changed_besides_the_adapter"]:
        lines.append(
            f"{len(report['changed_besides_the_adapter'])} tensors besides the adapter come from the checkpoint"
        )
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
    kinds: dict[str, list[dict[str, float]]] = {}
    for module, layer in report["layers"].items():
        kinds.setdefault(module.rpartition(".")[2], []).append(layer)
    lines = [
        f"{'linear':<12} {'count':>5} {'mean error':>11} {'max error':>11} {'mean update':>12} {'error/update':>13}"
    ]
    for kind, layers in kinds.items():
        errors = [layer["relative_error"] for layer in layers]
        error, update = sum(errors) / len(layers), sum(layer["relative_update"] for layer in layers) / len(layers)
        ratio = f"{error / update:.2f}" if update else "-"
        lines.append(f"{kind:<12} {len(layers):>5} {error:>11.2e} {max(errors):>11.2e} {update:>12.2e} {ratio:>13}")
    layers = report["layers"].values()
    updates = sum(layer["relative_update"] for layer in layers)
    if sum(layer["relative_error"] for layer in layers) > 0.9 * updates > 0:
        lines.append(
            "quantization takes the training back: the error is as large as the update, so this model is about as far "
            "from the trained one as the base is. Serve the base with the adapter (--to base-and-adapter or peft), or "
            "use --to merged-bf16."
        )
    if report["log_probs"]:
        found = report["log_probs"]
        lines.append(
            f"log-probs of {found['tokens']} tokens, {found['prompts']} prompts: |change| mean "
            f"{found['mean_abs_change']:.4f}, largest {found['max_abs_change']:.4f}; mean change "
            f"{found['mean_change']:.4f}"
        )
    return lines
