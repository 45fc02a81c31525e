import pytest

pytest.importorskip("verl")

ENTROPY = """
import torch
import verl
from verl.utils.torch_functional import entropy_from_logits
logits = (torch.randn(50, 2000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
log_p = logits.double().log_softmax(-1)
with torch.autocast("cpu", torch.bfloat16):
    found = entropy_from_logits(logits)
print(found.dtype, "off by", float((found.double() + (log_p.exp() * log_p).sum(-1)).abs().max()))
"""
STOOD_DOWN = """
import dataclasses
import verl
import verl.utils.torch_functional as module
from verl_qerl.verl_plugin import shims
assert hasattr(module.entropy_from_logits, "__wrapped__")
module.entropy_from_logits = module.entropy_from_logits.__wrapped__
shims.OF_THE_CPU[module.__name__] = dataclasses.replace(shims.ENTROPY, patched=shims.ENTROPY.fingerprint)
shims.install(module)
assert not hasattr(module.entropy_from_logits, "__wrapped__")
"""


def answer(found):
    """(dtype, error) that ENTROPY prints."""
    (line,) = (line for line in found.stdout.splitlines() if " off by " in line)
    dtype, _, error = line.partition(" off by ")
    return dtype, float(error)


def test_entropies_of_bf16_logits_are_float32(fresh_process):
    dtype, error = answer(fresh_process("-c", ENTROPY))
    assert dtype == "torch.float32"
    assert error < 1e-5


def test_other_platforms_keep_verls(fresh_process):
    dtype, error = answer(fresh_process("-c", ENTROPY, VERL_PLATFORM=""))
    assert dtype == "torch.bfloat16"
    assert error > 1e-2


def test_stands_down_where_the_patch_is_applied(fresh_process):
    fresh_process("-c", STOOD_DOWN)
