import itertools

import pytest
import torch
from chat_tokenizer import encode_answers, encode_prompts, train_tokenizer
from packing import Document, collate
from pretrain import SIZES, Budget, accuracy, build_model, is_right, lr_factor, train
from word_problems import generate

from verl_qerl.cli.data.schema import gsm8k_prompt

PROBLEMS = [{"question": p.question, "answer": p.answer} for p in generate(3, max_steps=1, max_number=5, seed=0)]
# A long one last, so that the others of its batch are padded far.
PROBLEMS += [{"question": "Mia has 1 pen. " * 12 + "How many pens does Mia have now?", "answer": "#### 12"}]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for p in PROBLEMS for text in (gsm8k_prompt(p["question"])[0]["content"], p["answer"])]
    return train_tokenizer(texts, 320)


@pytest.fixture(scope="module")
def batch(tokenizer):
    prompts = encode_prompts(tokenizer, [problem["question"] for problem in PROBLEMS])
    answers = encode_answers(tokenizer, [problem["answer"] for problem in PROBLEMS])
    rows = [[Document(prompt, answer)] for prompt, answer in zip(prompts, answers, strict=True)]
    return collate(rows, pad_id=tokenizer.pad_token_id, prompt_weight=0.0, row_length=None)


def learn(tokenizer, batch, steps, is_good_enough=None, lr=2e-3):
    torch.manual_seed(0)
    model = build_model(SIZES["tiny"], tokenizer, "cpu")
    trained = train(
        model,
        itertools.repeat(batch),
        lr=lr,
        budget=Budget(600, steps),
        compile_model=False,
        is_good_enough=is_good_enough,
    )
    return model, trained


def test_a_model_learns_four_problems_by_heart_and_answers_them_left_padded(tokenizer, batch):
    model, trained = learn(tokenizer, batch, 60)
    assert trained.steps == 60
    assert trained.tokens == 60 * batch[0].numel()
    assert trained.loss < 0.1
    assert accuracy(model, tokenizer, PROBLEMS, sample=False, max_new_tokens=24, batch_size=3) == 1.0
    assert accuracy(model, tokenizer, PROBLEMS, sample=True, max_new_tokens=24) >= 0.5  # one answer in 150 is wrong
    wrong = [problem | {"answer": "#### 99"} for problem in PROBLEMS]
    assert accuracy(model, tokenizer, wrong, sample=False, max_new_tokens=24) == 0.0


def test_training_stops_when_the_model_is_good_enough(tokenizer, batch):
    answers = iter([False, False, True])
    _, trained = learn(tokenizer, batch, 40, lambda: next(answers))
    assert trained.steps < 12
    assert list(answers) == []


def test_training_that_has_diverged_stops(tokenizer, batch):
    with pytest.raises(ValueError, match=r"training has diverged: loss=nan\. A finite loss is accepted\. Lower"):
        learn(tokenizer, batch, 40, lr=1e30)


def test_the_budget_ends_with_what_is_spent_first():
    assert Budget(10, None).progress(5, 1000) == 0.5
    assert Budget(10, 100).progress(1, 50) == 0.5
    assert Budget(10, 100).progress(9, 50) == 0.9


def test_the_learning_rate_warms_up_and_falls():
    assert 0 < lr_factor(0) < 0.05
    assert lr_factor(0.06) > 0.98
    assert lr_factor(0.5) == pytest.approx(0.525)
    assert lr_factor(1.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("text", "right"),
    [("2+3=5\n#### 5", True), ("#### 5\n#### 6", False), ("5", False), ("####5", False), ("#### 1,5", False)],
)
def test_is_right_agrees_with_verls_reward(text, right):
    gsm8k = pytest.importorskip("verl.utils.reward_score.gsm8k")
    assert is_right(text, "2+3=5\n#### 5") is right
    assert bool(gsm8k.compute_score(text, "5")) is right


def test_the_loss_is_weighted(tokenizer, batch):
    ids, weights = batch
    slight = torch.where(weights > 0, weights, 1e-6)
    few, none = (learn(tokenizer, (ids, one), 10)[1].loss for one in (slight, weights))
    assert few == pytest.approx(none, rel=1e-2)
