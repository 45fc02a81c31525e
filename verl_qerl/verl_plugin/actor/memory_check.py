"""Whether a run fits its GPUs, said by each worker before it reads a weight."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from verl.utils.fs import copy_to_local

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import left_out
from verl_qerl.formats import get_format
from verl_qerl.modules.placement.shards import sharding_group
from verl_qerl.planning.memory_plan import GIB, Settings, check, plan, table
from verl_qerl.planning.model_shape import ModelShape
from verl_qerl.verl_plugin.config.nodes import plain

logger = logging.getLogger(__name__)


def check_memory(engine: Any, run: Mapping[str, Any]) -> None:
    """Refuse a run that certainly does not fit; else rank 0 logs the plan.

    Args:
        engine: The FSDP2 engine, its configurations read and nothing built.
        run: Values of other nodes, by name (`BaseOptions.run`).
    """
    if not torch.cuda.is_available():
        return
    try:
        shape = ModelShape.from_config(engine.model_config.hf_config.to_dict())
    except ValueError as error:
        logger.warning("%s", error)
        return
    free, total = torch.cuda.mem_get_info()
    phases = plan(shape, settings_of(engine, run, shape), total)
    check(phases, total)
    if engine.rank == 0:
        others = (total - free) / GIB
        logger.warning("memory of each GPU, %.1f GiB taken by others now:\n%s", others, table(phases, total))


def settings_of(engine: Any, run: Mapping[str, Any], shape: ModelShape) -> Settings:
    """What the configurations say, and model.path of what is left in bf16; a value that a run lacks counts as nothing.

    Raises:
        CheckpointFormatError: The packed base cannot be made of model.path; see `left_out`.
    """
    model, config = engine.model_config, engine.engine_config
    adapter = _adapter(model)
    if run.get("actor.use_dynamic_bsz"):
        tokens = run.get("actor.ppo_max_token_len_per_gpu") or 0  # each of those that share sequences gets so many
    else:
        length = (run.get("data.max_prompt_length") or 0) + (run.get("data.max_response_length") or 0)
        sequences = run.get("actor.ppo_micro_batch_size_per_gpu") or 0  # of all of them together
        tokens = -(-sequences * length // config.ulysses_sequence_parallel_size)
    return Settings(
        rank=adapter.r,
        adapted_features=_adapted_features(adapter, shape),
        gpus=sharding_group(engine.device_mesh).size(),
        tokens=tokens,
        checkpointing=model.enable_gradient_checkpointing,
        whole_logits=not model.use_fused_kernels,
        shard_base=config.qerl.shard,
        share_base=config.qerl.share,
        param_offload=config.param_offload,
        optimizer_offload=config.optimizer_offload,
        offload_policy=config.offload_policy,
        utilization=run.get("rollout.gpu_memory_utilization") or 0.0,
        tensor_parallel=run.get("rollout.tensor_model_parallel_size") or 1,
        sleeps=bool(run.get("rollout.free_cache_engine", True)),
        format=config.qerl.format,
        # A packed checkpoint says itself what it left out.
        ignore=left_out(open_source(model.local_path), get_format(config.qerl.format), config.qerl.ignore),
    )


def _adapter(model: Any) -> Any:
    """PEFT's configuration of the adapter that verl will make, or read."""
    if model.lora_adapter_path is not None:
        return PeftConfig.from_pretrained(copy_to_local(model.lora_adapter_path, use_shm=model.use_shm))
    targets, left_out = plain(model.target_modules), plain(model.exclude_modules)
    return LoraConfig(r=model.lora_rank, target_modules=targets, exclude_modules=left_out)


def _adapted_features(adapter: Any, shape: ModelShape) -> int:
    """Inputs and outputs of the linears of layers that PEFT puts adapters on; others are not counted."""
    every = adapter.target_modules == "all-linear"
    adapter = replace(adapter, target_modules=".*") if every else adapter
    if not adapter.target_modules:
        return 0  # PEFT's choice for the family
    return sum(
        N + K
        for layer in range(shape.layers)
        for name, (N, K) in shape.adapted.items()
        if check_target_module_exists(adapter, f"model.layers.{layer}.{name}")
    )
