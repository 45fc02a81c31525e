import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import word_problems

from verl_qerl.cli import output_dir, plan
from verl_qerl.cli.output_dir import new_directory, new_file, scratch_directory


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyError), new_directory(tmp_path / "out") as directory:  # noqa: PT012
        (directory / "half").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sentence", "told"), [("out was not written", "out was not written"), ("", "interrupted")])
def test_the_command_ends_as_an_interrupted_one(monkeypatch, refused, sentence, told):
    def run(args):
        raise KeyboardInterrupt(sentence)

    monkeypatch.setattr(plan, "run", run)
    assert refused("plan", "--model", "m", "--gpu-gib", "1", code=130) == f"python -m verl_qerl: {told}\n"


def test_the_directory_appears_only_when_the_block_ends(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_directory(out) as directory:
        (directory / "whole").write_text("x")
        assert not out.exists()
    assert (out / "whole").read_text() == "x"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_empty_directory_is_filled_and_stays(tmp_path, monkeypatch):
    """A mount point cannot be replaced, and a shell would be left in a directory that is gone."""
    monkeypatch.chdir(tmp_path)
    before = os.stat(".").st_ino
    with new_directory(Path(".")) as directory:
        (directory / "whole").write_text("x")
        assert directory.resolve().parent == tmp_path
    assert os.listdir(tmp_path) == ["whole"]
    assert os.stat(tmp_path).st_ino == before


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "dangling"])
def test_a_link_is_followed_and_stays(tmp_path, exists):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to("target")
    if exists:
        target.mkdir()
    with new_directory(link) as directory:
        (directory / "whole").write_text("x")
    assert link.is_symlink()
    assert os.listdir(target) == ["whole"]
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_an_empty_directory_is_filled_with_all_or_nothing(tmp_path, monkeypatch):
    real, moved = os.replace, []

    def replace(source, target):
        moved.append(source.name)
        if len(moved) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(output_dir.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt, match="was not written"), new_directory(tmp_path) as directory:  # noqa: PT012
        for name in "abc":
            (directory / name).write_text("x")
    assert moved == ["a", "b", "a"]
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_named_and_kept(tmp_path, caplog):
    stale = tmp_path / ".[out].abcd.partial"
    stale.mkdir()
    with new_directory(tmp_path / "[out]"):
        pass
    assert caplog.messages == [f"{stale} is of a run that was killed, or still writes. If none does, remove it."]
    assert sorted(os.listdir(tmp_path)) == [stale.name, "[out]"]


def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / ".out.abcd.partial").mkdir()
    with pytest.raises(FileExistsError, match=r"out=\S+ with \.out\.abcd\.partial\."), new_directory(tmp_path):
        pass


def test_earlier_output_is_refused_and_kept(tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(FileExistsError, match="the output already exists: out="), new_directory(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("out", "named"),
    [("file/x", r"file \(File exists\)"), ("n" * 256, r"n{256} \(File name too long\)")],
    ids=["file", "long"],
)
def test_a_path_that_the_system_refuses_is_one_sentence(tmp_path, capsys, out, named):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as ended:
        word_problems.main(["--num-train", "4", "--num-test", "2", "--out", str(tmp_path / out)])
    assert ended.value.code == 1
    assert re.search(rf"a file or directory cannot be used: \S*{named}\. One that", capsys.readouterr().err)


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A folder on a disk that is read-only, also for root."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for change in ("mkdir", "unlink", "open"):
        monkeypatch.setattr(Path, change, refuse)
    return tmp_path


def test_a_read_only_folder_is_told_by_the_name_that_was_given(read_only):
    out = read_only / "out"
    with pytest.raises(OSError, match="Read-only") as told, scratch_directory(read_only, "out"):
        pass
    assert told.value.filename == str(out)
    with pytest.raises(OSError, match="Read-only") as told, new_file(out) as partial:
        partial.write_text("x")
    assert told.value.filename == str(out)


def test_a_full_disk_is_told_by_the_name_that_was_given(tmp_path):
    with pytest.raises(OSError, match="No space left") as told, new_directory(tmp_path / "out"):
        Path("/dev/full").write_text("x")
    assert told.value.filename == str(tmp_path / "out")


def test_a_name_with_no_room_for_an_ending_is_told_as_it_was_given(tmp_path):
    with pytest.raises(OSError, match="too long") as told, new_directory(tmp_path / ("n" * 250)):
        pass
    assert told.value.filename == str(tmp_path / ("n" * 250))


KILLED = """
import os, signal, sys
from pathlib import Path
from verl_qerl.cli.output_dir import new_directory
with new_directory(Path(sys.argv[1])) as directory:
    (directory / "half").write_text("x")
    print(directory, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that writes `out` and is killed once it is told."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_what_a_killed_run_left_is_removed(tmp_path, caplog, writer, inside):
    if inside:
        (tmp_path / "out").mkdir()
    partial = Path(writer.stdout.readline().strip())
    assert partial.parent == (tmp_path / "out" if inside else tmp_path)
    writer.communicate("\n")
    assert (partial / "half").exists()
    with new_directory(tmp_path / "out") as directory:
        (directory / "whole").write_text("x")
    assert caplog.messages == [f"removed {partial}, which a run that was killed had left."]
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["whole"]


def test_what_another_run_still_writes_is_kept(tmp_path, caplog, writer):
    partial = Path(writer.stdout.readline().strip())
    with new_directory(tmp_path / "out"):
        pass
    assert caplog.messages == [f"{partial} is of a run that was killed, or still writes. If none does, remove it."]
    assert (partial / "half").exists()
