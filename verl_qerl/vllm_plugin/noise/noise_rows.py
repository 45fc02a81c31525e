"""Which draw of the noise a token gets where `aqn.draw` is `sequence` or `token`: a row of each norm's table.

Row 0 is the clean weight, and tokens of a prompt have it: groups share their prompt's keys and values, and the prefix
cache holds prompts alone (`scheduler.py`). So the first token of an answer is drawn from the clean model, and each
further one from the model of its sequence. A token keeps its row when vLLM computes it again after a preemption, since
the row depends on the request and the position alone. Every rank gets the same scheduler's output, so the same rows.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.utils import CpuGpuBuffer

from verl_qerl import upstream
from verl_qerl.algos.aqn import FORCED_DRAW, FORCED_FROM, NUM_DRAWS, AQNConfig
from verl_qerl.kernels.rollout.elementwise import prepare_rows
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.noise.row_norms import give_table
from verl_qerl.vllm_plugin.options import SCHEDULER, V2_CHOICE, is_v2


def check_draws(vllm_config: Any, config: AQNConfig) -> None:
    """Refuse, before it loads, an engine whose batches rule out draws for each sequence or token."""
    if not config.enabled or config.draw == "batch":
        return
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    asked = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "microbatches (enable_dbo, ubatch_size)": parallel.use_ubatching,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        # They keep those of answers, for whoever has the same tokens in its prompt.
        "a store of keys and values (kv_transfer_config, kv_offloading_size)": vllm_config.kv_transfer_config
        is not None,
        # Its norms get [1, T, K]: all tokens of a step would have the row of the first.
        "vLLM's Transformers backend (model_impl=transformers, or SmolLM3)": (
            vllm_config.model_config.using_transformers_backend()
        ),
    }
    found = [name for name, holds in asked.items() if holds]
    if found:
        raise ValueError(
            f"aqn.draw={config.draw} does not go together with {', '.join(found)}. Accepted is an engine without."
            " Leave that out or set `+aqn.draw=batch`."
        )
    if cache.enable_prefix_caching and vllm_config.scheduler_config.scheduler_cls != SCHEDULER:
        raise ValueError(
            f"aqn.draw={config.draw} with vLLM's scheduler_cls={vllm_config.scheduler_config.scheduler_cls!r}: its"
            " prefix cache would give a sequence keys and values of another one's draw. Accepted is"
            f" {SCHEDULER!r}, or no prefix cache. Set scheduler_cls to it, or enable_prefix_caching=False."
        )


class NoiseRows:
    """The rows of the tokens of each step, in a buffer that the norms read.

    Args:
        runner: vLLM's model runner, before it loads or after.
        draw: `sequence` or `token`.

    Attributes:
        ids: [tokens of the largest step] int32 on the device.

    Raises:
        ValueError: The model runner is vLLM's V2, which keeps its batch elsewhere.
    """

    def __init__(self, runner: Any, draw: str) -> None:
        if is_v2(runner):
            raise ValueError(
                f"aqn.draw={draw} does not go together with vLLM's V2 model runner. Accepted is the V1 model runner."
                f" Set {V2_CHOICE}=0 or `+aqn.draw=batch`."
            )
        self._runner, self._of_tokens = runner, draw == "token"
        self._buffer = CpuGpuBuffer(runner.max_num_tokens, dtype=torch.int32, device=runner.device)
        self.ids = self._buffer.gpu
        self._filled = 0
        self._requests: dict[str, tuple[int, int, int]] = {}  # row, hash of the name, first place of a row asked for
        self._names: list[str] = []
        self._of_batch: tuple[np.ndarray, ...] = ()

    def give_tables(self, norms: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Call `give_table` for norms, by these rows; returns name -> [NUM_DRAWS, K], the rows with noise."""
        tables = {name: give_table(name, norm, self.ids) for name, norm in norms.items()}
        if self.ids.is_cuda:  # now, not while a graph is captured
            prepare_rows({table.shape[1] for table in tables.values()}, self.ids.device)
        return tables

    def watch(self) -> None:
        """Fill the buffer before each step of the runner."""
        prepare = self._runner._prepare_inputs

        def fill_then_prepare(scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
            # Inside of the runner's wait for its last copies to the device, so that pinned memory is free again.
            self.fill(num_scheduled_tokens)
            return prepare(scheduler_output, num_scheduled_tokens)

        upstream.set_method(hosts.PREPARE_INPUTS, self._runner, fill_then_prepare)

    def fill(self, num_scheduled: np.ndarray) -> None:
        """Set the rows of a step's tokens, 0 for those that pad a batch for a CUDA graph; raises as `row_asked_for`.

        Args:
            num_scheduled: [requests] tokens of each request of the runner's batch.
        """
        batch = self._runner.input_batch
        names = batch.req_ids
        if names != self._names:
            self._admit(names)
        rows, hashes, places = self._of_batch
        computed = batch.num_computed_tokens_cpu[: len(names)]
        forced = places >= 0
        begins = np.where(forced, places, batch.num_prompt_tokens[: len(names)])
        total = int(num_scheduled.sum())
        if total == len(names):  # one token each
            positions = computed
        else:
            starts = np.cumsum(num_scheduled) - num_scheduled
            positions = np.arange(total) + np.repeat(computed - starts, num_scheduled)
            rows, hashes, forced, begins = (
                np.repeat(values, num_scheduled) for values in (rows, hashes, forced, begins)
            )
        if self._of_tokens:
            rows = np.where(forced, rows, 1 + _mixed(hashes, positions) % NUM_DRAWS)
        filled = self._buffer.np
        filled[:total] = np.where(positions >= begins, rows, 0)
        filled[total : self._filled] = 0
        self._buffer.copy_to_gpu(max(total, self._filled))
        self._filled = total

    def _admit(self, names: list[str]) -> None:
        """Take another batch; requests that have come get the row that the fewest others have."""
        live = self._runner.requests
        if any(name not in self._requests for name in names):
            self._requests = {name: one for name, one in self._requests.items() if name in live}
        held = np.array([row for row, _, place in self._requests.values() if place < 0], np.int64)
        taken = np.bincount(held, minlength=1 + NUM_DRAWS)[1:]
        for name in names:
            if name in self._requests:
                continue
            params = live[name].sampling_params
            number, row = zlib.crc32(name.encode()), row_asked_for(params)
            if row is None:
                free = np.flatnonzero(taken == taken.min())
                self._requests[name] = (1 + int(free[number % len(free)]), number, -1)
                taken[self._requests[name][0] - 1] += 1
            else:
                self._requests[name] = (row, number, params.extra_args.get(FORCED_FROM, 0))
        self._names = list(names)
        columns = zip(*(self._requests[name] for name in names), strict=True)
        kinds = (np.int32, np.uint32, np.int32)
        self._of_batch = tuple(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))


def row_asked_for(params: Any) -> int | None:
    """The row that a request has for all of its tokens, if it asks for one; a ValueError if there is no such row."""
    row = (getattr(params, "extra_args", None) or {}).get(FORCED_DRAW)
    if row is not None and (type(row) is not int or not 0 <= row <= NUM_DRAWS):
        raise ValueError(
            f"extra_args[{FORCED_DRAW!r}]={row!r} is no row of the noise. Accepted are 0, the clean weights, to"
            f" {NUM_DRAWS}. Set one of them or leave it out."
        )
    return row


def _mixed(hashes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers of 32 bits that look random, of a request and a position: MurmurHash3's last steps."""
    x = hashes ^ positions.astype(np.uint32) * np.uint32(0x9E3779B1)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)
