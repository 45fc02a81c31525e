"""Real checkpoints of verl's FSDP2 engine, for what reads them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from qerl_testing import random_decoder, random_qwen3_moe

from verl_qerl.checkpoints.record import file_mark, read_record

SCRIPT = Path(__file__).with_name("train_checkpoint.py")
CASES = (
    "ours-bf16-full",
    "stock-bf16-full",
    "ours-nvfp4-lora",
    "ours-tied-full",
    "uaq-bf16-all",
    "uaq-tied-all",
    "ours-moe-lora",
    "norms-nvfp4-lora",
    "norms-bf16-full",
    "int8-bf16-lora",
    "int8-int8-full",
)


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        run: Folder with global_step_4/actor.
        base: The model that it started from.
        found: What the engine held and computed at the end; see train_checkpoint.py.
    """

    run: Path
    base: Path
    found: dict

    @property
    def actor(self) -> Path:
        return self.run / "global_step_4" / "actor"

    def edited(self, folder: Path, edit: Callable[[dict], object]) -> Path:
        """A copy of the shards' folder, each of its models edited, as a run would have saved it."""
        shutil.copytree(self.actor, folder)
        record = read_record(folder)
        marks = dict(record.files)
        for file in folder.glob("model_world_size_*.pt"):
            shard = torch.load(file, weights_only=True)
            edit(shard)
            torch.save(shard, file)
            marks[file.name] = file_mark(file)
        replace(record, files=marks).write(folder)
        return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Folder with models of two layers and a tokenizer: bf16 (Qwen2), tied (Llama), nvfp4 and int8 (of bf16), moe."""
    from chat_tokenizer import train_tokenizer

    from verl_qerl.cli.quantize.command import quantize_checkpoint

    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(["What is 2 + 3? The answer is #### 5", "Ann has 4 apples and buys 3 more."], 320)
    for name, family, tied in (("bf16", "qwen2", False), ("tied", "llama", True)):
        sizes = {"vocab_size": 320, "max_position_embeddings": 512, "tie_word_embeddings": tied}
        model = random_decoder(family, gain=3, **sizes)
        model.save_pretrained(folder / name, max_shard_size="200KB")
        tokenizer.save_pretrained(str(folder / name))
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", scale="minmax", device="cpu")
    quantize_checkpoint(folder / "bf16", folder / "int8", form="int8", device="cpu")
    random_qwen3_moe(vocab_size=320, max_position_embeddings=512).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(str(folder / "moe"))
    return folder


@pytest.fixture(scope="session")
def trained(models, fresh_process, tmp_path_factory) -> Callable[[str], Trained]:
    """Case of train_checkpoint.py -> its checkpoint, sharded over two ranks (tests/e2e exports a single rank's)."""
    pytest.importorskip("verl")
    out = tmp_path_factory.mktemp("checkpoints")
    # Without a GPU: the tests that need one compare with the same checkpoints.
    fresh_process(str(SCRIPT), str(models), str(out), *CASES, ranks=2, CUDA_VISIBLE_DEVICES="")

    def get(case: str) -> Trained:
        found = torch.load(out / f"{case}.pt")
        return Trained(out / case, models / case.split("-")[1], found)

    return get


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """Runs the program, which must end with an error and this exit code; what it has said on stderr by then."""
    from verl_qerl.cli import main

    def run(*arguments: str | Path, code: int = 1) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        assert ended.value.code == code
        return capsys.readouterr().err

    return run
