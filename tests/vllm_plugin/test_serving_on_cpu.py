"""vLLM without verl: the call that the documentation has, and bf16 models whose config.json says nothing."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("peft")

from verl_qerl.formats import FORMATS, get_format

ROOT = Path(__file__).parents[2]
PROMPT = {"prompt_token_ids": [1, 2, 3]}
LINEARS = ["q_proj", "v_proj", "down_proj"]


def test_the_call_of_the_documentation(vllm, model_dir, write_adapter, digests_in, monkeypatch):
    text = (ROOT / "verl_qerl" / "verl_plugin" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    folder = write_adapter("trained", LINEARS, 8)
    for there, here in (
        ("Qwen2.5-7B-Instruct", str(model_dir("qwen2"))),
        ("path/to/adapter", str(folder)),
        ('"What is 2 + 3?"', str(PROMPT)),
        ('dtype="bfloat16",', 'dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 26,'),  # small and soon
        ("SamplingParams(", "SamplingParams(temperature=0, ignore_eos=True, "),
    ):
        assert code.count(there) == 1, there
        code = code.replace(there, here)
    names: dict = {}
    exec(code, names)
    (with_adapter,) = names["answers"]
    (without,) = names["llm"].generate([PROMPT], vllm.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert len(with_adapter.outputs[0].token_ids) == 64
    assert with_adapter.outputs[0].token_ids != without.outputs[0].token_ids
    assert len(digests_in(names["llm"])) == 14


def test_the_loader_says_which_linears_stay_in_bf16(start, model_dir, digests_in):
    engine = start(model_dir("qwen2"), model_loader_extra_config={"ignore": ["lm_head", "re:.*down_proj"]})
    found = digests_in(engine)
    assert len(found) == 12
    assert not [name for name in found if name.endswith("down_proj")]


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_without_a_configuration_is_described_as_the_driver_does(form):
    from verl_qerl.vllm_plugin import PREFIX
    from verl_qerl.vllm_plugin.weights.quantization import CONFIGS

    kind = CONFIGS[f"{PREFIX}{form}"]
    default, described = kind(), kind.from_config(get_format(form).config())
    assert (default.follows_loader, described.follows_loader) == (True, False)
    for name in ("target_scheme_map", "ignore", "quant_format"):
        assert getattr(default, name) == getattr(described, name)
