"""A byte-level BPE tokenizer with a chat template, trained on the questions and answers of pretrain.py."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from verl_qerl.cli.data.schema import gsm8k_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, START, END = SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = SPECIAL.index(PAD), SPECIAL.index(END)  # the trainer numbers special tokens first
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2's own: transformers rebuilds the tokenizer of a Qwen2 directory with it, whatever tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_MULTIPLE = 64  # vLLM and the GPU's matrix units pad to it; a padded vocabulary biases the mismatch metrics


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train the tokenizer; its vocabulary is `vocab_size`, or the largest smaller multiple of 64 the texts allow.

    Args:
        texts: What merges are learned from; read once.
        vocab_size: A multiple of 64, at least 320: 256 bytes and three special tokens have to fit.

    Raises:
        ValueError: `vocab_size` is not accepted.
    """
    if vocab_size < 320 or vocab_size % VOCAB_MULTIPLE:
        raise ValueError(
            f"the vocabulary size cannot be used: vocab_size={vocab_size}. A multiple of {VOCAB_MULTIPLE} from 320 is "
            "accepted. Change --vocab-size."
        )
    texts = list(texts)
    tokenizer = _train(texts, vocab_size)
    reached = tokenizer.get_vocab_size() // VOCAB_MULTIPLE * VOCAB_MULTIPLE
    if reached != vocab_size:
        tokenizer = _train(texts, reached)
    return _with_template(tokenizer)


def encode_prompts(tokenizer: "PreTrainedTokenizerFast", questions: Sequence[str]) -> list[list[int]]:
    """Token ids of the chats up to the assistant's turn, as verl sends them to the rollout."""
    texts = [
        str(tokenizer.apply_chat_template(gsm8k_prompt(question), tokenize=False, add_generation_prompt=True))
        for question in questions
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def encode_answers(tokenizer: "PreTrainedTokenizerFast", answers: Sequence[str]) -> list[list[int]]:
    """Token ids of the answers, each closed by the end-of-turn token."""
    return tokenizer([answer + END for answer in answers], add_special_tokens=False)["input_ids"]


def _train(texts: list[str], vocab_size: int) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _with_template(tokenizer: "Tokenizer") -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
