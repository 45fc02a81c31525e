"""Requests that begin together: engines of four-token prompts, 64 at a time, whose answers end at different steps."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

AT_ONCE, INTERVAL = 64, 16
OURS = "verl_qerl.vllm_plugin.scheduler.scheduler"


def scheduler_of(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def steps_of(engine, lengths, prompt=4):
    """For each step: how many requests began, and how many ran. And the answers."""
    from vllm import SamplingParams

    scheduler = scheduler_of(engine)
    found, schedule = [], scheduler.schedule

    def watched(*args):
        output = schedule(*args)
        if output.total_num_scheduled_tokens:
            found.append((len(output.scheduled_new_reqs), len(output.num_scheduled_tokens)))
        return output

    scheduler.schedule = watched
    prompts = [{"prompt_token_ids": [1 + i % 60] * prompt} for i in range(len(lengths))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0, detokenize=False) for n in lengths]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    scheduler.schedule = schedule
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return found, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def engines(vllm, model_dir):
    def start(**options):
        return vllm.LLM(
            str(model_dir("qwen2")), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
            max_num_seqs=AT_ONCE, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False, **options,
        )  # fmt: skip

    interval = {"prefill_schedule_interval": INTERVAL}
    return {
        "stock": start(**interval),  # vLLM's own scheduler obeys it in data-parallel engines alone
        "ours": start(scheduler_cls=OURS, **interval),
        "small": start(scheduler_cls=OURS, max_num_batched_tokens=64, **interval),
        "at once": start(scheduler_cls=OURS),
    }


LENGTHS = [20 + 37 * i % 101 for i in range(160)]  # at nearly every step one ends


def joins(steps):
    """Steps in which some begin beside others."""
    return [index for index, (began, ran) in enumerate(steps) if 0 < began < ran]


def test_they_begin_together(engines):
    stock, _ = steps_of(engines["stock"], LENGTHS)
    ours, _ = steps_of(engines["ours"], LENGTHS)
    assert len(joins(stock)) > 3 * len(joins(ours))
    gaps = [there - here for here, there in itertools.pairwise(joins(ours))]
    assert set(gaps) == {INTERVAL}
    assert len(ours) < 1.1 * len(stock)
    assert type(scheduler_of(engines["ours"]).kv_cache_manager).__name__ == "RoomyKVCacheManager"


def test_answers_are_the_same(engines):
    assert steps_of(engines["ours"], LENGTHS)[1] == steps_of(engines["stock"], LENGTHS)[1]


def test_without_an_interval_they_begin_when_there_is_room(engines):
    assert steps_of(engines["at once"], LENGTHS) == steps_of(engines["stock"], LENGTHS)


def test_prompts_that_do_not_fit_into_a_step_follow_in_the_next(engines):
    steps, _ = steps_of(engines["small"], [60] * 48, prompt=16)
    began = [index for index, (some, _) in enumerate(steps) if some]
    assert began[-1] > 12  # of 64 tokens
    assert all(there - here <= 2 for here, there in itertools.pairwise(began))


def test_few_that_run_are_joined_at_once(vllm, engines):
    engine = engines["ours"].llm_engine
    scheduler = scheduler_of(engines["ours"])

    def add(name, count):
        params = vllm.SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, detokenize=False)
        for index in range(count):
            engine.add_request(f"{name}-{index}", {"prompt_token_ids": [3, 4, 5]}, params)

    def step():
        engine.step()
        return len(scheduler.running), len(scheduler.waiting)

    add("first", 20)
    assert step() == (20, 0)
    add("second", 12)
    assert step() == (32, 0)
    add("third", 8)
    assert [step() for _ in range(INTERVAL)] == [(32, 8)] * (INTERVAL - 1) + [(40, 0)]
    while engine.has_unfinished_requests():
        engine.step()


def test_an_engine_that_schedules_ahead_keeps_doing_so(monkeypatch):
    from verl_qerl.vllm_plugin import scheduler

    made, stocks = [], ["Scheduler", "AsyncScheduler"]
    gathering = ["GatheringScheduler", "AsyncGatheringScheduler"]
    for kind in (*stocks, *gathering):
        monkeypatch.setattr(
            scheduler, kind, lambda kind=kind, **_: made.append(kind) or SimpleNamespace(kv_cache_manager=None)
        )
    monkeypatch.setattr(scheduler, "use_roomy_blocks", lambda _: True)
    for ranks, interval, ahead in itertools.product((1, 2), (1, 8), (False, True)):
        config = SimpleNamespace(async_scheduling=ahead, prefill_schedule_interval=interval)
        parallel = SimpleNamespace(data_parallel_size=ranks)
        scheduler.scheduler(SimpleNamespace(scheduler_config=config, parallel_config=parallel))
    assert made == [*stocks, *gathering, *stocks * 2]
    monkeypatch.undo()
    assert issubclass(scheduler.AsyncGatheringScheduler, scheduler.AsyncScheduler)
