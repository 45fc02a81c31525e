"""Which batches the faster sampler takes, that vLLM's has all others, and what an engine draws with it."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl_qerl.vllm_plugin.decode import sampling as sampling_module
from verl_qerl.vllm_plugin.decode.sampling import FusedSampler, use_fused_sampler, why_stock
from verl_qerl.vllm_plugin.log import say_once

ROWS, VOCABULARY = 3, 50


def processor(kind: type, **state: object) -> object:
    """One of vLLM's processors in a state, without the engine that it is made of."""
    made = kind.__new__(kind)
    vars(made).update({"min_p_count": 0, "biases": {}, "min_toks": {}} | state)
    return made


def metadata(*active: object, **changes: object) -> SamplingMetadata:
    idle = [processor(kind) for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)]
    zeros = torch.zeros(ROWS)
    state = {
        "temperature": torch.ones(ROWS),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros,
        "output_token_ids": [[] for _ in range(ROWS)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
    }
    for one in idle:  # vLLM asks them which kind they are
        one.is_argmax_invariant = lambda one=one: isinstance(one, MinPLogitsProcessor)
    for one in active:
        one.is_argmax_invariant = lambda: False
    return SamplingMetadata(**state | changes, logitsprocs=LogitsProcessors([*idle, *active]))


class Custom:
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


MASK = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
THINKING = SimpleNamespace(has_tracked_requests=lambda: True)
OTHERS = {
    "a request is greedy": metadata(all_random=False),
    "top_k or top_p": metadata(top_p=torch.full((ROWS,), 0.9)),
    "top_k or": metadata(top_k=torch.full((ROWS,), 5)),
    "has a seed": metadata(generators={0: torch.Generator()}),
    "penalties": metadata(no_penalties=False),
    "masked": metadata(allowed_token_ids_mask=MASK),
    "are masked": metadata(bad_words_token_ids={0: [[1]]}),
    "a logits processor": metadata(processor(MinPLogitsProcessor, min_p_count=1)),
    "logits processor": metadata(processor(LogitBiasLogitsProcessor, biases={0: {1: 2.0}})),
    "processor": metadata(processor(MinTokensLogitsProcessor, min_toks={0: (1, [], {2})})),
    "processor acts": metadata(Custom()),
    "thinking": metadata(thinking_budget_state_holder=THINKING),
    "more log-probs": metadata(max_num_logprobs=1),
    "more log-probs than": metadata(logprob_token_ids={0: [1]}),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_batches_are_vllms(reason, monkeypatch, caplog):
    """Each for its own reason, which is said once unless the batch is greedy throughout, as in validation."""
    assert reason in why_stock(OTHERS[reason], "processed_logprobs")
    monkeypatch.setattr(Sampler, "forward", lambda self, *args, **kwargs: (args, kwargs))
    say_once.cache_clear()
    sampler, logits = FusedSampler("processed_logprobs"), torch.zeros(ROWS, VOCABULARY)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert sampler(logits, OTHERS[reason]) == ((logits, OTHERS[reason], False), {})
    assert sum(reason in record.message for record in caplog.records) == 1


def test_nothing_is_said_of_the_batch_that_vllm_starts_with(monkeypatch, caplog):
    """As _dummy_sampler_run of its model runner makes it: neither greedy nor random, without processors."""
    monkeypatch.setattr(Sampler, "forward", lambda self, *args, **kwargs: "vLLM's")
    say_once.cache_clear()
    made_up = dataclasses.replace(metadata(all_random=False), logitsprocs=LogitsProcessors())
    assert FusedSampler("processed_logprobs")(torch.zeros(ROWS, VOCABULARY), made_up) == "vLLM's"
    assert not caplog.records


def test_greedy_batches_and_speculation(monkeypatch, caplog):
    monkeypatch.setattr(Sampler, "forward", lambda self, *args, **kwargs: (args, kwargs))
    say_once.cache_clear()
    sampler, logits = FusedSampler("processed_logprobs"), torch.zeros(ROWS, VOCABULARY)
    greedy = metadata(all_greedy=True, all_random=False)
    assert sampler(logits, greedy) == ((logits, greedy, False), {})
    assert not caplog.records
    assert sampler(logits, metadata(), predict_bonus_token=True)[0][2] is True
    assert "tokens are speculated" in caplog.text


@pytest.mark.parametrize(("mode", "asked", "taken"), [("raw_logprobs", 0, False), ("raw_logprobs", None, True)])
def test_log_probs_are_those_at_the_temperature(mode, asked, taken):
    """Those that verl asks for; raw ones of vLLM's default are of another temperature."""
    assert (why_stock(metadata(max_num_logprobs=asked), mode) is None) is taken
    assert why_stock(metadata(max_num_logprobs=asked), "processed_logprobs") is None


def test_what_is_drawn_has_vllms_shapes_and_numbers(monkeypatch):
    torch.manual_seed(0)
    counted = "vllm.v1.sample.sampler.batched_count_greater_than"  # compiled in vLLM, which takes long
    monkeypatch.setattr(counted, lambda x, values: (x >= values).sum(-1))
    logits = torch.randn(ROWS, VOCABULARY).bfloat16()
    temperature = torch.tensor([1.0, 0.5, 2.0])
    state = {"temperature": temperature, "max_num_logprobs": 0}
    ours = FusedSampler("processed_logprobs")(logits.clone(), metadata(**state))
    stock = Sampler("processed_logprobs")(logits.clone(), metadata(**state))
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        mine, theirs = (getattr(output.logprobs_tensors, name) for output in (ours, stock))
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert (ours.sampled_token_ids.shape, ours.sampled_token_ids.dtype) == (stock.sampled_token_ids.shape, torch.int32)
    tokens = ours.sampled_token_ids.long()
    log_probs = (logits.float() / temperature[:, None]).log_softmax(1)
    assert torch.allclose(ours.logprobs_tensors.logprobs, log_probs.gather(1, tokens), atol=1e-5)
    expected = (log_probs >= log_probs.gather(1, tokens)).sum(1)
    assert torch.equal(ours.logprobs_tensors.selected_token_ranks, expected)
    without = FusedSampler("processed_logprobs")(logits, metadata(max_num_logprobs=None))
    assert without.logprobs_tensors is None


V2 = type("Sampler", (), {"__module__": "vllm.v1.worker.gpu.sample.sampler", "use_fp64_gumbel": False})()


@pytest.mark.parametrize(
    ("sampler", "found", "remedy"),
    [
        (None, "NoneType", "Use a model and options that have it"),
        (Sampler(use_fp64_gumbel=True), "use_fp64_gumbel=True", "Leave it out"),
        (V2, "the engine is on vLLM's V2 model runner", "Set VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
    ids=["none", "float64", "V2"],
)
def test_another_sampler_is_kept_and_it_is_said(sampler, found, remedy, caplog):
    say_once.cache_clear()
    why = f"{found}. Accepted is the Sampler of vLLM's V1 model runner without use_fp64_gumbel. {remedy}"
    runner = SimpleNamespace(sampler=sampler, device=torch.device("cuda"))
    use_fused_sampler(runner)
    assert caplog.messages == [f"verl_qerl: vLLM's own sampler draws tokens: {why}."]
    assert type(sampler) is not FusedSampler


def test_the_samplers_module_tells_vllms_v2_model_runner():
    assert pytest.importorskip("vllm.v1.worker.gpu.sample.sampler").Sampler.__module__ == type(V2).__module__


def test_a_cpu_keeps_vllms_sampler():
    runner = SimpleNamespace(sampler=Sampler(), device=torch.device("cpu"))
    use_fused_sampler(runner)
    assert type(runner.sampler) is Sampler


@pytest.fixture(scope="module")
def fused_engine(start, packed_dir):
    options = {"logprobs_mode": "processed_logprobs", "seed": 7}
    with pytest.MonkeyPatch.context() as patch:  # on a CPU it is not faster, and vLLM's stays
        patch.setattr(sampling_module, "_ours_is_faster", lambda device: True)
        return start(packed_dir, aqn={}, **options)


def sample(vllm, engine, prompt, n=4, **options) -> list[tuple[list[int], list[float]]]:
    params = vllm.SamplingParams(max_tokens=3, n=n, logprobs=0, ignore_eos=True, **options)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    found = []
    for one in output.outputs:
        steps = zip(one.token_ids, one.logprobs, strict=True)
        found.append((list(one.token_ids), [entry[token].logprob for token, entry in steps]))
    return found


def test_an_engine_draws_with_it(vllm, fused_engine, prompt, monkeypatch):
    """Log-probs are those of the same tokens in a prompt, as far as bf16 has them alike in both passes."""
    calls, drawn = [], sampling_module.draw_tokens

    def counted(*args, **kwargs):
        calls.append(1)
        return drawn(*args, **kwargs)

    monkeypatch.setattr(sampling_module, "draw_tokens", counted)
    answers = sample(vllm, fused_engine, prompt, temperature=1.0)
    assert calls
    assert len({tuple(tokens) for tokens, _ in answers}) == 4
    for tokens, log_probs in answers:
        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
        (scored,) = fused_engine.generate([{"prompt_token_ids": [*prompt, *tokens]}], params, use_tqdm=False)
        pairs = zip(tokens, scored.prompt_logprobs[-len(tokens) :], strict=True)
        expected = torch.tensor([entry[token].logprob for token, entry in pairs])
        assert (torch.tensor(log_probs) - expected).abs().max() < 0.1
    calls.clear()
    seeded = [sample(vllm, fused_engine, prompt, temperature=1.0, seed=3) for _ in range(2)]
    assert seeded[0] == seeded[1]
    greedy = [sample(vllm, fused_engine, prompt, n=1, temperature=0.0) for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert not calls
