"""What is evaluated: a model, in which format, with which adapter; or what a training checkpoint holds."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_qerl.checkpoints.model_config import read_object
from verl_qerl.checkpoints.source import open_source, read_specs
from verl_qerl.cli.eval.arguments import STOCK
from verl_qerl.cli.export.adapter import read_adapter
from verl_qerl.cli.export.arguments import WITH_BASE
from verl_qerl.cli.export.command import export_checkpoint
from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.cli.export.merge import matrix_shapes, open_base
from verl_qerl.formats import FORMATS
from verl_qerl.vllm_plugin.offline import ADAPTER_CONFIG

ADAPTER = "adapter_model.safetensors"
CHECKED = 32  # tokens of the answer that the adapter is checked on


@dataclass(frozen=True)
class Served:
    """What vLLM is given; see offline.EngineOptions."""

    model: str
    form: str | None
    adapter: Path | None = None
    scale: str | None = None
    ignore: tuple[str, ...] | None = None


@contextmanager
def served(
    model: str | None, adapter: Path | None, checkpoint: Path | None, form: str | None, scratch: Path
) -> Iterator[Served]:
    """What the arguments name; what is exported of a checkpoint is removed afterwards.

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
        yield Served(model, _form(model, form), adapter)
        return
    with tempfile.TemporaryDirectory(prefix=".export.", dir=scratch) as folder:
        yield _exported(Path(folder) / "model", checkpoint, model, form)


def _exported(out: Path, checkpoint: Path, model: str | None, form: str | None) -> Served:
    """A checkpoint as vLLM takes it: as trained where it can be, merged into bf16 where not."""
    trained = open_checkpoint(checkpoint)
    if model is None and trained.record is None and trained.uaq is None:
        raise ValueError(
            f"the checkpoint does not name its base: --checkpoint={checkpoint}. One that verl_qerl's engine wrote does."
            " Give the model.path of the run with --model."
        )
    base = open_base(model, trained)
    read_adapter(trained, base.shapes)  # before the long work
    if not trained.factors or (trained.norms and not (base.is_packed and base.format == "nvfp4")):
        export_checkpoint(checkpoint, out, "merged-bf16", model)
        return Served(str(out), None if form == STOCK else form)
    if trained.norms:
        export_checkpoint(checkpoint, out, WITH_BASE, model)
        return Served(str(out), _form(str(out), form), out / "adapter")
    export_checkpoint(checkpoint, out, "peft", model)
    if base.is_packed and base.record and form is None:  # as the rollouts of its run
        return Served(base.name, base.format, out, base.record.scale, tuple(base.record.ignore))
    return Served(base.name, _form(base.name, form), out)


def _form(model: str, form: str | None) -> str | None:
    if form is not None:
        return None if form == STOCK else form
    found = open_source(model).format
    return found if found in FORMATS else None


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
    shapes = matrix_shapes(open_source(model))
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


class Engine(Protocol):
    """What is asked of offline.OfflineEngine."""

    def sample(self, prompts: Any, log_probs: bool = False, **sampling: Any) -> Iterator[tuple[int, list[Any]]]:
        """Answers to each prompt."""
        ...

    def score(self, tokens: Any, with_adapter: bool) -> list[float]:
        """Log-prob of every token but the first."""
        ...


def check_applied(engine: Engine, prompt: list[int]) -> float:
    """Require that answers are sampled with the adapter; mean |change of a token's log-prob| on one answer.

    The answer comes as all others do. It is scored with the adapter and without: the two must differ, and the log-probs
    that it was sampled with must not be those of the base.

    Args:
        engine: With an adapter.
        prompt: Token ids of a question.

    Raises:
        ValueError: The adapter changes nothing, or answers come without it.
    """
    ((_, (answer,)),) = engine.sample([prompt], log_probs=True, temperature=0.0, max_tokens=CHECKED)
    tokens, length = [*prompt, *answer.tokens], len(answer.tokens)
    ours, base = (engine.score(tokens, with_adapter)[-length:] for with_adapter in (True, False))
    change = _distance(ours, base)
    if change == 0:
        raise ValueError(
            f"the adapter changes nothing: an answer of {length} tokens has the same log-probs without it. A trained"
            " adapter that vLLM applies is accepted. Check that its factors B are not zero."
        )
    # Decoding and scoring differ by roundings, which may be all that a hardly trained adapter changes.
    if _distance(answer.log_probs, base) < 0.5 * _distance(answer.log_probs, ours):
        raise ValueError(
            f"answers come without the adapter: their log-probs are {_distance(answer.log_probs, base):.2g} from the"
            f" base's and {_distance(answer.log_probs, ours):.2g} from the adapter's. An engine that applies it is"
            f" accepted. Use --format {STOCK}, and tell us."
        )
    return change


def _distance(ours: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
