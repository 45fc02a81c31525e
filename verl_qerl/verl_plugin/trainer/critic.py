"""A critic beside an actor with an adapter, in verl's V1 trainer."""

from typing import Any

from verl_qerl.verl_plugin.trainer.feature import Feature


class CriticWithoutMark(Feature):
    """Keeps the mark of the reference's pass out of the critic's."""

    def before_values(self, batch: Any) -> None:
        """Take out what verl 0.9.1 leaves in: the critic would be asked to go without an adapter, and has none."""
        batch.extra_info.pop("no_lora_adapter", None)
