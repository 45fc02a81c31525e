"""Sequences of a dummy batch are no longer than max_model_len, for which the block table has room."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from vllm import LLM

LONGEST = 32
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "vocab_size": 64,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip


class BatchMadeError(Exception):
    """It need not run."""


def lengths(worker: Any) -> dict[int, int]:
    """Tokens of a batch -> of its longest sequence."""
    runner, found = worker.model_runner, {}

    def stop(*_: Any, **__: Any) -> None:
        raise BatchMadeError

    runner._build_attention_metadata = stop
    for tokens in (LONGEST // 2, 2 * LONGEST):
        with contextlib.suppress(BatchMadeError):
            runner._dummy_run(tokens, force_attention=True)
        found[tokens] = int(runner.seq_lens.max())
    return found


with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=LONGEST,
        max_num_seqs=4, max_num_batched_tokens=4 * LONGEST,
    )  # fmt: skip
(found,) = engine.collective_rpc(lengths)
if found[LONGEST // 2] != LONGEST // 2:
    raise RuntimeError(f"a batch has sequences of another length than is asked about here: {found}")
assert found[2 * LONGEST] <= LONGEST, f"a sequence of {found[2 * LONGEST]} tokens, there is room for {LONGEST}"
