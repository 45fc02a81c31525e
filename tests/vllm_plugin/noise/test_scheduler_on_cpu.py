"""Answers stay out of the prefix cache where each sequence has noise of its own."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from verl_qerl.vllm_plugin.options import SCHEDULER

BLOCK = 16
OWN_DRAWS = {"verl_qerl": {"aqn": {"enabled": True, "draw": "sequence"}}}


def scheduler_of(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture(scope="module")
def start(vllm, model_dir):
    def start(**options):
        return vllm.LLM(
            str(model_dir("qwen2")), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256,
            max_num_seqs=12, block_size=BLOCK, kv_cache_memory_bytes=1 << 26, scheduler_cls=SCHEDULER, **options,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["", "ahead"])
def test_answers_stay_out_of_the_prefix_cache(vllm, start, options):
    engine = start(additional_config=OWN_DRAWS, **options)
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    params = vllm.SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.0, detokenize=False)
    prompt = [1 + i % 60 for i in range(2 * BLOCK + 5)]
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 96
    assert sum(block.block_hash is not None for block in pool.blocks) == 2
    params = vllm.SamplingParams(max_tokens=1, detokenize=False)

    def num_cached(ids: list[int], **more) -> int:
        params.extra_args = more
        return engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].num_cached_tokens

    assert num_cached(prompt + tokens) == 2 * BLOCK  # the prompt's
    assert num_cached(prompt + tokens) == (len(prompt) + 95) // BLOCK * BLOCK  # of that prompt
    # What has noise in its prompt is for itself.
    assert num_cached(prompt, aqn_row=3) == 0
    assert engine.reset_prefix_cache()
    assert [num_cached(prompt, aqn_row=3), num_cached(prompt)] == [0, 0]


def test_an_answer_that_is_computed_again_does_not_read_it_from_a_prompt(vllm, start):
    engine = start(additional_config=OWN_DRAWS)
    scheduler, prompt = scheduler_of(engine), [1 + i % 60 for i in range(2 * BLOCK + 5)]

    def add(name: str, ids: list[int], count: int) -> None:
        params = vllm.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False)
        engine.llm_engine.add_request(name, {"prompt_token_ids": ids}, params)

    add("answer", prompt, 96)
    for _ in range(3 * BLOCK):
        engine.llm_engine.step()
    (request,) = scheduler.running
    add("next turn", list(request.all_token_ids), 1)  # its prompt is in the cache, without noise
    engine.llm_engine.step()
    assert len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) > 3
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert scheduler.kv_cache_manager.get_computed_blocks(request)[1] <= len(prompt)
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()


@pytest.mark.parametrize("aqn", [{}, {"enabled": True}], ids=["no noise", "one draw"])
def test_the_cache_is_vllms_without_draws_of_answers(monkeypatch, aqn):
    from verl_qerl.vllm_plugin.noise import scheduler

    made = SimpleNamespace(kv_cache_manager=None)
    monkeypatch.setattr(scheduler, "Scheduler", lambda **_: made)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False), additional_config={"verl_qerl": {"aqn": aqn}}
    )
    assert scheduler.scheduler(config) is made  # whose cache would be changed otherwise: it is None


def test_an_engine_that_schedules_ahead_keeps_doing_so(monkeypatch):
    from verl_qerl.vllm_plugin.noise import scheduler

    made, kinds = [], ["Scheduler", "AsyncScheduler"]
    for kind in kinds:
        monkeypatch.setattr(
            scheduler, kind, lambda kind=kind, **_: made.append(kind) or SimpleNamespace(kv_cache_manager=None)
        )
    for ahead in (False, True):  # on a CPU vLLM itself never does
        scheduler.scheduler(SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead)))
    assert made == kinds
