"""What is evaluated: a model, in which format, with which adapter; or what a training checkpoint holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_qerl.checkpoints.model_config import read_config, read_object
from verl_qerl.checkpoints.source import open_source, read_specs
from verl_qerl.cli.eval.arguments import STOCK
from verl_qerl.cli.export.arguments import WITH_BASE
from verl_qerl.cli.export.command import export_checkpoint
from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.cli.export.merge import dense_specs, matrix_shapes, open_base
from verl_qerl.cli.output_dir import scratch_directory
from verl_qerl.formats import FORMATS
from verl_qerl.vllm_plugin.offline import ADAPTER_CONFIG, EngineOptions

ADAPTER = "adapter_model.safetensors"


@contextmanager
def served(
    model: str | None, adapter: Path | None, checkpoint: Path | None, form: str | None, scratch: Path
) -> Iterator[EngineOptions]:
    """What the arguments name, as vLLM is given it; what is exported of a checkpoint is removed afterwards.

    Args:
        model: Directory or hub id; with a checkpoint in place of the base that it names.
        checkpoint: Folder that verl's FSDP2 engine has saved; excludes `adapter`.
        form: A weight format, STOCK, or None for the one that the files are in.
        scratch: Existing folder on a disk with room for a model.

    Raises:
        ValueError: The parts do not go together.
    """
    if checkpoint is None:
        assert model is not None
        if adapter is not None:
            check_fits(adapter, model)
        yield EngineOptions(model, _form(model, form), adapter=adapter)
        return
    with scratch_directory(scratch, "export") as folder:
        yield _exported(folder / "model", checkpoint, model, form)


def _exported(out: Path, checkpoint: Path, model: str | None, form: str | None) -> EngineOptions:
    """A checkpoint as vLLM takes it: as trained where it can be, merged into bf16 where not."""
    trained = open_checkpoint(checkpoint)
    base = open_base(model, trained)
    if not trained.factors or (trained.norms and not (base.is_packed and base.format == "nvfp4")):
        export_checkpoint(checkpoint, out, "merged-bf16", model)
        return EngineOptions(str(out), None if form == STOCK else form)
    if trained.norms:
        export_checkpoint(checkpoint, out, WITH_BASE, model)
        return EngineOptions(str(out), _form(str(out), form), adapter=out / "adapter")
    export_checkpoint(checkpoint, out, "peft", model)
    if base.record and form is None:  # as the rollouts of its run
        return EngineOptions(base.name, base.format, base.record.scale, base.record.ignore, adapter=out)
    return EngineOptions(base.name, _form(base.name, form), adapter=out)


def _form(model: str, form: str | None) -> str | None:
    if form == STOCK:
        read_config(model)  # a model that is not there is told as one
        return None
    found = open_source(model).format
    return form or (found if found in FORMATS else None)


def check_fits(adapter: Path, model: str) -> None:
    """Require an adapter for linears that the model has.

    Raises:
        FileNotFoundError: There is no adapter.
        ValueError: It is of another base.
    """
    for name in (ADAPTER_CONFIG, ADAPTER):
        if not (adapter / name).is_file():
            raise FileNotFoundError(
                f"no adapter is found: {adapter} has no {name}. A PEFT directory is accepted. Check --adapter, or give"
                " a training checkpoint with --checkpoint."
            )
    base = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    shapes = matrix_shapes(dense_specs(open_source(model)))
    for name, spec in read_specs(adapter / ADAPTER).items():
        module, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if factor not in ("lora_A", "lora_B"):
            continue
        found = shapes.get(module)
        size = spec.shape[1] if factor == "lora_A" else spec.shape[0]
        if found is None or size != found[factor == "lora_A"]:
            raise ValueError(
                f"the adapter is of another base: {factor} of {module!r} is {tuple(spec.shape)}, and --model={model}"
                f" has {f'{found} there' if found else 'no such linear'}. Accepted is the base that it was trained on,"
                f" {base!r} by its configuration. Name that with --model."
            )
