import pytest
from chat_tokenizer import END, END_ID, PAD_ID, SPLIT, encode_answers, encode_prompts, train_tokenizer
from word_problems import generate

from verl_qerl.cli.data.schema import gsm8k_prompt

PROBLEMS = generate(300, max_steps=2, max_number=12, seed=0)
TEXTS = [text for problem in PROBLEMS for text in (gsm8k_prompt(problem.question)[0]["content"], problem.answer)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 384)


def test_prompts_are_what_verl_sends(tokenizer):
    question = PROBLEMS[0].question
    expected = tokenizer.apply_chat_template(
        gsm8k_prompt(question), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    (ids,) = encode_prompts(tokenizer, [question])
    assert ids == expected
    assert tokenizer.decode(ids) == (
        f'<|im_start|>user\n{question} Let\'s think step by step and output the final answer after "####".<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_answers_end_with_the_end_of_sequence_and_survive_decoding(tokenizer):
    (ids,) = encode_answers(tokenizer, [PROBLEMS[0].answer])
    assert ids[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END) == END_ID
    assert tokenizer.pad_token_id == PAD_ID
    assert tokenizer.decode(ids, skip_special_tokens=True) == PROBLEMS[0].answer


def test_any_text_survives(tokenizer):
    text = "\u00fcber 1,234.5 \u4e2d $\\frac{1}{2}$\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_saved_tokenizer_is_read_as_the_same_by_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer, Qwen2Config

    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)  # AutoTokenizer also looks at the model type
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    questions = [problem.question for problem in PROBLEMS[:20]]
    assert encode_prompts(loaded, questions) == encode_prompts(tokenizer, questions)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert len(loaded) == len(tokenizer)


def test_each_digit_is_a_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("12+34")["input_ids"]) == ["1", "2", "+", "3", "4"]


def test_the_split_is_qwen2s():
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    assert SPLIT == qwen2.PRETOKENIZE_REGEX


def test_a_vocabulary_the_texts_cannot_fill_shrinks_to_a_multiple_of_64():
    assert len(train_tokenizer(TEXTS, 4096)) in (384, 448)


@pytest.mark.parametrize("vocab_size", [256, 400])
def test_other_vocabulary_sizes_are_refused(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size}"):
        train_tokenizer(TEXTS, vocab_size)
