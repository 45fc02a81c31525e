"""The texts that `quantize --method gptq` asks a model with, and what it refuses before it reads any weight."""

from dataclasses import dataclass
from pathlib import Path

from verl_qerl.checkpoints.experts import is_expert
from verl_qerl.checkpoints.source import Source
from verl_qerl.checkpoints.stream import linear_modules
from verl_qerl.cli.prompts import read_prompts, tokenize
from verl_qerl.cli.quantize_arguments import SAMPLES, TOKENS
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, WeightFormat

# Whose layers transformers runs on embeddings as they are, by names that checkpoints have too.
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
COLUMNS = ("text", "prompt")


@dataclass(frozen=True)
class Calibration:
    """Texts to calibrate on.

    Attributes:
        file: Parquet or JSON lines with `text`, or with `prompt`: text or chat messages.
        samples: Rows that are read at most.
        tokens: Of a row, from its start, at most.
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
        prompts = read_prompts(self.file, self.samples, COLUMNS)
        found = [ids[: self.tokens] for ids in tokenize(source.path, prompts)]
        count = sum(map(len, found))
        widest = max(source.specs[f"{name}.weight"].shape[1] for name in linear_modules(source, ignore))
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
    if not form.takes_calibration:
        accepted = ", ".join(name for name, other in FORMATS.items() if other.takes_calibration)
        raise ValueError(f"{form.name} is not calibrated: --method gptq. {accepted} is accepted. Use --method rtn.")
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
