"""Answers as models write them, marked by hand; more are in tests/recipes/test_study_reward_on_cpu.py."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl_qerl.cli.eval import answers
from verl_qerl.cli.eval.answers import Verdict, boxed, judge, same

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        # QeRL's evaluator compares the first characters alone.
        (r"\boxed{1}", "18", False),
        (r"\boxed{19}", "18", False),
        (r"\boxed{180}", "18", False),
        ("The answer is 1.", "18", False),
        (r"\boxed{18}", "18", True),
        (r"\boxed{18 \text{ cm}}", "18", True),
        (r"\boxed{\frac{36}{2}}", "18", True),
        (r"\boxed{1{,}234}", "1234", True),
        (r"\boxed{1,800}", "1800", True),
        (r"\boxed{\$18}", "18", True),
        (r"\boxed{18.00}", "18", True),
        (r"\boxed{\text{eighteen}}", "18", False),
        (r"First \boxed{18}, no, \boxed{19}.", "18", False),
        (r"I am to answer within \boxed{}. The answer is 18.", "18", True),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", True),
    ],
)
def test_the_whole_answer_is_compared(text, truth, right):
    assert judge(text, truth).right is right


def test_a_long_answer_is_right_only_where_it_is_written_as_the_known_one():
    long = "+".join(["x"] * (answers.LONGEST // 2 + 1))
    assert same(long, long)
    assert not same(f"{'0' * answers.LONGEST}18", "18")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("18", None),
        (r"\boxed{18", None),
        (r"\boxed{}", None),  # repeated from the question
    ],
)
def test_the_last_closed_box_counts(text, found):
    assert boxed(text) == found


@pytest.mark.parametrize(
    "answer",
    ["18 dollars", "18 square feet", "18 cubic meters", "18 cm squared", "18 miles per hour", "18 times", "18 point",
     "18 orders", "18 seconds", "18 pies", "18 PM"],
)  # fmt: skip
def test_words_after_a_number_are_its_unit(answer):
    assert same(answer, "18")


@pytest.mark.parametrize(
    ("answer", "number"),
    [("5 factorial", "5"), ("12 squared", "12"), ("3 cubed", "3"), ("3 halves", "3"), ("1 half", "1"), ("1 third", "1"),
     ("2 Fifths of it", "2"), ("2 pi", "2"), ("2 million", "2"), ("5 thousand dollars", "5"), ("9 dozen", "9"),
     ("4 or five", "4"), ("7 or more", "7"), ("5 to one", "5"), ("3 over four", "3"), ("2 feet and more", "2"),
     ("2 times five", "2"), ("3 point five", "3"), ("8 minus xy", "8")],
)  # fmt: skip
def test_words_that_make_another_number_are_no_unit(answer, number):
    assert not same(answer, number)


def test_what_is_cut_off_has_an_answer_only_in_a_box():
    assert judge("So far that is 18", "18") == Verdict("18", True, False)
    assert judge("So far that is 18", "18", cut=True) == Verdict(None, False, False)
    assert judge(r"It is \boxed{18}. Let me check: 5", "18", cut=True) == Verdict("18", True, True)
    assert judge("I do not know.", "18") == Verdict(None, False, False)


def test_without_math_verify_nothing_is_started(monkeypatch, refused, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    assert "math-verify is not installed: `eval` compares answers with it." in refused(
        "eval", "--model", "m", "--tasks", "gsm8k", "--out", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_process_that_has_ended_is_replaced():
    text = r"\boxed{\frac{36}{2}}"
    assert judge(text, "18").right
    (pool,) = answers._shared
    for process in list(pool._processes.values()):
        process.kill()
        process.join()
    assert judge(text, "18").right
    assert pool not in answers._shared


def test_an_answer_that_ends_its_process_is_wrong_and_the_only_one(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(answers, "_verify", os.execlp)
        assert judge("false", "3") == Verdict(None, False, False)  # the command, in the place of the process
    assert "math-verify does not get through this answer, which counts as wrong." in caplog.text
    assert judge(r"\boxed{\frac{36}{2}}", "18").right


def test_its_processes_end_with_a_parent_that_is_killed():
    code = (
        "from verl_qerl.cli.eval.answers import judge\nimport time\n"
        "if __name__ == '__main__':\n    judge('pi or so', '3')\n    print('judged', flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "judged\n"
    children = [one for one in psutil.Process(parent.pid).children() if "spawn_main" in " ".join(one.cmdline())]
    assert children
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children):
        assert time.monotonic() < end, "a process of the judge is left"
        time.sleep(0.1)
