"""A critic beside an actor with an adapter, in verl's V1 trainer."""

from typing import Any

_Trainer: Any = object  # mixed into whichever trainers verl has


class CriticMixin(_Trainer):
    """Keeps the mark of the reference's pass out of the critic's."""

    def _compute_values(self, batch: Any, metrics: dict) -> Any:
        # verl 0.9.1 leaves it in the batch: the critic would be asked to go without an adapter, and has none.
        batch.extra_info.pop("no_lora_adapter", None)
        return super()._compute_values(batch, metrics)
