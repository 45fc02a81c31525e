"""The whole command, with a double in the place of vLLM; test_eval_vllm_on_cpu.py has vLLM itself."""

import json
import re
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("math_verify")
pytest.importorskip("transformers")

import torch

from verl_qerl.cli import main
from verl_qerl.cli.eval import command
from verl_qerl.cli.eval.engines import check_applied
from verl_qerl.cli.eval.questions import Question
from verl_qerl.cli.eval.records import read_lines
from verl_qerl.cli.export.adapter import Adapter, write_peft

ROWS = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]


class Double:
    """Answers as a script says: the n-th prompt with its texts."""

    def __init__(self, tokenizer, script, stop_after=None):
        self.tokenizer, self.script, self.stop_after = tokenizer, script, stop_after
        self.asked, self.sampling = [], None

    def sample(self, prompts, log_probs=False, **sampling):
        self.sampling = sampling
        for number, prompt in reversed(list(enumerate(prompts))):  # done in another order
            if self.stop_after == len(self.asked):
                raise KeyboardInterrupt
            text = self.tokenizer.decode(prompt)
            self.asked.append(text)
            question = int(text.split("What is ")[1].split(" ")[0])
            found = [self.script(question, sample) for sample in range(sampling["n"])]
            yield number, [SimpleNamespace(text=one, tokens=[0] * 7, cut=one.endswith("...")) for one in found]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.fixture
def run(source, models, monkeypatch):
    """Runs `eval` with answers of a script; the double that gave them."""
    from transformers import AutoTokenizer

    def run(script, *argv, stop_after=None, out="out"):
        double = Double(AutoTokenizer.from_pretrained(models / "bf16"), script, stop_after)
        monkeypatch.setattr(command, "_options", lambda *_: SimpleNamespace(adapter=None))
        monkeypatch.setattr("verl_qerl.vllm_plugin.offline.OfflineEngine", lambda _: double)
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # is set, and undone after the test
        arguments = ["--model", str(models / "bf16"), "--source", str(source), "--tasks", "gsm8k", "--limit", "4"]
        main(["eval", *arguments, "--out", str(source / out), *argv])
        return double

    return run


def right(question, sample):
    return f"So \\boxed{{{question + 1}}}."


def mixed(question, sample):
    """Of 4 samples of question n, n are right; others say 100, two are cut off without a box."""
    if sample < question:
        return right(question, sample)
    return "It may be 7..." if question == 0 and sample < 2 else "So \\boxed{100}."


def test_the_table(run, source, capsys):
    double = run(mixed, "--samples", "4")
    assert double.sampling == {"n": 4, "temperature": 0.6, "top_p": 0.95, "max_tokens": 4096}
    assert "What is 0 + 1? Let's think step by step and output the final answer within \\boxed{}." in double.asked[-1]
    found = json.loads((source / "out" / "summary.json").read_text())["tasks"]["gsm8k"]
    assert found["accuracy"]["mean"] == pytest.approx(6 / 16)
    assert found["pass_at"] == pytest.approx({"1": 6 / 16, "2": (0 + 3 / 6 + 5 / 6 + 1) / 4, "4": 3 / 4})
    assert found["majority"] == (0 + 0 + 0.5 + 1) / 4
    assert (found["mean_tokens"], found["cut_off"], found["without_answer"]) == (7, 2 / 16, 2 / 16)
    printed = capsys.readouterr().out
    # Wilson's interval for the 12 independent answers that have the variance of 0, 1/4, 1/2 and 3/4.
    assert "| gsm8k | 4 | 4 | 37.5 | 16.5 to 64.6 | 75.0 | 37.5 | 7 | 12.5% | 12.5% |" in printed
    assert "gsm8k: 5 questions, where 1319 are published" in printed
    assert "gsm8k: 12% of the answers were cut off. Raise --max-tokens." in printed


def test_it_goes_on_where_it_was_stopped(run, source, capsys):
    with pytest.raises(SystemExit):
        run(right, stop_after=3)
    assert [line.index for line in read_lines(source / "out", "gsm8k")] == [1, 2, 3]
    double = run(right)
    assert len(double.asked) == 1
    assert "What is 0 + 1?" in double.asked[0]
    assert "gsm8k: 3 of 5 questions were answered before" in capsys.readouterr().out
    assert not run(right).asked  # nothing is left to do: the table is printed alone
    assert capsys.readouterr().out.count("| gsm8k | 4 | 1 | 100.0 |") == 1
    assert len(run(right, "--limit", "5").asked) == 1
    assert not run(right, "--limit", "2").asked  # what was answered before stays in the table
    assert capsys.readouterr().out.count("| gsm8k | 5 | 1 | 100.0 |") == 2
    with pytest.raises(SystemExit):
        run(right, "--temperature", "0.5")
    assert "temperature was 0.6 and is now 0.5" in capsys.readouterr().err


def test_two_that_write_into_one_directory_are_refused(run, source, capsys):
    def meanwhile(question, sample):
        with pytest.raises(SystemExit):
            run(right)
        return right(question, sample)

    assert len(run(meanwhile).asked) == 4
    assert f"another process writes into out={source / 'out'}. One at a time is accepted" in capsys.readouterr().err
    assert [line.index for line in read_lines(source / "out", "gsm8k")] == [0, 1, 2, 3]


@pytest.fixture
def trained(models, source, monkeypatch):
    """The arguments and the file of weights of a model, and of a run's checkpoint, which a double evaluates."""
    model = shutil.copytree(models / "bf16", source / "model")
    step = source / "run" / "global_step_5" / "actor"
    step.mkdir(parents=True)
    (step / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
    (source / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    found = {
        "model": (["--model", str(model)], next(model.glob("*.safetensors"))),
        "checkpoint": (["--checkpoint", str(source / "run")], step / "model_world_size_1_rank_0.pt"),
    }

    @contextmanager
    def served(model, adapter, checkpoint, *_):
        assert checkpoint in (None, step)  # found once, whatever the run saves meanwhile
        yield SimpleNamespace(model=str(models / "bf16"))

    monkeypatch.setattr(command, "served", served)
    return found


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_weights_that_were_written_anew_do_not_go_on(run, source, trained, capsys, kind):
    argv, file = trained[kind]
    with pytest.raises(SystemExit):
        run(right, *argv, stop_after=3)
    (file.parent / "optim_world_size_1_rank_0.pt").write_bytes(b"no weights of the model")
    assert len(run(right, *argv).asked) == 1
    file.write_bytes(bytes(reversed(file.read_bytes())))  # as many
    with pytest.raises(SystemExit):
        run(right, *argv, "--limit", "5")
    error = capsys.readouterr().err
    assert re.search(r"weight_files was '\d of \d+ bytes, .*' and is now '\d of \d+ bytes, .*The same settings", error)
    settings = source / "out" / "settings.json"
    older = {name: value for name, value in json.loads(settings.read_text()).items() if name != "weight_files"}
    settings.write_text(json.dumps(older))
    with pytest.raises(SystemExit):
        run(right, *argv)
    assert "weight_files was 'not recorded' and is now '" in capsys.readouterr().err


def test_where_nothing_is_right_three_answers_are_shown(run, capsys):
    run(lambda question, sample: "The answer is 1800 apples" if question else "Hm...")
    printed = capsys.readouterr().out
    assert "gsm8k: no answer is right. The first 3 end so:" in printed
    assert "0: wanted '1', found None, cut off, in\n    'Hm...'" in printed
    assert "1: wanted '2', found '1800', in\n    'The answer is 1800 apples'" in printed
    assert "4: wanted" not in printed


def test_two_evaluations_are_compared_question_by_question(run, source, capsys, refused):
    run(mixed, "--samples", "4", out="first")
    run(right, "--samples", "2", out="second")
    capsys.readouterr()
    assert main(["eval", "--compare", str(source / "first"), str(source / "second")]) == 0
    printed = capsys.readouterr().out
    assert "samples differs too: 4 and 2" in printed
    (source / "first" / "settings.json").write_text("{}")  # of an older one
    assert main(["eval", "--compare", str(source / "first"), str(source / "second")]) == 0
    assert "samples differs too: None and 2" in capsys.readouterr().out
    assert "| gsm8k | 4 | 37.5 | 100.0 | +62.5 | +" in printed
    assert "an option has no meaning here: --tasks=gsm8k with --compare." in refused(
        "eval", "--compare", source / "first", source / "second", "--tasks", "gsm8k"
    )
    run(right, "--limit", "3", out="third")
    assert "the questions of gsm8k are others: 4 and 3 were answered." in refused(
        "eval", "--compare", source / "first", source / "third"
    )
    (source / "third" / "gsm8k.jsonl").rename(source / "third" / "math500.jsonl")
    assert "has ['gsm8k'] and" in (said := refused("eval", "--compare", source / "first", source / "third"))
    assert "has ['math500']. The same task is accepted." in said


def test_a_prompt_of_ones_own(run):
    double = run(right, "--prompt", "{question} Answer in a box.")
    assert "What is 3 + 1? Answer in a box.<|im_end|>" in double.asked[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--samples", "0"], "too small: --samples=0. 1 or more"),
        (["--data-parallel", "0"], "too small: --data-parallel=0. 1 or more"),
        (["--samples", "2", "--temperature", "0"], "all samples would be the same: --samples=2"),
        (["--temperature", "nan"], "too small: --temperature=nan"),
        (["--seed", "-1"], "too small: --seed=-1. 0 or more"),
        (["--top-p", "0"], "not a share: --top-p=0.0"),
        (["--prompt", "Hello"], "the prompt has no place for the question: --prompt='Hello'"),
        (["--tasks", "mmlu"], "unknown task: --tasks=mmlu with mmlu"),
        (["--adapter", "a", "--checkpoint", "b"], "two adapters are named"),
        (["--adapter", "absent"], "no adapter is found: absent has no adapter_config.json"),
        (["--model", "/absent", "--format", "nvfp4"], "/absent does not exist. A directory"),
        (["--model", "/absent", "--format", "stock"], "/absent does not exist. A directory"),
        (["--compare", "a", "b"], "an option has no meaning here: --model="),
    ],
)
def test_arguments_that_are_refused(run, capsys, argv, message):
    with pytest.raises(SystemExit, match="1"):
        run(right, *argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "max_tokens", "remedy"),
    [
        (400, 200, r"after a question of 400 .* At most 111 is accepted\. Lower --max-tokens"),
        (777, 40, r"a question of 777 .* Questions of at most 479 are accepted\. Choose other --tasks"),
        (500, 8, r"a question of 500 .* Questions of at most 479 are accepted\. Choose other --tasks"),
    ],
)
def test_a_model_with_too_few_positions(source, models, refused, monkeypatch, question, max_tokens, remedy):
    asked = [command.Prompt("gsm8k", 0, Question("?", "1"), [1] * question)]
    monkeypatch.setattr(command, "encode", lambda *_: asked)
    arguments = ["--model", str(models / "bf16"), "--source", str(source), "--tasks", "gsm8k"]
    assert re.search(remedy, refused("eval", *arguments, "--out", source / "out", "--max-tokens", max_tokens))


def test_a_model_without_a_chat_template(run, models, tmp_path, capsys):
    from transformers import AutoTokenizer

    for path in (models / "bf16").glob("[cm]*"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="1"):
        run(right, "--model", str(tmp_path))
    assert "the model has no tokenizer" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(models / "bf16")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        run(right, "--model", str(tmp_path), out="other")
    assert "the tokenizer has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "size"), [("model.layers.0.self_attn.q_proj", 256), ("model.layers.9.q_proj", 128)])
def test_an_adapter_of_another_base(run, tmp_path, capsys, module, size):
    (tmp_path / "adapter").mkdir()
    factors = {module: (torch.ones(4, size), torch.ones(128, 4))}
    write_peft(tmp_path / "adapter", Adapter(4, 8.0, False, ("q_proj",), factors), "some/base")
    with pytest.raises(SystemExit, match="1"):
        run(right, "--adapter", str(tmp_path / "adapter"))
    error = capsys.readouterr().err
    assert f"the adapter is of another base: lora_A of {module!r} is (4, {size})" in error
    assert "'some/base' by its configuration. Name that with --model." in error


class Scored:
    """An engine that has log-probs of its answers, with the adapter and without."""

    def __init__(self, sampled, ours, base):
        self.sampled, self.found = sampled, {True: ours, False: base}

    def sample(self, prompts, log_probs=False, **sampling):
        yield 0, [SimpleNamespace(tokens=[1] * len(self.sampled), log_probs=self.sampled)]

    def score(self, tokens, with_adapter):
        return [0.0, *self.found[with_adapter]]


def test_the_adapter_is_found_in_the_log_probs():
    assert check_applied(Scored([-1.01, -2], [-1, -2], [-2, -4]), [5, 6]) == pytest.approx(1.5)
    # Hardly trained: roundings are as large as what it changes.
    assert check_applied(Scored([-1.01, -2], [-1, -2], [-1.002, -2]), [5, 6]) == pytest.approx(0.001)
    with pytest.raises(ValueError, match="answers come without the adapter"):
        check_applied(Scored([-2.01, -4], [-1, -2], [-2, -4]), [5, 6])
    with pytest.raises(ValueError, match="the adapter changes nothing: an answer of 2 tokens"):
        check_applied(Scored([-1, -2], [-1, -2], [-1, -2]), [5, 6])
