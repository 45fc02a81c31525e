import pytest

from verl_qerl.cli import main, plan
from verl_qerl.cli.output_dir import new_directory


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyError), new_directory(tmp_path / "out") as directory:  # noqa: PT012
        (directory / "half").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_says_what_it_left(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt, match=r"^interrupted; .*out was not written$"),
        new_directory(tmp_path / "out"),
    ):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sentence", "told"), [("out was not written", "out was not written"), ("", "interrupted")])
def test_the_command_ends_as_an_interrupted_one(monkeypatch, capsys, sentence, told):
    def run(args):
        raise KeyboardInterrupt(sentence)

    monkeypatch.setattr(plan, "run", run)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "m", "--gpu-gib", "1"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"python -m verl_qerl: {told}\n"


def test_the_directory_appears_only_when_the_block_ends(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_directory(out) as directory:
        (directory / "whole").write_text("x")
        assert not out.exists()
    assert (out / "whole").read_text() == "x"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_empty_directory_is_taken(tmp_path):
    with new_directory(tmp_path) as directory:
        (directory / "whole").write_text("x")
    assert (tmp_path / "whole").is_file()


def test_earlier_output_is_refused_and_kept(tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(FileExistsError, match="the output already exists: out="), new_directory(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
