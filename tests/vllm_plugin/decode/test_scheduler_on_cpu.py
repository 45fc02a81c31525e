"""Every step schedules what vLLM's does: blocks, cached prefixes, preemptions; and what has room is not asked about."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

OURS = "verl_qerl.vllm_plugin.decode.scheduler.scheduler"
BLOCK = 16


def scheduler_of(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture(scope="module")
def start(vllm, model_dir):
    def start(**options):
        return vllm.LLM(
            str(model_dir("qwen2")), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256,
            max_num_seqs=12, block_size=BLOCK, kv_cache_memory_bytes=1 << 26, **options,
        )  # fmt: skip

    return start


def steps_of(engine, requests):
    """Of each step: new requests and their blocks, what others got, who was preempted or resumed, what is cached."""
    from vllm import SamplingParams

    scheduler, found = scheduler_of(engine), []
    schedule = scheduler.schedule

    def watched(*args):
        output = schedule(*args)
        others = output.scheduled_cached_reqs
        pool = scheduler.kv_cache_manager.block_pool
        found.append(
            {
                "began": [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs],
                "others": list(zip(others.req_ids, others.new_block_ids, others.num_computed_tokens, strict=True)),
                "resumed": sorted(others.resumed_req_ids),
                "tokens": dict(output.num_scheduled_tokens),
                "free": pool.get_num_free_blocks(),
                "cached": sum(block.block_hash is not None for block in pool.blocks),
            }
        )
        return output

    scheduler.schedule = watched
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0, detokenize=False) for _, n in requests]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    scheduler.schedule = schedule
    return renamed(found), [list(output.outputs[0].token_ids) for output in outputs]


def renamed(steps):
    """Requests by the order in which they began: their names are random."""
    names = {name: index for index, name in enumerate(one[0] for step in steps for one in step["began"])}

    def of(value):
        if isinstance(value, dict):
            return {of(key): of(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [of(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    return of(steps)


# Groups that share prompts, whole blocks of them and not; answers that end within blocks and with them.
REQUESTS = [([1 + (i // 4 * 7 + j) % 60 for j in range(13 + i // 4 * 9)], 3 + 37 * i % 61) for i in range(32)]
LONG = [([1 + (i + j) % 60 for j in range(30)], 90) for i in range(12)]


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ({}, REQUESTS),
        ({"enable_prefix_caching": False}, REQUESTS),
        ({"async_scheduling": True}, REQUESTS),
        ({"num_gpu_blocks_override": 40}, LONG),  # all of them would take 96
    ],
    ids=["prefixes", "no prefixes", "ahead", "preemption"],
)
def test_steps_are_those_of_vllm(start, options, requests):
    stock, ours = start(**options), start(scheduler_cls=OURS, **options)
    names = [type(scheduler_of(engine).kv_cache_manager).__name__ for engine in (stock, ours)]
    assert names == ["KVCacheManager", "RoomyKVCacheManager"]
    for _ in range(2):  # the second time with what the first one left in the cache
        (expected, tokens), (found, same) = steps_of(stock, requests), steps_of(ours, requests)
        assert found == expected
        assert same == tokens
    if "num_gpu_blocks_override" in options:
        assert any(step["resumed"] for step in found)


def test_vllm_is_asked_only_where_a_block_is_full(start, monkeypatch):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    engine, asked = start(scheduler_cls=OURS), []
    allocate = KVCacheManager.allocate_slots
    monkeypatch.setattr(
        KVCacheManager, "allocate_slots", lambda *args, **kw: (asked.append(1), allocate(*args, **kw))[1]
    )
    steps, _ = steps_of(engine, [([5] * 20, 96)])
    assert len(steps) > 90
    # To begin; for each block that gets full, and for the next one.
    assert 1 + 96 // BLOCK <= len(asked) <= 2 + 2 * (96 // BLOCK)


OWN_DRAWS = {"verl_qerl": {"aqn": {"enabled": True, "draw": "sequence"}}}


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["", "ahead"])
def test_with_draws_of_their_own_answers_stay_out_of_the_prefix_cache(vllm, start, monkeypatch, options):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    engine, asked = start(scheduler_cls=OURS, additional_config=OWN_DRAWS, **options), []
    allocate = KVCacheManager.allocate_slots
    monkeypatch.setattr(
        KVCacheManager, "allocate_slots", lambda *args, **kw: (asked.append(1), allocate(*args, **kw))[1]
    )
    prompt = [1 + i % 60 for i in range(2 * BLOCK + 5)]
    steps, (tokens,) = steps_of(engine, [(prompt, 96)])
    assert {step["cached"] for step in steps} == {2}
    assert len(asked) <= 2 + 96 // BLOCK
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


def test_tokens_of_a_draft_get_their_blocks(vllm, start):
    engine = start(scheduler_cls=OURS)
    scheduler, params = scheduler_of(engine), vllm.SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    engine.llm_engine.add_request("a", {"prompt_token_ids": [5] * 20}, params)
    for _ in range(3):
        engine.llm_engine.step()
    (request,), manager = scheduler.running, scheduler.kv_cache_manager
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=0) is manager.empty_kv_cache_blocks
    assert len(manager.allocate_slots(request, 1, num_lookahead_tokens=BLOCK).blocks[0]) == 1


def test_caches_of_other_kinds_are_left_alone(start):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from verl_qerl.vllm_plugin.decode.scheduler import RoomyKVCacheManager, use_roomy_blocks

    manager = scheduler_of(start()).kv_cache_manager
    kept = manager.coordinator.single_type_managers
    for kinds in ((), kept * 2, (SimpleNamespace(),)):
        manager.coordinator.single_type_managers = kinds
        assert not use_roomy_blocks(manager)
        assert type(manager) is KVCacheManager
    manager.coordinator.single_type_managers = kept
    assert use_roomy_blocks(manager)
    assert type(manager) is RoomyKVCacheManager
    assert not use_roomy_blocks(manager)  # it is one


def test_an_engine_that_schedules_ahead_keeps_doing_so(monkeypatch):
    from verl_qerl.vllm_plugin.decode import scheduler

    made, kinds = [], ["Scheduler", "AsyncScheduler"]
    for kind in kinds:
        monkeypatch.setattr(
            scheduler, kind, lambda kind=kind, **_: made.append(kind) or SimpleNamespace(kv_cache_manager=None)
        )
    monkeypatch.setattr(scheduler, "use_roomy_blocks", lambda _: True)
    for ahead in (False, True):  # on a CPU vLLM itself never does
        scheduler.scheduler(SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead)))
    assert made == kinds
