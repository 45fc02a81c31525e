"""The attention kernel on the emulated GPU: sequences of all lengths, heads of both sizes, in any order of threads."""

from pathlib import Path

import pytest
import torch
from qerl_testing import load_beside

cases = load_beside(str(Path(__file__).parents[1] / "kernels" / "rollout" / "unwritten.py"), "attention_cases")

SHAPES = {
    "7B": (7, 1, 128),
    "32B": (10, 2, 128),
    "0.5B": (14, 2, 64),
    "Qwen3-8B": (8, 2, 128),
    "Qwen3-32B": (16, 2, 128),
    "1": (3, 3, 64),
}


@pytest.mark.parametrize("lengths", [[1], [16], [17], [100], [33, 0, 5, 16, 1], [700, 3, 40], [0, 0, 90, 0], [0]])
def test_tokens_attend_to_what_came_before(gpu, lengths):
    cases.check(cases.build(lengths, *SHAPES["32B"], 16, "cpu"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page", [16, 64])
def test_heads_of_every_shape(gpu, shape, page):
    cases.check(cases.build([150, 20, 64], *SHAPES[shape], page, "cpu"))


def test_bits_do_not_depend_on_the_order_of_threads(gpu):
    first = cases.run(cases.build([300, 70, 18], *SHAPES["32B"], 16, "cpu"))
    for _ in range(3):
        assert torch.equal(cases.run(cases.build([300, 70, 18], *SHAPES["32B"], 16, "cpu")), first)


def test_a_token_without_a_place_is_attended_to_and_not_kept(gpu):
    case = cases.build([40], *SHAPES["32B"], 16, "cpu")
    kept = cases.run(case)
    case["slots"].fill_(-1)
    case["cache"][:] = cases.build([40], *SHAPES["32B"], 16, "cpu")["cache"]
    before = case["cache"].clone()
    assert torch.equal(cases.run(case), kept)
    assert torch.equal(case["cache"].view(torch.int16), before.view(torch.int16))


ATTEND = "      attend(sums, query, held, valid, scale, lane);\n"
CHANGES = {
    "a chunk is read before it is there": [("      wait_for(full + stage * 8, parity);\n", "")],
    "a chunk is filled again while it is read": [(ATTEND, "      if (lane == 0) fill_next(stage);\n" + ATTEND)],
    "rows after the new token hold anything": [("i = (row + 1) * VECTORS + lane;", "i = CHUNK * VECTORS;")],
    "sums are laid over others that are still read": [
        ("    __syncthreads();  // what was laid down before has been read\n", "")
    ],
    "sums are read before all are laid down": [("lane);\n    __syncthreads();\n    give", "lane);\n    give")],
    "the first block adds up": [
        ("atomicInc(counters + from, to - from) == to - from", "atomicInc(counters + from, to - from) == 0")
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_taken_out_is_missed(gpu, mutate, change):
    mutate(*CHANGES[change])

    def is_right() -> bool:
        try:
            cases.check(cases.build([300, 70, 18, 40], *SHAPES["32B"], 16, "cpu"))
        except (RuntimeError, AssertionError):
            return False
        return True

    assert not all(is_right() for _ in range(8))
    assert all(mutate.found.values())
