"""Every launch of the table that this GPU has, and of every entry: the product with an adapter, against float64."""

import math
from pathlib import Path

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout.w4a16_launch import TOKENS
from verl_qerl.kernels.rollout.w4a16_matmul import w4a16_matmul

pytest.importorskip("vllm")
from verl_qerl.vllm_plugin.weights import plans

pytestmark = pytest.mark.gpu

SHIPPED = sorted((row["N"], row["K"]) for row in (plans.read_table(plans.shipped_path("NVIDIA H200")) or {})["rows"])
# Each entry of TOKENS, full and not, and as many rows as take one several times.
ROWS = (1, *TOKENS, 70, 140, 272, 288, 380, 600)


@pytest.fixture(scope="module")
def kernel():
    """What the tests of the kernel build and assert."""
    return load_beside(str(Path(__file__).parents[2] / "kernels" / "rollout" / "unwritten.py"), "test_w4a16_matmul")


@pytest.mark.parametrize("weight", SHIPPED, ids=str)
def test_launches_that_ship_give_the_product(weight, kernel):
    N, K = weight
    assert_product((N,), K, kernel)


# gate_up of 1.5B over four GPUs; qkv of SmolLM2-135M.
@pytest.mark.parametrize(("members", "K"), [((2240, 2240), 1536), ((576, 192, 192), 576)], ids=str)
def test_launches_for_members_in_tiles_of_64_give_the_product(members, K, kernel):
    assert_product(members, K, kernel)


def assert_product(members, K, kernel):
    """Of all numbers of rows, an adapter with it."""
    N = sum(members)
    plan = plans.PLANS[plans.make_plan(N, K, torch.cuda.get_device_name(), math.gcd(128, *members))]
    tensors, dense = kernel.build(K, members)
    for rows in ROWS:
        x, launch = torch.randn(rows, K, device="cuda").bfloat16(), plan.launch(rows)
        adapter = kernel.build_adapter(K, members, 32, rows)
        kernel.poison(rows, N)
        out = w4a16_matmul(x, *tensors, None, adapter, launch)
        kernel.assert_adapted(out, x, x.double() @ dense.T, adapter, members, kernel.own_parts(launch))
        assert torch.equal(out, w4a16_matmul(x, *tensors, None, adapter, launch))
    kernel.assert_flags_are_left_at_zero()
