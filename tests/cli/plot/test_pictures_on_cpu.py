import numpy as np
import pytest

from verl_qerl.cli.plot.pictures import half_widths, scale_of


def test_curves_that_are_far_apart_are_on_a_logarithmic_scale():
    assert scale_of([[3e-4, 2e-4], [7e-3]]) == "log"
    assert scale_of([[0.02, 0.1], [0.4]]) == "linear"
    assert scale_of([[0.0, 0.1]]) == scale_of([[-1.0, 0.1]]) == "linear"


def test_error_bars_of_validation():
    # Newcombe (1998), table I: 81 of 263 have 0.2553 to 0.3662.
    one = {"mean": [81 / 263], "values": [[81 / 263]], "sd": [0.0]}
    assert half_widths(one, 263)[:, 0] == pytest.approx([81 / 263 - 0.2553, 0.3662 - 81 / 263], abs=5e-5)
    assert half_widths(one, None) is None
    assert half_widths(one | {"mean": [-0.5]}, 263) is None  # a reward of -1 to 1
    several = {"mean": [0.5, 0.6], "values": [[0.4, 0.6], [0.6, 0.6]], "sd": [0.14, 0.0]}
    assert np.array_equal(half_widths(several, None), [[0.14, 0.0], [0.14, 0.0]])


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_error_bars_of_none_and_all_right_are_drawn(tmp_path, mean):
    from verl_qerl.cli.plot.curves import summarize
    from verl_qerl.cli.plot.pictures import draw

    for questions in (10, 30, 40, 500, 1319, 1999):  # rounding put one end of the interval beyond the mean
        assert (half_widths({"mean": [mean], "values": [[mean]]}, questions) >= 0).all()
    key = "val-core/gsm8k/acc/mean@1"
    draw({"run": summarize({0: {key: {0: mean}}}, [key])}, [key], {}, 10, tmp_path / "run.png")


def test_a_name_in_another_encoding_is_drawn(tmp_path):
    from verl_qerl.cli.plot.curves import summarize
    from verl_qerl.cli.plot.pictures import draw

    draw({"r\udcfcn": summarize({0: {"a": {0: 1.0}}}, ["a"])}, ["a"], {}, None, tmp_path / "run.png")


def test_every_name_is_in_the_legend_as_it_is(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    from verl_qerl.cli.plot.curves import summarize
    from verl_qerl.cli.plot.pictures import draw

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    curve = summarize({0: {"actor/entropy": {1: 0.1, 2: 0.2}}}, ["actor/entropy"])
    draw({"_first": curve, "a$^$": curve}, ["actor/entropy"], {}, None, tmp_path / "run.png")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["\u200b_first (1)", r"a\$^\$ (1)"]


def test_the_times_of_steps_are_as_wide_as_those_steps(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    from verl_qerl.cli.plot.curves import summarize
    from verl_qerl.cli.plot.pictures import draw

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    seconds = {1: 5.0, 2: 6.0, 7: 5.0}  # the file lacks 3 to 6
    curve = {"run": summarize({0: {"a": seconds}}, ["a"])}
    draw(curve, ["a"], {"gen": seconds, "other": dict.fromkeys(seconds, 1.0)}, None, tmp_path / "run.png")
    for area in figures[0].axes[-1].collections:
        found = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in area.get_paths()]
        assert found == [(0.5, 2.5), (6.5, 7.5)]
    assert figures[0].axes[-1].get_ylim() == (0, 1.4 * 7)
