import pytest

from verl_qerl.cli import main
from verl_qerl.cli.tune import MODELS, crossings, describe


def times(*rows):
    names = ("rows", "dense_us", "tiled_us", "decoded_us")
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_a_path_begins_where_it_is_the_fastest_for_good():
    # A bf16 copy is faster at 64 rows by chance.
    measured = times((1, 10, 4, 20), (64, 9, 10, 20), (128, 12, 11, 21), (256, 20, 22, 30), (2048, 90, 110, 99))
    assert crossings(measured) == {"dense_rows": 256, "decode_rows": 2048}


def test_a_path_that_is_never_fastest_is_never_taken():
    assert crossings(times((1, 6, 5, 9), (64, 6, 5, 9))) == {"dense_rows": 1 << 30, "decode_rows": 1 << 30}
    assert crossings(times((1, 4, 5, 3), (64, 4, 5, 3))) == {"dense_rows": 1, "decode_rows": 1}


def test_the_line_for_the_terminal_names_the_crossings():
    measured = times((1, 10, 5, 20), (2048, 90, 99, 98))
    line = describe({"N": 64, "K": 32, **crossings(measured), "times": measured})
    assert "64 x 32: a bf16 copy from 2048 rows, decoding from 2048;" in line
    assert "1: 10/5/20" in line


def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    pytest.importorskip("vllm")
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--out", str(tmp_path / "table.json")])
    assert stopped.value.code == 1
    assert "nothing to measure: there is no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shapes_are_what_the_kernel_takes():
    assert all(N % 64 == 0 and K % 64 == 0 for shapes in MODELS.values() for N, K in shapes)
