"""Evaluations by vLLM itself, on the CPU build: whether what is asked for is what answers."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("math_verify")

from qerl_testing import answer_of
from safetensors.torch import load_file, save_file

from verl_qerl.cli.eval.records import read_lines, read_settings
from verl_qerl.cli.export.command import export_checkpoint

SCRIPT = Path(__file__).with_name("evaluate_all.py")
QUESTIONS = [{"question": f"What is {n} + 3?", "answer": f"#### {n + 3}"} for n in range(3)]
NAMES = ("base", "adapter", "checkpoint", "norms", "bf16", "untrained", "forgotten", "two")


@pytest.fixture(scope="module")
def done(trained, models, warm_python, tmp_path_factory):
    """(folder with an --out for each name, their exit codes, stdout, stderr of each)."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    checkpoint = trained("ours-nvfp4-lora").actor
    export_checkpoint(checkpoint, folder / "peft", "peft", device="cpu")
    zero = folder / "zero"
    zero.mkdir()
    (zero / "adapter_config.json").write_text((folder / "peft" / "adapter_config.json").read_text())
    factors = load_file(folder / "peft" / "adapter_model.safetensors")
    save_file({n: t * ("lora_A" in n) for n, t in factors.items()}, zero / "adapter_model.safetensors")
    packed, adapter = ["--model", str(models / "nvfp4")], ["--adapter", str(folder / "peft")]
    arguments = [
        packed,
        [*packed, *adapter],
        ["--checkpoint", str(checkpoint)],
        ["--checkpoint", str(trained("norms-nvfp4-lora").actor)],
        ["--model", str(models / "bf16"), "--samples", "2", "--temperature", "1"],
        [*packed, "--adapter", str(zero)],
        [*packed, *adapter],
        [*packed, *adapter, "--data-parallel", "2"],
    ]
    common = ["--tasks", "gsm8k", "--source", str(folder), "--max-tokens", "16", "--memory", "0.05"]
    cases = []
    for name, given in zip(NAMES, arguments, strict=True):
        greedy = [] if "--temperature" in given else ["--temperature", "0"]
        argv = ["eval", *given, *common, *greedy, "--out", str(folder / name)]
        cases.append({"argv": argv, "forget_adapter": name == "forgotten"})
    found, result = answer_of(SCRIPT, cases, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", **warm_python.quick)
    codes = dict(zip(NAMES, found, strict=True))
    errors = dict(zip(NAMES, result.stderr.split("CASE ")[1:], strict=True))
    assert [codes[name] for name in (*NAMES[:5], "two")] == [0] * 6, result.stdout[-2000:] + result.stderr[-6000:]
    return folder, codes, result.stdout, errors


def texts(folder, name):
    return [[answer.text for answer in line.answers] for line in read_lines(folder / name, "gsm8k")]


def test_answers_come_with_the_adapter(done):
    folder, _, stdout, _ = done
    assert all(ours != theirs for ours, theirs in zip(texts(folder, "adapter"), texts(folder, "base"), strict=True))
    assert stdout.count("the adapter is applied: it changes log-probs of an answer by ") == 5


def test_two_engines_answer_as_one(done):
    folder, *_ = done
    assert texts(folder, "two") == texts(folder, "adapter")
    both = [json.loads((folder / name / "summary.json").read_text())["tasks"] for name in ("two", "adapter")]
    assert both[0] == both[1]


def test_a_checkpoint_answers_as_its_exported_adapter(done):
    folder, *_ = done
    assert texts(folder, "checkpoint") == texts(folder, "adapter")
    assert texts(folder, "norms") != texts(folder, "base")
    assert not list(folder.glob("*/.export.*"))  # what was exported is gone


def test_an_adapter_that_is_not_applied_stops_the_evaluation(done):
    folder, codes, _, errors = done
    assert (codes["forgotten"], codes["untrained"]) == (1, 1)
    assert "answers come without the adapter: their log-probs are " in errors["forgotten"]
    assert "the adapter changes nothing: an answer of " in errors["untrained"]
    assert not read_lines(folder / "forgotten", "gsm8k")


def test_samples_are_several_and_differ(done):
    folder, *_ = done
    assert all(len(answers) == 2 and answers[0] != answers[1] for answers in texts(folder, "bf16"))
    assert read_settings(folder / "bf16")["temperature"] == 1
    found = json.loads((folder / "bf16" / "summary.json").read_text())["tasks"]["gsm8k"]
    assert (found["questions"], found["samples"]) == (3, 2)
    answers = [answer for line in read_lines(folder / "bf16", "gsm8k") for answer in line.answers]
    assert all(answer.tokens == 16 for answer in answers if answer.cut)  # chance may end one of temperature 1 earlier
    assert found["cut_off"] == pytest.approx(sum(answer.cut for answer in answers) / 6)
    assert found["cut_off"] > 0
