"""The norm with a weight for each token on the emulated GPU, against the operators of a CPU."""

import pytest
import torch

from verl_qerl.kernels.rollout.elementwise import _launch_norm, add_rms_norm, rms_norm

IDS = torch.tensor([3, 0, 2, 2, 1, 0], dtype=torch.int32)


def given(K: int) -> list[torch.Tensor]:
    """x [4, 3, K], the residual and a table of four weights."""
    generator = torch.Generator().manual_seed(K)
    x, residual = (3 * torch.randn(4, 3, K, generator=generator).bfloat16() for _ in range(2))
    return [x, residual, 1 + 0.3 * torch.randn(4, K, generator=generator)]


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """A neighbour where float32 sums differ, else the same bits."""
    near = torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-30)
    return near and (found == expected).float().mean().item() > 0.98


@pytest.mark.parametrize("K", [8, 264, 2560])
def test_each_token_has_a_weight_of_its_own(gpu, K):
    x, residual, table = given(K)
    for of in (x, x[:, 0]):  # heads of a token share its weight
        assert is_close(_launch_norm(of, None, table, 1e-5, IDS)[0], rms_norm(of, table, 1e-5, IDS))
    found = _launch_norm(x, residual, table, 1e-5, IDS)
    expected = add_rms_norm(x, residual, table, 1e-5, IDS)
    assert is_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


CHANGES = {
    "one weight for all": ("__ldcg(ids + blockIdx.x / rows_per_token)", "__ldcg(ids)"),
    "a head's own": ("blockIdx.x / rows_per_token", "blockIdx.x % 4"),
    "weights of bf16's size": ("* chunks * (1 + WIDE);", "* chunks;"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_missed(gpu, mutate, change):
    x, _, table = given(264)
    mutate(CHANGES[change])
    assert not is_close(_launch_norm(x, None, table, 1e-5, IDS)[0], rms_norm(x, table, 1e-5, IDS))
    assert all(mutate.found.values())
