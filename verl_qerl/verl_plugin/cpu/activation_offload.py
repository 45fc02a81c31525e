"""Refuse verl's offload of activations: it copies them into pinned memory, which needs a GPU."""

from omegaconf import DictConfig, OmegaConf

_OPTION = "actor_rollout_ref.model.enable_activation_offload"


def check_offload(config: DictConfig) -> None:
    """Look at a run on the driver, before Ray starts; without the CPU platform nothing is refused.

    Args:
        config: Of the whole run.

    Raises:
        ValueError: Its actor would offload activations.
    """
    if OmegaConf.select(config, "trainer.device") == "cpu" and OmegaConf.select(config, _OPTION):
        raise ValueError(
            f"{_OPTION}=True does not go together with trainer.device=cpu: activations are in the host's memory"
            " already. Accepted is False. Leave it out."
        )
