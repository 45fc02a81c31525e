import itertools

import pytest

pytest.importorskip("verl")

from verl_qerl.verl_plugin.trainer.rescoring import evenly


@pytest.mark.parametrize("total", [0, 1, 5, 15, 16, 17, 24, 31, 32, 33, 100])
def test_answers_are_spread_over_the_whole_batch(total):
    chosen = evenly([str(key) for key in range(total)], 16)
    assert len(chosen) == min(16, total)
    bounds = [*map(int, chosen), total]
    gaps = [after - before for before, after in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert all(total // 16 <= gap <= -(-total // 16) for gap in gaps)
