"""The order in which bench_rollout.py --plan measures: what the goals ask for first, so that any time is well spent.

A plan is resumed: what the result file has is not measured again. Arms that are compared stand beside each other.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import rollout_arms
import rollout_load

LEAST_S = 20  # of measuring; with less left after its start an engine is not worth starting
_BASELINE, _OURS = "bf16_lora_stock", "nvfp4_lora_ours"
_ALL = (1, 8, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Engines of one model and rank.

    Args:
        model: Of rollout_arms.SHAPES.
        batches: With prompts of 256 tokens.
        deep: Batches with prompts of 1,024.
        new_tokens: Of the rows of `batches` and `deep`.
        profile: Batches whose decode step is profiled.
    """

    model: str
    arms: tuple[str, ...]
    rank: int = 32
    batches: tuple[int, ...] = _ALL
    deep: tuple[int, ...] = (1, 32, 128)
    new_tokens: int = 256
    realistic: bool = True
    profile: tuple[int, ...] = ()


STAGES = (
    Stage("7B", (_OURS, _BASELINE), profile=(1, 32, 256)),
    Stage("32B", (_OURS, _BASELINE), batches=(1, 32, 64, 128, 256), deep=(32,), new_tokens=128),
    Stage("7B", ("bf16_lora_ours", "nvfp4_lora_stock")),
    Stage("14B", (_OURS, _BASELINE), batches=(1, 32, 64, 128, 256), deep=(32,), new_tokens=128, realistic=False),
    Stage("7B", ("fp8_lora_stock",), deep=(32,)),
    Stage(
        "32B",
        ("bf16_lora_ours", "nvfp4_lora_stock", "fp8_lora_stock"),
        batches=(1, 32, 128, 256),
        deep=(),
        new_tokens=128,
        realistic=False,
    ),
    Stage("7B", (_OURS, _BASELINE, "bf16_lora_ours"), rank=64, batches=(1, 32, 256), deep=(), realistic=False),
    Stage("7B", (_OURS, _BASELINE, "bf16_lora_ours"), rank=16, batches=(1, 32, 256), deep=(), realistic=False),
    Stage(
        "14B",
        ("bf16_lora_ours", "nvfp4_lora_stock", "fp8_lora_stock"),
        batches=(1, 32, 128, 256),
        deep=(),
        new_tokens=128,
        realistic=False,
    ),
    Stage("32B", (_OURS, _BASELINE), rank=64, batches=(1, 32, 128), deep=(), new_tokens=128, realistic=False),
    Stage("32B", (_OURS, _BASELINE), rank=16, batches=(1, 32, 128), deep=(), new_tokens=128, realistic=False),
    Stage("14B", (_OURS, _BASELINE), batches=(), deep=()),
)


def jobs(common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One per engine, in order; `common` is what all of them share."""
    for stage in STAGES:
        fixed = [(256, batch) for batch in stage.batches] + [(1024, batch) for batch in stage.deep]
        for arm in stage.arms:
            yield {
                **common,
                "arm": arm,
                "model": stage.model,
                "rank": stage.rank,
                "fixed": fixed,
                "new_tokens": stage.new_tokens,
                "realistic": {"prompts": 128, "samples": 8, "prompt": 256} if stage.realistic else None,
                "profile": list(stage.profile),
                "profile_prompt": 256,
                # The same CUDA graphs in every arm of a stage, and a realistic rollout as wide as the widest batch.
                "largest": 256 if stage.realistic else max(stage.batches),
            }


def remaining(job: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a job that a result file lacks, or None. What had no room there has none now.

    An arm of ours is measured again after a change of the code; the others are vLLM alone.
    """
    ours = rollout_arms.is_ours(rollout_arms.ARMS[job["arm"]].options)
    source = {"commit": data["commit"]} if ours else {}

    def is_done(batch: int, prompt: int, context: int | str) -> bool:
        key = {"arm": job["arm"], "model": job["model"], "rank": job["rank"], **source}
        key |= {"batch": batch, "prompt": prompt, "context": context}
        return any(all(entry[name] == value for name, value in key.items()) for entry in data["measured"])

    new, whole = job["new_tokens"], job["realistic"]
    fixed = [(prompt, batch) for prompt, batch in job["fixed"] if not is_done(batch, prompt, prompt + new)]
    if whole and is_done(whole["prompts"] * whole["samples"], whole["prompt"], "realistic"):
        whole = None
    profile = [batch for batch in job["profile"] if not is_done(batch, job["profile_prompt"], "profile")]
    return {**job, "fixed": fixed, "realistic": whole, "profile": profile} if fixed or whole or profile else None


def seconds(job: dict[str, Any]) -> tuple[float, float]:
    """(of its start, of its measurements), expected."""
    shape = rollout_arms.SHAPES[job["model"]]
    measuring = sum(
        rollout_load.fixed_seconds(shape, batch, prompt, job["new_tokens"], job["repeats"])
        for prompt, batch in job["fixed"]
    )
    if job["realistic"]:
        whole = job["realistic"]
        answers = whole["prompts"] * whole["samples"]
        measuring += rollout_load.realistic_seconds(shape, answers, whole["prompt"], job["largest"])
    measuring += sum(
        rollout_load.profile_seconds(shape, batch, job["profile_prompt"], rollout_load.PROFILE_TOKENS)
        for batch in job["profile"]
    )
    return rollout_load.startup_seconds(shape), measuring
