"""The program itself: what it imports before it answers, and what an interrupt of an import becomes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from verl_qerl import cli
from verl_qerl.cli.export import arguments as export_arguments
from verl_qerl.cli.quantize import arguments as quantize_arguments

SLOW = ("torch", "transformers", "verl", "vllm", "ray", "triton", "pandas", "matplotlib")
PROGRAM = f"""
import runpy, sys
sys.argv = ["verl_qerl", *sys.argv[1:]]
try:
    runpy.run_module("verl_qerl", run_name="__main__")
finally:
    print("imported", [name for name in {SLOW} if name in sys.modules])
"""


def program(*arguments, path=(), code=None):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    command = ["-m", "verl_qerl"] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *command, *arguments], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", [[], *([name] for name in cli._COMMANDS)], ids=lambda c: " ".join(c) or "none")
def test_help_waits_for_nothing_slow(command):
    result = program(*command, "--help", code=PROGRAM)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {' '.join(['python -m verl_qerl', *command])} [-h]")
    assert result.stdout.endswith("imported []\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("nonsense", 2),
        ("quantize --model m --out o --format int3", 2),
        ("quantize --model m --out {here}", 1),
        ("export --checkpoint c --out o --to peft --scale mse", 1),
        ("plan --model m --gpu-gib 80 --tokens 0", 1),
        ("data gsm8k --out {here}", 1),
    ],
)
def test_wrong_arguments_are_answered_before_anything_slow(tmp_path, arguments, code):
    (tmp_path / "something").write_text("x")
    result = program(*arguments.format(here=tmp_path).split(), code=PROGRAM)
    assert result.returncode == code, result.stderr
    assert result.stdout.endswith("imported []\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("plan --model m --gpu-gib 80 --lora-rank 64", "`python -m verl_qerl plan --help`"),
        ("--lora-rank plan --model m --gpu-gib 80", "`python -m verl_qerl --help`"),
    ],
)
def test_an_unknown_option_is_told_where_the_known_ones_are(refused, arguments, told):
    said = refused(*arguments.split(), code=2)
    assert said.startswith("python -m verl_qerl: no such argument: --lora-rank")
    assert said.endswith(f". Accepted are those that {told} lists.\n")


def test_home_behind_an_equals_sign_is_found(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out" / "something").mkdir(parents=True)
    assert f"the output already exists: out={tmp_path}/out with something." in refused(
        "quantize", "--model=m", "--out=~/out"
    )


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("--out=hdfs://host/out", "no file or directory: hdfs://host/out. A path of this machine, or "),
        ("--out=", "an argument is empty: ''. One that says something is accepted. Is a variable not set?"),
    ],
)
def test_nothing_is_written_for_an_address_or_an_empty_path(tmp_path, monkeypatch, refused, out, says):
    from qerl_testing import random_qwen2

    random_qwen2(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for arguments in ([out], out.split("=")):
        assert says in refused("quantize", "--model", "../model", *arguments).replace("--out=", "")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_name_in_another_encoding_and_a_closed_stderr_end_no_program(tmp_path):
    from qerl_testing import random_qwen2

    random_qwen2(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    out = os.fsencode(tmp_path) + b"/\xfc"
    command = [sys.executable, "-m", "verl_qerl", "quantize", "--model", tmp_path / "model", "--out", out]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C.UTF-8"}
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    result = subprocess.run(closed, env=env, capture_output=True, timeout=300)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (
        0,
        [b"wrote " + os.fsencode(tmp_path) + b"/\\udcfc"],
    )
    assert os.path.exists(out)


def test_choices_are_those_of_the_modules_that_import_torch():
    from verl_qerl.formats import FORMATS
    from verl_qerl.formats.nvfp4 import SCALE_CHOICES
    from verl_qerl.planning.memory_plan import BYTES_PER_WEIGHT

    assert list(quantize_arguments.FORMATS) == sorted(FORMATS) == sorted(BYTES_PER_WEIGHT)
    assert quantize_arguments.SCALE_CHOICES == SCALE_CHOICES
    assert export_arguments.SCALE_CHOICES is quantize_arguments.SCALE_CHOICES


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_gone_ends_the_program_quietly(tmp_path, unbuffered):
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 40, "num_key_value_heads": 8}))
    ours, theirs = os.pipe()
    os.close(ours)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "verl_qerl", "plan", "--model", str(tmp_path), "--gpu-gib", "80"]
    result = subprocess.run(command, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(theirs)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_another_pipe_that_breaks_is_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise BrokenPipeError(32, 'Broken pipe')\n")
    result = program("quantize", "--model", "m", "--out", "o", path=[tmp_path])
    assert (result.returncode, "(Broken pipe)" in result.stderr) == (1, True)


INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
# As transformers does with whatever happens in one of its modules.
HIDING = """
try:
    exec({0!r})
except BaseException as error:
    raise ModuleNotFoundError("Could not import module") from error
"""
# A shell starts background jobs, and so what they start, deaf to SIGINT.
LISTENING = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.mark.parametrize("hidden", [False, True], ids=["as it is", "as an import error"])
@pytest.mark.parametrize("command", ["quantize --model m --out o", "export --checkpoint c --out o --to peft"])
def test_an_interrupted_import_is_one_line(tmp_path, command, hidden):
    (tmp_path / "torch.py").write_text(HIDING.format(INTERRUPT) if hidden else INTERRUPT)
    (tmp_path / "sitecustomize.py").write_text(LISTENING)
    result = program(*command.split(), path=[tmp_path])
    assert (result.returncode, result.stderr) == (130, "python -m verl_qerl: interrupted\n")


def test_an_interrupt_before_the_program_listens(tmp_path):
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    result = program("plan", "--help", path=[tmp_path])
    assert (result.returncode, result.stderr) == (130, "python -m verl_qerl: interrupted\n")
