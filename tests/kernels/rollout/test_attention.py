"""Decode attention on a GPU, against float64."""

import pytest
import torch
from qerl_testing import load_beside

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
cases = load_beside(__file__, "attention_cases")

SHAPES = [(28, 4, 128), (40, 8, 128), (14, 2, 64), (7, 1, 128), (32, 32, 64)]
LENGTHS = {
    "one": [1],
    "with gaps": [33, 0, 5, 16, 1],
    "long tail": [2000, 1, 320, 17],
    "all": list(range(1, 260, 3)),
    "equal": [320] * 256,
    "more than a CUDA graph of vLLM's holds": [1 + 7 * i % 300 for i in range(1024)],
}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_tokens_attend_to_what_came_before(lengths, shape, page):
    cases.check(cases.build(LENGTHS[lengths], *shape, page, "cuda"))


def test_the_bits_are_the_same_each_time():
    case = cases.build(LENGTHS["long tail"] * 20, 40, 8, 128, 16, "cuda")
    first = cases.run(case)
    assert all(torch.equal(cases.run(case), first) for _ in range(20))


def test_a_graph_serves_other_lengths():
    """What a graph was captured with is what vLLM has then: nothing in the cache, and all sequences longest."""
    case = cases.build([320, 700, 1], 28, 4, 128, 16, "cuda")
    expected = cases.run(case)
    held = {name: case[name].clone() for name in ("lengths", "table", "slots")}
    case["lengths"].fill_(case["table"].shape[1] * 16), case["table"].zero_(), case["slots"].fill_(-1)
    graph = torch.cuda.CUDAGraph()
    cases.run(case)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = cases.run(case)
    for name, tensor in held.items():
        case[name].copy_(tensor)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
