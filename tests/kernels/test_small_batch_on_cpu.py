"""What needs no GPU: the choice of adapters and of the launch, and that the source compiles where nvcc is."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from verl_qerl.kernels import small_batch
from verl_qerl.kernels.lora import member_of_tile


@pytest.mark.parametrize(
    ("slices", "rank", "expected"),
    [((128, 64), 32, True), ((128, 128), 8, True), ((96, 32), 32, False), ((128, 64), 24, False)],
    ids=str,
)
def test_the_epilogue_takes_known_ranks_and_members_of_whole_tiles(slices, rank, expected):
    b = torch.zeros(sum(slices), rank)
    assert small_batch.can_fuse(b, member_of_tile(slices, "cpu")) is expected


@pytest.mark.parametrize("shape", [(512, 3584), (4608, 3584), (37888, 3584), (3584, 18944)], ids=str)
def test_a_guess_is_one_of_the_launches(shape):
    assert small_batch.guess_launch(*shape) in small_batch.LAUNCHES


def test_more_rows_are_refused():
    with pytest.raises(ValueError, match=r"too many rows: 17\. Up to 16"):
        small_batch.small_batch_matmul(torch.zeros(17, 16), torch.zeros(1, 128), torch.zeros(1, 64), torch.ones(1))


@pytest.mark.parametrize("rank", [0, 8, 128])
@pytest.mark.parametrize("tokens", [8, 16])
def test_the_source_compiles_without_spilling(tokens, rank, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = Path(small_batch.__file__).with_suffix(".cu")
    defines = {"SPLIT": 4, "WARPS": 8, "TOKENS": tokens, "AHEAD": 4, "RANK": rank, "N": 4608, "K": 3584}
    command = [nvcc, "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", "-o", str(tmp_path / "out")]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
