"""What needs no GPU: the choice of adapters and launches, shared memory, and that the sources compile where nvcc is."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import verl_qerl
from verl_qerl.cli.tune import MODELS, TRIED
from verl_qerl.kernels import medium_batch
from verl_qerl.kernels.launch import read_source
from verl_qerl.kernels.lora import member_of_tile
from verl_qerl.kernels.medium_batch import RANKS, SHAPES, TOKENS, Launch

TUNED = Path(verl_qerl.__file__).parent / "vllm_plugin" / "tuned"
WEIGHTS = sorted({shape for shapes in MODELS.values() for shape in shapes})
BLOCK_BYTES = (227 << 10) - 1024  # of shared memory that a thread block of Hopper can have, less its own 1 KiB


@pytest.mark.parametrize(
    ("slices", "rank", "pieces", "expected"),
    [
        ((128, 64), 32, 1, True),
        ((128, 64), 32, 2, False),
        ((128, 128), 8, 2, True),
        ((96, 32), 32, 1, False),
        ((128, 64), 24, 1, False),
    ],
    ids=str,
)
def test_takes_known_ranks_and_members_of_whole_warpgroups(slices, rank, pieces, expected):
    b = torch.zeros(sum(slices), rank)
    launch = Launch(pieces, 2, 1, 1)
    assert medium_batch.can_fuse(b, member_of_tile(slices, "cpu"), launch) is expected


@pytest.mark.parametrize(("rows", "expected"), [(1, 8), (8, 8), (9, 16), (17, 32), (65, 96), (128, 128)])
def test_rows_are_padded_to_what_is_compiled(rows, expected):
    assert medium_batch.padded_rows(rows) == expected


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("weight", [*WEIGHTS, (256, 128), (64, 64)], ids=str)
def test_a_guess_can_run_and_is_the_first_candidate(weight, tokens):
    N, K = weight
    found = medium_batch.launch_candidates(N, K, tokens)
    assert medium_batch.guess_launch(N, K, tokens) == found[0]
    assert len(set(found)) == len(found)
    for launch in found:
        assert (launch.pieces, launch.groups, launch.blocks) in SHAPES[tokens]
        assert 1 <= launch.split <= min(8, K // 64)  # a cluster, each block of which has a part of K


@pytest.mark.parametrize("weight", MODELS["qwen2.5-7b"], ids=str)
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_the_model_of_the_time_tries_what_was_measured_to_be_fastest(weight, tokens):
    table = json.loads((TUNED / "nvidia_h200.json").read_text())
    row = next(row for row in table["rows"] if (row["N"], row["K"]) == weight)
    fastest = Launch(*row["medium_launches"][str(tokens)])
    assert fastest in medium_batch.launch_candidates(*weight, tokens)[:TRIED]


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_ring_fits_with_the_widest_adapter(tokens):
    for pieces, groups, blocks in SHAPES[tokens]:
        for low_width in (0, *(3 * max(rank, 16) for rank in RANKS)):
            launch = Launch(pieces, groups, 1, blocks)
            stages, shared_bytes = medium_batch.ring(tokens, 18944, low_width, launch)
            assert stages >= 3  # the one that is read, the one before, whose products run, and one to fill
            assert shared_bytes <= BLOCK_BYTES
            if low_width == 0:
                assert shared_bytes <= (BLOCK_BYTES + 1024) // blocks - 1024


def test_more_rows_are_refused():
    with pytest.raises(ValueError, match=r"too many rows: 129\. Up to 128"):
        medium_batch.medium_batch_matmul(torch.zeros(129, 64), torch.zeros(4, 128), torch.zeros(4, 64), torch.ones(1))


def compile_cuda(source: str, folder) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    path = folder / "kernel.cu"
    path.write_text(source)
    command = [nvcc, "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", "-o", str(folder / "out")]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_source_compiles_without_spilling_or_waiting_for_each_product(tokens, tmp_path):
    shape = max(SHAPES[tokens], key=lambda shape: shape[0] * shape[1])
    said = compile_cuda(medium_batch.source(tokens, *shape), tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


def test_shrink_compiles_without_spilling(tmp_path):
    said = compile_cuda(read_source("decode.cuh", "shrink.cu", COLUMN_TILES=2), tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
