import argparse
import json

import pytest
import torch
from pretrain import SIZES, _read, build_model, main
from word_problems import generate


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = generate(64, max_steps=1, max_number=6, seed=0)
    path.write_text("".join(json.dumps({"question": r.question, "answer": r.answer}) + "\n" for r in rows))
    return path


def pretrain(problems, out, *arguments):
    common = ["--eval-problems", "4", "--max-steps", "3", "--batch-size", "4"]
    return main(["--data", str(problems), "--out", str(out), *common, *arguments])


def test_what_is_saved_loads_in_transformers(problems, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert pretrain(problems, tmp_path / "out", "--size", "tiny", "--vocab-size", "320", "--repeats", "2") == 0
    assert "accuracy on 4 held-out problems: greedy" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 320
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert json.loads((tmp_path / "out" / "pretrain.json").read_text())["steps"] == 3


def test_the_same_seed_and_steps_give_the_same_model(problems, tmp_path):
    from safetensors.torch import load_file

    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        pretrain(problems, tmp_path / out, "--seed", seed)
    a, b, c = (load_file(tmp_path / out / "model.safetensors") for out in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize("name", SIZES)
def test_widths_suit_nvfp4_kernels_and_attention(name):
    class Tokenizer:
        def __len__(self):
            return SIZES[name].vocab

    size = SIZES[name]
    assert size.hidden == 64 * size.heads
    assert all(width % 128 == 0 for width in (size.hidden, size.intermediate, 64 * size.heads, 64 * size.kv_heads))
    model = build_model(size, Tokenizer(), "meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    low, high = {"tiny": (1e6, 2e6), "small": (1e7, 2e7), "100m": (1e8, 1.2e8)}[name]
    assert low <= parameters <= high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "no such run: minutes=0.0. A positive finite number is accepted. Change --minutes."),
        (["--minutes", "nan"], "no such run: minutes=nan"),
        (["--lr", "0"], "no such run: lr=0.0"),
        (["--lr", "inf"], "no such run: lr=inf"),
        (["--batch-size", "0"], "no such run: batch_size=0. A positive finite number is accepted. Change --batch-size"),
        (["--max-steps", "0"], "no such run: max_steps=0"),
        (["--eval-problems", "0"], "no such run: eval_problems=0"),
        (["--vocab-size", "0"], "vocab_size=0"),
        (["--repeats", "1", "2"], "repeats do not fit the files"),
        (["--repeats", "0"], "repeats do not fit the files"),
        (["--hash-share", "1.5"], "not a share: --hash-share=1.5"),
        (["--target-accuracy", "30"], "target_accuracy=30.0"),
        (["--vocab-size", "333"], "vocab_size=333"),
        (["--eval-problems", "64"], "no problem is left to train on"),
        (["--eval-data", "none.jsonl"], "a file is missing: path=none.jsonl"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_write_nothing(problems, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        pretrain(problems, tmp_path / "out", *arguments)
    assert exit_info.value.code == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_earlier_output_is_refused_before_training(problems, tmp_path, capsys):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(SystemExit):
        pretrain(problems, tmp_path)
    captured = capsys.readouterr()
    assert "the output already exists" in captured.err
    assert "parameters" not in captured.out


def test_a_held_out_answer_without_a_result_is_refused_before_training(tmp_path, capsys):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "?", "answer": "The answer is 5."}\n' * 20)
    with pytest.raises(SystemExit):
        pretrain(path, tmp_path / "out")
    captured = capsys.readouterr()
    assert "an answer has no result" in captured.err
    assert "parameters" not in captured.out


def test_the_share_of_endings_concerns_what_is_trained_on_only(tmp_path):
    rows = [{"question": p.question, "answer": p.answer} for p in generate(400, max_steps=2, max_number=9, seed=0)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = argparse.Namespace(data=[path], eval_data=None, eval_problems=50, hash_share=0.25, seed=0)
    (mixed,), held_out = _read(args)
    assert held_out == rows[:50]
    kept = [row for row, before in zip(mixed, rows[50:], strict=True) if row == before]
    assert 0.15 < len(kept) / 350 < 0.35
    for row, before in zip(mixed, rows[50:], strict=True):
        number = before["answer"].rpartition("#### ")[2]
        assert row["answer"].endswith((f"#### {number}", f"The answer is {number}."))
