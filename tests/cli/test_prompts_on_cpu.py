import json
import shutil
from dataclasses import replace

import pytest
import word_problems

from verl_qerl.checkpoints.source import open_source
from verl_qerl.cli import prompts
from verl_qerl.cli.prompts import read_prompts, tokenize, tokens_of
from verl_qerl.formats.tensor_spec import TensorSpec

CHAT = [{"role": "user", "content": "What is 5 + 3?"}]


def test_text_and_chats_are_read_from_json_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("What is 2 + 3?", CHAT, "more")))
    assert read_prompts(file, 2) == ["What is 2 + 3?", CHAT]


def test_verls_parquet_is_read(tmp_path):
    assert word_problems.main(["--out", str(tmp_path / "data"), "--num-train", "4", "--num-test", "2"]) == 0
    prompts = read_prompts(tmp_path / "data" / "train.parquet", 64)
    assert len(prompts) == 4
    assert [turn["role"] for turn in prompts[0]] == ["user"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "x", "prompts of an unknown kind: prompts="),
        ("p.jsonl", '{"question": "x"}', "row 1 of .* cannot be used: text=None"),
        ("p.jsonl", '{"prompt": 3}', "row 1 of .* cannot be used: prompt=3"),
        ("p.jsonl", '{"prompt": ""}', "row 1 of .* cannot be used: prompt=.."),
        ("p.parquet", "no parquet", "prompts cannot be read"),
    ],
)
def test_what_holds_no_prompts_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name, 4)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_an_absent_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="a file is missing"):
        read_prompts(tmp_path / name, 4)
    (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match="a directory was given for a file"):
        read_prompts(tmp_path / name, 4)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("question", ["x"], "row 1 of .* cannot be used: text=None"),
        ("prompt", [], r"prompts cannot be read: .*p\.parquet holds no obj"),
    ],
)
def test_a_parquet_without_prompts_is_refused(tmp_path, column, values, message):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: pa.array(values, pa.string())}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p.parquet", 4)


def test_text_begins_as_the_model_knows_it_and_a_chat_as_its_template_says(models):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = models / "nvfp4"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenize(folder, ["What is 2 + 3?", CHAT])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="a $0", special_tokens=[("a", 7)])
    marked = folder.parent / "marked"
    tokenizer.save_pretrained(marked)
    assert tokenize(marked, ["What is 2 + 3?", CHAT]) == [[7, *before[0]], before[1]]


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        tokenize(tmp_path, ["What is 2 + 3?"])


def test_a_chat_for_a_tokenizer_without_a_template_is_refused(models, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "nvfp4")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert tokenize(tmp_path, ["What is 2 + 3?"])
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template: .*\. One is needed"):
        tokenize(tmp_path, ["What is 2 + 3?", CHAT])


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        ("{{ raise_exception('System role not supported') }}", CHAT),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": 3}]),
        ("{{ messages[0].role.upper() }}", [{"content": "x"}]),
    ],
)
def test_a_chat_that_the_template_refuses(models, tmp_path, template, chat):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "nvfp4")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer refuses .*content.* chats as its template knows them, are"):
        tokenize(tmp_path, [chat])


@pytest.mark.parametrize(
    "prompt", ["half of a pair: \ud83d", [{"role": "user", "content": "\ud83d"}]], ids=["text", "chat"]
)
def test_text_that_is_no_unicode_is_refused(models, prompt):
    with pytest.raises(ValueError, match=r"the tokenizer refuses .*\\ud83d.*\. Unicode text, and"):
        tokenize(models / "nvfp4", [prompt])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"version": "1.'),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "[]"),
        ("config.json", '{"model_type": "qwen2", "num_hidden_layers": 1, "num_key_value_heads": "x"}'),
        ("config.json", '{"model_type": "qwen2", "dtype": []}'),
    ],
    ids=["cut", "lacking", "list", "config", "dtype"],
)
def test_a_damaged_file_of_the_tokenizer_is_named(models, tmp_path, name, content):
    folder = shutil.copytree(models / "bf16", tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(
        ValueError, match=rf"^the tokenizer or config\.json cannot be read: {folder} \(\w+Error\(.*\. Down"
    ):
        tokenize(folder, ["What is 2 + 3?"])


@pytest.fixture
def two(monkeypatch):
    """Two and six tokens, whatever is asked for."""
    monkeypatch.setattr(prompts, "tokenize", lambda *_: [[1, 2], [1, 2, 3, 4, 5, 319]])


@pytest.mark.parametrize(
    ("positions", "most", "length", "printed"),
    [(4, 3, 3, ""), (None, 5, 5, ""), (4, 5, 4, "1 of 2 texts are cut: the model has 4 positions\n"), (6, 9, 6, "")],
)
def test_texts_end_where_positions_do_and_that_is_told(models, two, capsys, positions, most, length, printed):
    source = replace(open_source(models / "bf16"), config={"max_position_embeddings": positions})
    assert tokens_of(source, [], most) == [[1, 2], [1, 2, 3, 4, 5, 319][:length]]
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("positions", ["512", 0, 1, True, 5.0, [4]])
def test_positions_that_are_no_number_are_refused(models, two, positions):
    source = replace(open_source(models / "bf16"), config={"max_position_embeddings": positions})
    with pytest.raises(ValueError, match=r"^config\.json has no number of positions: max_position_embeddings=.* in /"):
        tokens_of(source, [], 9)


def test_a_tokenizer_of_another_model_is_refused(models, two):
    source = open_source(models / "bf16")
    small = replace(source, specs={prompts.EMBEDDING: TensorSpec("BF16", (319, 8))})
    with pytest.raises(ValueError, match=r"^the tokenizer is of another model: it gives token 319, .* has 319 rows\."):
        tokens_of(small, [], 9)
    assert tokens_of(replace(source, specs={}), [], 9)  # by another name
