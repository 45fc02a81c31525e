from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def configuration(tmp_path_factory) -> Callable:
    """verl's configuration of a run with these options."""
    from qerl_testing import run_config

    questions = tmp_path_factory.mktemp("questions") / "some.jsonl"
    questions.touch()
    small = (
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "data.train_batch_size=8",
        f"data.train_files={questions}",
        f"data.val_files={questions}",
    )

    return lambda *overrides: run_config(*small, *overrides)


@pytest.fixture
def validate(configuration, quick_check, caplog) -> Callable[..., list[str]]:
    """verl's check of a run on the driver; returns what module `of` logs."""
    from verl.utils.config import validate_config

    def run(*overrides: str, of: ModuleType | None = None, use_critic: bool = False) -> list[str]:
        caplog.clear()
        config = configuration(*overrides)
        validate_config(config=config, use_reference_policy=False, use_critic=use_critic)
        return [record.message for record in caplog.records if of is not None and record.name == of.__name__]

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Of test_engine*.py: bf16 (Qwen2), tied (Llama, tied), nvfp4, quantized from bf16, and moe, with experts."""
    from qerl_testing import random_decoder, random_qwen2, random_qwen3_moe

    from verl_qerl.cli.quantize.command import quantize_checkpoint

    folder = tmp_path_factory.mktemp("models")
    random_qwen2().save_pretrained(folder / "bf16")
    random_decoder("llama", tie_word_embeddings=True).save_pretrained(folder / "tied")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cpu")
    random_qwen3_moe().save_pretrained(folder / "moe")
    return folder
