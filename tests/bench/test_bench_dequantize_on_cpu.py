"""The benchmark's own arithmetic and files, with a clock that is not one."""

import json
import subprocess

import bench_dequantize as bench
import pytest
import torch


class FakeTimer:
    """Makes the calls, and says that each took a microsecond, but for one in five that took ten."""

    def __init__(self):
        self.results = []

    def __call__(self, calls):
        self.results.append([call() for call in calls])
        return [1e-6, 1e-6, 1e-5, 1e-6, 1e-6]


@pytest.fixture
def small(monkeypatch):
    """Shapes that a CPU decodes at once, and a gate that is open."""
    monkeypatch.setattr(bench, "SHAPES", {"7b": {"q, o": (128, 64), "k, v": (64, 64)}})
    monkeypatch.setattr(bench, "TUNE_SHAPES", [("7b", "k, v")])
    monkeypatch.setattr(bench, "WORKING_SET_BYTES", 40_000)
    monkeypatch.setattr(bench, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(bench, "gate_passes", lambda: True)


def test_bytes_count_reads_and_writes():
    # 32 weights: 16 bytes of codes, 2 of scales, 64 of bfloat16.
    assert bench.traffic_bytes(2, 16) == 16 + 2 + 64


def test_summary_by_hand():
    row = bench.summary([4e-6, 1e-6, 2e-6, 3e-6, 5e-6, 6e-6], 3_500_000, copy_gb_s=2000.0)
    assert row == {"median_us": 3.5, "p20_us": 2.0, "p80_us": 5.0, "gb_s": 1000.0, "fraction_of_copy": 0.5}


def test_copies_exceed_the_working_set(small):
    timer = FakeTimer()
    bench.measure_shape(32, 64, timer, "cpu", copy_gb_s=1.0)
    outputs, same_size_copies = timer.results
    assert len(same_size_copies) > 1
    assert len(outputs) * bench.traffic_bytes(32, 64) >= bench.WORKING_SET_BYTES
    assert len({out.data_ptr() for out in outputs}) == len(outputs)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_tiles_are_decoded_where_they_lie_within_a_stack(small):
    timer = FakeTimer()
    bench.measure_tiled(64, 32, timer, "cpu", copy_gb_s=1.0)
    (outputs,) = timer.results
    assert len(outputs) * bench.traffic_bytes(64, 32) >= bench.WORKING_SET_BYTES
    assert all(out.shape == (64, 32) and torch.equal(out, outputs[0]) for out in outputs)
    assert outputs[0].isfinite().all()


def test_the_copy_counts_each_byte_read_and_written():
    timer = FakeTimer()
    row = bench.measure_copy(timer, "cpu", num_bytes=8000)
    assert timer.results[0][0].numel() * timer.results[0][0].element_size() == 4000
    assert row["gb_s"] == pytest.approx(8000 / 1e-6 / 1e9)


def test_a_shape_is_also_held_against_a_copy_of_its_size(small):
    # The clock gives both the same time, so that the ratio is that of the bytes.
    assert bench.measure_shape(32, 64, FakeTimer(), "cpu", copy_gb_s=1.0)["fraction_of_same_size_copy"] == 1.0


def test_writes_what_it_measured(small, tmp_path, capsys):
    out = tmp_path / "gpu" / "dequantize.json"
    assert bench.main(["--out", str(out)], FakeTimer(), "cpu") == 0
    report = json.loads(out.read_text())
    assert {"gpu", "driver", "versions", "commit", "copy", "tiles", "shapes"} <= set(report)
    assert report["versions"]["torch"] == torch.__version__
    assert [(row["N"], row["K"]) for row in report["shapes"]] == [(128, 64), (64, 64)]
    assert report["shapes"][0]["gb_s"] == pytest.approx(bench.traffic_bytes(128, 64) / 1e-6 / 1e9, rel=1e-3)
    assert report["shapes"][1]["tiled_gb_s"] == pytest.approx(bench.traffic_bytes(64, 64) / 1e-6 / 1e9, rel=1e-3)
    assert "tune" not in report
    assert "of copy" in capsys.readouterr().out


def test_tune_lists_every_candidate_and_puts_the_kernels_own_back(small, tmp_path):
    own = bench.kernel._TILES
    out = tmp_path / "dequantize.json"
    assert bench.main(["--out", str(out), "--tune"], FakeTimer(), "cpu") == 0
    rows = json.loads(out.read_text())["tune"]
    assert {(row["rows"], row["blocks"], row["warps"]) for row in rows} == set(bench.TUNE)
    assert set(own) <= set(bench.TUNE)
    assert own == bench.kernel._TILES


def test_a_red_gate_is_not_timed(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "gate_passes", lambda: False)
    timer, out = FakeTimer(), tmp_path / "dequantize.json"
    assert bench.main(["--out", str(out)], timer, "cpu") == 1
    assert not timer.results
    assert not out.exists()
    assert "nothing is timed" in capsys.readouterr().out


@pytest.fixture
def said(monkeypatch):
    """What pytest prints as its last line, and its exit code, without a start of it."""

    def say(line, code):
        done = subprocess.CompletedProcess([], code, f".\n{line}\n", "")
        monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: done)

    return say


@pytest.mark.parametrize(
    ("line", "code", "passes"),
    [
        pytest.param("2 passed in 0.01s", 0, True, id="green"),
        pytest.param("1 failed, 1 passed in 0.01s", 1, False, id="red"),
        pytest.param("1 skipped in 0.01s", 0, False, id="skipped"),
        pytest.param("1 passed, 1 skipped in 0.01s", 0, False, id="some skipped"),
        pytest.param("no tests ran in 0.01s", 5, False, id="none"),
    ],
)
def test_the_gate(said, line, code, passes):
    said(line, code)
    assert bench.gate_passes() is passes


def test_the_gate_reads_what_pytest_prints(tmp_path, monkeypatch):
    """In one start, whose output also says what a skipped test is called."""
    start, ended = subprocess.run, []

    def run(*args, **more):
        ended.append(start(*args, **more))
        return ended[0]

    monkeypatch.setattr(bench.subprocess, "run", run)
    (tmp_path / "test_gate.py").write_text("import pytest\n@pytest.mark.skip\ndef test_a(): pass\ndef test_b(): pass")
    monkeypatch.setattr(bench, "GATE", tmp_path / "test_gate.py")
    assert not bench.gate_passes()
    assert ended[0].returncode == 0
    assert "1 passed, 1 skipped in " in ended[0].stdout
