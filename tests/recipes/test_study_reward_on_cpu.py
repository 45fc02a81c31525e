"""The reward of recipes/study on answers as models write them, marked by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")

BOXED = [  # what the box holds, the truth, whether it is right
    ("18", "18", 1),
    (" 18 ", "18", 1),
    ("18.", "18", 1),
    ("18.0", "18", 1),
    ("18.5", "18", 0),
    (r"\$18", "18", 1),
    ("$18$", "18", 1),
    (r"\$18.50", "18.5", 1),
    ("-3", "3", 0),
    ("-3", "-3", 1),
    # Units.
    (r"18 \text{ dollars}", "18", 1),
    ("18 dollars", "18", 1),
    ("5 cm", "5", 1),
    (r"5\,\text{cm}", "5", 1),
    (r"90^\circ", "90", 1),
    ("18", r"18\text{ cm}", 1),
    (r"50\%", "50", 1),
    ("50%", "50", 1),
    ("0.5", "50", 0),
    (r"50\%", "0.5", 0),
    (r"\frac{100}{3}\%", r"\frac{100}{3}", 1),
    # Thousands separators.
    ("1,234", "1234", 1),
    ("1{,}234", "1234", 1),
    (r"1\,234", "1234", 1),
    (r"\$1,234.00", "1234", 1),
    ("1,000,000", "1000000", 1),
    ("1,23", "123", 0),
    # Forms of one number.
    (r"\frac{1}{2}", "0.5", 1),
    ("1/2", r"\frac{1}{2}", 1),
    (r"\dfrac12", r"\frac{1}{2}", 1),
    (r"\frac{-1}{2}", r"-\frac12", 1),
    (r"2\sqrt{3}", r"\sqrt{12}", 1),
    (r"3\times 10^2", "300", 1),
    ("x = 5", "5", 1),
    (r"\pi", "3.14159", 0),
    # What is no number.
    ("x^2+2x+1", "(x+1)^2", 1),
    ("(1,2)", "(1,2)", 1),
    ("(2,1)", "(1,2)", 0),
    ("(1,2]", "[1,2)", 0),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", 1),
    (r"\{1,2\}", r"\{2,1\}", 1),
    (r"\text{Evelyn}", r"\text{Evelyn}", 1),
    ("Evelyn", r"\text{Evelyn}", 1),
    (r"\text{yes}", r"\text{no}", 0),
    # More than one answer.
    ("18, 19", "18", 0),
    ("18 or 19", "18", 0),
    ("2x", "2", 0),
    ("1" * 400, "1", 0),
]
TEXTS = [  # a whole answer, the truth, whether it is right, whether it is boxed
    (r"First \boxed{7}, then \boxed{18}.", "18", 1, 1),
    (r"First \boxed{18}, then \boxed{7}.", "18", 0, 1),
    (r"So it is \boxed{\boxed{18}}.", "18", 1, 1),
    (r"So it is \boxed 18$.", "18", 1, 1),
    (r"So it is \fbox{18}.", "18", 1, 1),
    ("She makes 9 * 2 = $18 every day.", "18", 1, 0),
    ("He has 1,234 apples.", "1234", 1, 0),
    ("The answer is 18 dollars.", "18", 1, 0),
    (r"The answer is $\frac{3}{4}$.", r"\frac{3}{4}", 1, 0),
    (r"The answer is $\frac{3}{4}$.", "4", 0, 0),
    ("Of 12 and 13, the final answer is 12. That took 3 steps.", "12", 1, 0),
    ("#### 18", "18", 1, 0),
    ("I do not know.", "18", 0, 0),
    ("", "18", 0, 0),
    (r"So it is \boxed{}.", "18", 0, 0),
    (r"So it is \boxed{18", "18", 0, 0),  # cut off: what else would have been in the box?
]


@pytest.fixture(scope="module")
def reward(study):
    return study("reward")


@pytest.mark.parametrize(("answer", "truth", "right"), BOXED)
def test_boxed_answers(reward, answer, truth, right):
    given = reward.compute_score("math", f"Let us see. So it is \\boxed{{{answer}}}.", truth)
    assert given == {"score": right, "acc": right, "form": 1}


@pytest.mark.parametrize(("text", "truth", "right", "form"), TEXTS)
def test_whole_texts(reward, text, truth, right, form):
    assert reward.compute_score("gsm8k", text, truth) == {"score": right, "acc": right, "form": form}


def test_threads_may_ask_as_verls_reward_workers_do(reward):
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(reward.compute_score, "math", rf"\boxed{{\frac{{{n}}}{{2}}}}", "1.5") for n in range(40)]
        scores = [future.result()["score"] for future in asked]
    assert threading.current_thread() is threading.main_thread()
    assert scores == [float(n == 3) for n in range(40)]


def test_arithmetic_without_an_end_is_wrong_within_its_limit(reward):
    assert reward.compute_score("math", r"\boxed{9^{9^{9^9}}}", "3")["score"] == 0


def test_a_scorer_that_is_broken_stops_the_run(reward, monkeypatch):
    class Broken:
        def submit(self, *_):
            raise RuntimeError("no processes")

    monkeypatch.setattr("verl_qerl.cli.eval.answers._pool", Broken)
    with pytest.raises(RuntimeError, match="no processes"):
        reward.compute_score("math", r"\boxed{\frac{1}{7}}", r"\frac{2}{7}")


def test_it_is_what_verl_calls(study):
    # By its path, with keywords, as recipes/study/run.py asks for it.
    pytest.importorskip("verl")
    from verl.utils.import_utils import load_extern_object

    score = load_extern_object(study("reward").__file__, "compute_score")
    given = score(data_source="gsm8k", solution_str=r"\boxed{18}", ground_truth="18", extra_info={"index": 1})
    assert given["score"] == 1
