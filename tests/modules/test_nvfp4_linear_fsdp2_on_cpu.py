"""Two gloo ranks hold half of every packed tensor each, and compute what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
SCRIPT = Path(__file__).with_name("fsdp2_two_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found: sharded and whole."""
    out = tmp_path_factory.mktemp("fsdp2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, str(SCRIPT), str(out)], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_the_loss_is_that_of_the_whole_model(ranks):
    assert [found["sharded"]["loss"] for found in ranks] == [found["loss"] for found in ranks]
    assert ranks[0]["loss"] != ranks[1]["loss"]


def test_lora_gradients_are_those_of_the_whole_model(ranks):
    for found in ranks:
        grads = found["sharded"]["grads"]
        assert len(grads) == 28
        assert grads.keys() == found["grads"].keys()
        assert all(torch.equal(grad, found["grads"][name]) for name, grad in grads.items())
        assert all(grad.abs().sum() > 0 for grad in grads.values())


def test_packed_tensors_are_sharded_and_gathered_bit_for_bit(ranks):
    for found in ranks:
        local, total = found["sharded"]["local"], found["sharded"]["total"]
        assert len(total) == 3 * 14
        assert all(2 * local[name] == total[name] for name in total)
        assert found["sharded"]["digests"] == found["digests"]
