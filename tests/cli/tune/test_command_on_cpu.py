import argparse
import json
from pathlib import Path

import pytest
import torch

from verl_qerl.cli.tune import command as tune
from verl_qerl.cli.tune.command import _adapter, crossing, describe, fusing, paths
from verl_qerl.cli.tune.shapes import MODELS
from verl_qerl.kernels.rollout.w4a16_launch import EACH, GATHERED, INTERMEDIATE_ROWS, TOKENS, guess_launch


def times(*rows):
    names = ("rows", "tiled_us", "decoded_us")
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_a_path_begins_where_it_is_the_fastest_for_good():
    # Decoding is faster at 64 rows by chance.
    assert crossing(times((1, 4, 20), (64, 10, 9), (128, 11, 21), (256, 22, 20), (2048, 110, 99))) == 256


def test_a_path_that_is_never_fastest_is_never_taken():
    assert crossing(times((1, 5, 9), (64, 5, 9))) == 1 << 30
    assert crossing(times((1, 5, 3), (64, 5, 3))) == 1


def test_the_line_for_the_terminal_names_the_crossing():
    measured = times((1, 5, 20), (2048, 99, 98))
    line = describe({"N": 64, "K": 32, "decode_rows": crossing(measured), "times": measured})
    assert "64 x 32: decoding from 2048 rows;" in line
    assert "1: 5/20" in line


def test_paths_are_those_that_a_rollout_takes(monkeypatch):
    pytest.importorskip("vllm")
    from verl_qerl.vllm_plugin.weights import linear_ops

    launched = []

    def record(name, result):
        return lambda *args, **kwargs: launched.append(name) or result

    y, weight = torch.zeros(5, 128).bfloat16(), torch.zeros(128, 64 + 32).bfloat16()
    monkeypatch.setattr(linear_ops, "w4a16_matmul", record("tiled", y))
    monkeypatch.setattr(linear_ops, "decode", record("decode", weight))
    monkeypatch.setattr(linear_ops.F, "linear", record("product", y))
    packed = [(torch.zeros(4, 256, dtype=torch.int32), torch.zeros(4, 128, dtype=torch.uint8), torch.ones(1))] * 3
    launches = tuple(guess_launch(128, 64, tokens) for tokens in TOKENS)
    calls = paths(torch.zeros(5, 64).bfloat16(), packed, launches)
    found = {}
    for name, each in calls.items():
        launched.clear()
        assert all(call() is y for call in each)
        found[name] = launched.copy()
    assert found == {
        "tiled_us": ["tiled"] * 3,
        "decoded_us": ["decode", "product"] * 3,
    }


@pytest.mark.parametrize("N", sorted({N for shapes in MODELS.values() for N, _ in shapes}))
def test_the_adapter_s_tiles_are_those_of_a_rollout(N):
    adapter = _adapter(torch.zeros(2, 64), N)
    assert adapter.members.tolist() == [0] * (N // 128)  # its kernels take tiles of a power of two
    assert adapter.b.shape == (N, 32)


@pytest.mark.parametrize("tokens", TOKENS)
def test_only_launches_that_add_an_adapter_are_compared(tokens):
    found = fusing(37888 + 64, 3584, tokens)
    assert {launch.warp_tiles for launch in found} == {1}  # 2 take more than one tile of an adapter


def test_without_a_gpu_nothing_is_written(tmp_path, refused):
    pytest.importorskip("vllm")
    assert "nothing to measure: there is no GPU" in refused("tune", "--out", tmp_path / "table.json")
    assert not list(tmp_path.iterdir())


def test_shapes_are_what_the_kernel_takes():
    assert all(N % 64 == 0 and K % 64 == 0 for shapes in MODELS.values() for N, K in shapes)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What `run` takes, on a GPU that measures at once."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(tune, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    fields = {"launches": {}, "decode_rows": 2}
    monkeypatch.setattr(tune, "measure", lambda N, K: {"N": N, "K": K, **fields})
    monkeypatch.setattr(tune, "describe", str)
    return argparse.Namespace(models=["qwen2.5-7b"], tensor_parallel=1, out=tmp_path / "table.json")


def shapes_in(path: Path) -> set[tuple[int, int]]:
    rows = [(row["N"], row["K"]) for row in json.loads(path.read_text())["rows"]]
    assert len(set(rows)) == len(rows)
    return set(rows)


def test_a_table_keeps_what_it_has_of_other_linears(asked):
    tune.run(asked)
    assert shapes_in(asked.out) == set(MODELS["qwen2.5-7b"])
    asked.models = ["qwen2.5-14b"]
    tune.run(asked)
    tune.run(asked)
    assert shapes_in(asked.out) == {*MODELS["qwen2.5-7b"], *MODELS["qwen2.5-14b"]}


def test_what_was_measured_before_an_interruption_stays(asked, monkeypatch):
    measure, first = tune.measure, sorted(MODELS["qwen2.5-7b"])[0]

    def once(N: int, K: int) -> dict:
        if first != (N, K):
            raise KeyboardInterrupt
        return measure(N, K)

    monkeypatch.setattr(tune, "measure", once)
    with pytest.raises(KeyboardInterrupt):
        tune.run(asked)
    assert shapes_in(asked.out) == {first}


def test_a_table_of_another_gpu_is_not_overwritten(asked, monkeypatch):
    tune.run(asked)
    before = asked.out.read_bytes()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    with pytest.raises(ValueError, match=r"has what was measured on a GPU\. A table of this GPU, another.* --out"):
        tune.run(asked)
    assert asked.out.read_bytes() == before


@pytest.mark.parametrize("content", ['{"learning_rate": 1e-6}', '{"rows": [{"N": 1}]}', '{"gpu": "a G', "no JSON", ""])
def test_a_file_that_is_no_table_is_not_overwritten(asked, content):
    asked.out.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json is no table of this command\. .* Give another --out\.$"):
        tune.run(asked)
    assert asked.out.read_text() == content


def test_a_table_that_a_rollout_cannot_read_is_measured_again_where_it_looks_for_it(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked.out = None
    path = tmp_path / "verl_qerl" / "a_gpu.json"
    path.parent.mkdir()
    path.write_text('{"rows": [')
    tune.run(asked)
    assert shapes_in(path) == set(MODELS["qwen2.5-7b"])


def test_a_table_is_whole_or_as_it_was(asked, monkeypatch):
    tune.run(asked)
    before = asked.out.read_text()
    write = Path.write_text

    def cut(path: Path, text: str, **options: str) -> None:
        write(path, text[:9], **options)
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="full"):
        tune.run(asked)
    monkeypatch.setattr(Path, "write_text", write)
    assert asked.out.read_text() == before
    tune.run(asked)
    assert len(json.loads(asked.out.read_text())["rows"]) == 4
    assert list(asked.out.parent.iterdir()) == [asked.out]


def test_both_ways_to_make_the_adapter_s_part_are_timed(monkeypatch):
    prepared = []
    monkeypatch.setattr(tune, "tiled_copies", lambda N, K: [])
    monkeypatch.setattr(tune, "prepare", prepared.extend)
    monkeypatch.setattr(tune, "ROWS", ())
    for fastest in (EACH, GATHERED):
        prepared.clear()
        monkeypatch.setattr(
            tune, "time_with_adapter", lambda tokens, packed, launch, way=fastest: launch.intermediate != way
        )
        launches = tune.measure(4608, 3584)["launches"]
        wanted = {tokens: fastest if tokens <= INTERMEDIATE_ROWS else GATHERED for tokens in TOKENS}
        assert {int(tokens): launch.intermediate for tokens, launch in launches.items()} == wanted
        assert {low for tokens, (*_, low) in prepared if tokens > INTERMEDIATE_ROWS} == {GATHERED}
        assert set(prepared) >= {(int(tokens), launch) for tokens, launch in launches.items()}
