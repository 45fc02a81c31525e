"""Started by test_packed_on_cpu.py, on one rank or two: engines whose passes have no padding, and some that have.

python packed_cases.py <folder of models> <folder for findings> <case> ...
"""

import sequence_parallel_cases as cases
from engine_cases import main
from sequence_parallel_cases import WHOLE, update
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel

from verl_qerl.modules import varlen_attention

# Of 2, 45, 14 and 36 tokens; by tokens they make three micro-batches, of which one has two sequences.
cases.PROMPTS, cases.ANSWERS = (1, 5, 2, 30), (1, 40, 12, 6)
BY_TOKENS = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 48}
SETTINGS = {
    "logits": {},
    "head": {"head": True},
    "kept": {"enable_gradient_checkpointing": False, "fused": False},
    "sharded": {"head": True, "model": "tied", "qerl": {"shard": True, "train_norms": True}},
    "whole": WHOLE,
    "float32": {"dtype": "fp32", "settings": {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}}},
}


def packed(**options):
    """With the attention of this package."""
    return update(1, attention=varlen_attention.NAME, **options)


def padded(**options):
    """With torch's, over a mask."""
    return update(1, padded=True, attention="sdpa", **options)


def broken():
    """The first border of the packed sequences is lost."""
    original = varlen_attention._packed

    def lose_one(bounds, device):
        return original([bounds[0], *bounds[2:]] if len(bounds) > 2 else bounds, device)

    varlen_attention._packed = lose_one
    try:
        return packed()
    finally:
        varlen_attention._packed = original


def refused():
    """A model whose attention cannot be exchanged, with a packed base and without."""
    kind, found = Qwen2PreTrainedModel, []
    before, kind._supports_attention_backend = kind._supports_attention_backend, False
    for options in ({}, WHOLE):
        try:
            cases.engine_of(1, attention=varlen_attention.NAME, **options)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    kind._supports_attention_backend = before
    return found


RUNS = {
    **{f"{name} padded": lambda options=options: padded(**options) for name, options in SETTINGS.items()},
    **{name: lambda options=options: packed(**options) for name, options in SETTINGS.items()},
    "by tokens": lambda: packed(batching=BY_TOKENS),
    "over padding": lambda: update(1, padded=True, attention=varlen_attention.NAME),
    "broken": broken,
    "refused": refused,
}

if __name__ == "__main__":
    main(RUNS)
