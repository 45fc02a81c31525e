"""What is exported of a checkpoint to evaluate it, which may be as large as the model."""

import os
import signal
import subprocess
import sys

KILLED = """
import os, signal, sys
from pathlib import Path
from verl_qerl.cli.eval import served

def export(out, *_):
    out.mkdir()
    (out / "model.safetensors").write_text("x")

served._exported = export
with served.served(None, None, Path("checkpoint"), None, Path(sys.argv[1])):
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print(len(os.listdir(sys.argv[1])))
"""


def test_what_a_killed_evaluation_exported_is_removed_by_the_next(tmp_path):
    def evaluate(how):
        command = [sys.executable, "-c", KILLED, str(tmp_path), how]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert evaluate("killed").returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    next_one = evaluate("whole")
    assert (next_one.returncode, next_one.stdout) == (0, "1\n"), next_one.stderr
    assert os.listdir(tmp_path) == []
