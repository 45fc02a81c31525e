"""The kernel of rotation and norms of heads on the emulated GPU, against the operators of a CPU."""

from pathlib import Path

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout.rotation import _launch, rotate

cases = load_beside(str(Path(__file__).parents[1] / "kernels" / "rollout" / "unwritten.py"), "rotation_cases")

# Heads' columns, heads of q and of k: with norms whole warps, since here all lanes of one add up together.
SHAPES = [(128, 3, 1), (128, 6, 2), (64, 6, 2), (64, 12, 4), (16, 30, 2), (512, 2, 1)]


@pytest.mark.parametrize("shape", [*SHAPES, (128, 7, 1), (64, 5, 1)], ids=str)
def test_the_rotation(gpu, shape):
    q, k, *places = (*cases.heads(3, *shape), shape[0])
    found = _launch(q, k, None, 0.0, *places)
    assert all(torch.equal(*pair) for pair in zip(found, rotate(q, k, *places), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_heads(gpu, shape, dtype):
    q, k, *places = (*cases.heads(3, *shape), shape[0])
    weights = cases.head_norms(shape[0], dtype)
    pairs = zip(_launch(q, k, weights, 1e-5, *places), rotate(q, k, *places, *weights, 1e-5), strict=True)
    for found, expected in pairs:
        assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=2**-6)
        # A neighbour where float32 sums differ, else the same bits.
        assert (found == expected).float().mean() > 0.99


CHANGES = {
    "another head's weight": ("is_q ? of_q[part][i] : of_k[part][i]", "of_q[part][i]"),
    "a half is left out": ("squares += x1[i] * x1[i] + x2[i] * x2[i];", "squares += x1[i] * x1[i];"),
    "the mean is of one half": ("squares / (16 * half)", "squares / (8 * half)"),
    "rotated before": ("    normalize_head(first, second, weight, half, epsilon);\n", ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_missed(gpu, mutate, change):
    mutate(CHANGES[change])
    q, k, *places = (*cases.heads(3, 128, 3, 1), 128)
    weights = cases.head_norms(128, torch.float32)
    pairs = zip(_launch(q, k, weights, 1e-5, *places), rotate(q, k, *places, *weights, 1e-5), strict=True)
    assert any((found == expected).float().mean() < 0.9 for found, expected in pairs)
    assert all(mutate.found.values())
