import pytest

from verl_qerl.cli import main
from verl_qerl.cli.tune import MODELS, crossings, describe


def times(*rows):
    names = ("rows", "dense_us", "packed_us", "decoded_us", "tiled_us")
    return [dict(zip(names, row, strict=False)) for row in rows]


def test_each_path_serves_the_rows_at_which_it_is_fastest():
    measured = times((1, 10, 5, 20, 4), (32, 10, 6, 20, 6), (64, 10, 7, 20, 8), (128, 11, 12, 21, 11))
    # 128 rows are faster by our kernel again, but one range is kept for each path.
    assert crossings([*measured, *times((256, 12, 11, 22), (2048, 90, 99, 98))]) == {
        "tiled_rows": 32,
        "packed_rows": 64,
        "decode_rows": 2048,
    }


def test_a_path_that_is_never_fastest_is_never_taken():
    none = {"tiled_rows": 0, "packed_rows": 0, "decode_rows": 1 << 30}
    assert crossings(times((1, 4, 5, 9, 6), (64, 4, 5, 9))) == none
    assert crossings(times((1, 5, 4, 3, 2), (64, 5, 4, 3))) == {"tiled_rows": 1, "packed_rows": 64, "decode_rows": 1}


def test_the_line_for_the_terminal_names_the_crossings():
    measured = times((1, 10, 5, 20, 4), (2048, 90, 99, 98))
    line = describe({"N": 64, "K": 32, **crossings(measured), "times": measured})
    assert "64 x 32: our kernel up to 1 rows, humming up to 1" in line
    assert "1: 10/4/5/20" in line
    assert "2048: 90/nan/99/98" in line


def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    pytest.importorskip("vllm")
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--out", str(tmp_path / "table.json")])
    assert stopped.value.code == 1
    assert "nothing to measure: there is no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shapes_are_what_the_kernel_takes():
    assert all(N % 256 == 0 and K % 128 == 0 for shapes in MODELS.values() for N, K in shapes)
