"""Whose draw each token of a step gets: with a double of vLLM's model runner, and in engines."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_qerl.algos.aqn import AQNConfig

pytest.importorskip("vllm")
from verl_qerl.algos.aqn import FORCED_DRAW, FORCED_FROM, NUM_DRAWS
from verl_qerl.vllm_plugin.noise import noise_rows
from verl_qerl.vllm_plugin.noise.noise_rows import SCHEDULER, NoiseRows, check_draws


class Runner:
    """As much of vLLM's model runner as the rows are made of."""

    def __init__(self, tokens: int = 64, device: str = "cpu"):
        self.max_num_tokens, self.device = tokens, torch.device(device)
        self.requests, self.prepared = {}, []
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(16, np.int32), num_prompt_tokens=np.zeros(16, np.int32)
        )

    def batch(self, *requests: tuple[str, int, int]) -> None:
        """Of (name, tokens computed, tokens of the prompt) each."""
        batch = self.input_batch
        batch.req_ids = [name for name, _, _ in requests]
        for at, (name, computed, prompt) in enumerate(requests):
            batch.num_computed_tokens_cpu[at], batch.num_prompt_tokens[at] = computed, prompt
            self.requests.setdefault(name, SimpleNamespace(sampling_params=None))

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        self.prepared.append((scheduler_output, list(num_scheduled_tokens)))
        return "prepared"


def step(rows: NoiseRows, *scheduled: int) -> list[int]:
    """The rows of a step's tokens."""
    rows.fill(np.array(scheduled, np.int32))
    assert not rows.ids[sum(scheduled) :].any()  # padding
    return rows.ids[: sum(scheduled)].tolist()


@pytest.fixture
def runner():
    return Runner()


def test_prompts_are_clean_and_answers_have_a_row_each(runner):
    rows = NoiseRows(runner, "sequence")
    runner.batch(("a", 0, 3), ("b", 0, 4))
    assert step(rows, 3, 4) == [0] * 7
    runner.batch(("a", 3, 3), ("b", 4, 4))
    a, b = step(rows, 1, 1)
    assert a != b
    assert min(a, b) > 0
    # A third one begins, in two chunks; one that ends leaves its place to the last.
    runner.batch(("a", 4, 3), ("b", 5, 4), ("c", 0, 6))
    assert step(rows, 1, 1, 4) == [a, b, 0, 0, 0, 0]
    del runner.requests["a"]
    runner.batch(("c", 4, 6), ("b", 6, 4))
    assert step(rows, 2, 1) == [0, 0, b]
    runner.batch(("c", 6, 6), ("b", 7, 4))
    c, again = step(rows, 1, 1)
    assert again == b
    assert c not in (0, b)


@pytest.mark.parametrize("draw", ["sequence", "token"])
def test_after_a_preemption_tokens_have_the_rows_they_had(runner, draw):
    rows = NoiseRows(runner, draw)
    drawn = []
    for computed in range(3, 9):
        runner.batch(("other", 20 + computed, 5), ("a", computed, 3))
        drawn.append(step(rows, 1, 1)[1])
    runner.batch(("other", 40, 5))
    step(rows, 1)
    runner.batch(("other", 41, 5), ("a", 0, 3))  # all of it is computed again, with the tokens of its answer
    assert step(rows, 1, 9)[1:] == [0, 0, 0, *drawn]
    assert min(drawn) > 0
    assert (len(set(drawn)) == 1) is (draw == "sequence")


def test_as_many_sequences_as_there_are_draws_have_one_each(runner):
    runner.max_num_tokens = 2 * NUM_DRAWS
    rows = NoiseRows(runner, "sequence")
    batch = runner.input_batch
    batch.num_computed_tokens_cpu = batch.num_prompt_tokens = np.full(2 * NUM_DRAWS, 5, np.int32)
    names = [f"request-{i}" for i in range(2 * NUM_DRAWS)]
    runner.batch(*[(name, 5, 5) for name in names[:NUM_DRAWS]])
    first = step(rows, *[1] * NUM_DRAWS)
    assert sorted(first) == list(range(1, NUM_DRAWS + 1))
    runner.batch(*[(name, 5, 5) for name in names])
    found = step(rows, *[1] * 2 * NUM_DRAWS)
    assert found[:NUM_DRAWS] == first
    assert sorted(found[NUM_DRAWS:]) == sorted(first)


def test_ranks_agree_and_engines_differ(runner):
    others = [Runner() for _ in range(3)]
    drawn = []
    for one, prefix in zip([runner, *others], ["x", "x", "y", "z"], strict=True):
        one.batch(*[(f"{prefix}-{i}", 5, 5) for i in range(8)])
        drawn.append(step(NoiseRows(one, "sequence"), *[1] * 8))
    assert drawn[0] == drawn[1]
    # Engines that get the answers of one prompt at the same time do not all begin with the same draw.
    assert len({found[0] for found in drawn}) == 3


def test_each_token_has_its_own_draw(runner):
    runner.max_num_tokens = 4096
    rows = NoiseRows(runner, "token")
    runner.batch(("a", 10, 10), ("b", 10, 10))
    found = step(rows, 2000, 2000)
    a, b = np.array(found[:2000]), np.array(found[2000:])
    for one in (a, b):
        counts = np.bincount(one, minlength=NUM_DRAWS + 1)
        assert counts[0] == 0
        assert len(counts) == NUM_DRAWS + 1
        assert counts[1:].min() > 2000 / NUM_DRAWS / 3
    assert (a == b).mean() < 0.05  # 1 / NUM_DRAWS by chance
    assert (a[1:] == a[:-1]).mean() < 0.05


def test_a_request_may_ask_for_a_row(runner):
    for draw in ("sequence", "token"):
        rows = NoiseRows(runner, draw)
        runner.requests["scored"] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={FORCED_DRAW: 7}))
        runner.requests["clean"] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={FORCED_DRAW: 0}))
        runner.batch(("scored", 0, 3), ("clean", 6, 4), ("a", 2, 3))
        found = step(rows, 4, 1, 2)
        assert found[:6] == [7, 7, 7, 7, 0, 0]
        assert found[6] > 0
        asked = SimpleNamespace(extra_args={FORCED_DRAW: 7, FORCED_FROM: 3})
        runner.requests["answer"] = SimpleNamespace(sampling_params=asked)
        runner.batch(("answer", 0, 6))
        assert step(rows, 5) == [0, 0, 0, 7, 7]
        runner.batch(("answer", 5, 6))
        assert step(rows, 1) == [7]
    for row in (-1, NUM_DRAWS + 1, "1", True):
        runner.requests["bad"] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={FORCED_DRAW: row}))
        runner.batch(("bad", 0, 3))
        with pytest.raises(
            ValueError, match=rf"^extra_args\['{FORCED_DRAW}'\]={row!r} is no row .* to {NUM_DRAWS}\. Set"
        ):
            NoiseRows(runner, "sequence").fill(np.array([3]))


def test_the_runner_is_asked_before_each_step(runner):
    rows = NoiseRows(runner, "sequence")
    rows.watch()
    runner.batch(("a", 5, 5))
    assert runner._prepare_inputs("what vLLM scheduled", np.array([1])) == "prepared"
    assert runner.prepared == [("what vLLM scheduled", [1])]
    assert rows.ids[0] > 0


def config(**changes):
    parallel = {"pipeline_parallel_size": 1, "use_ubatching": False, "prefill_context_parallel_size": 1}
    given = {"scheduler_cls": SCHEDULER, "enable_prefix_caching": True, "speculative_config": None} | changes
    backend = given.get("using_transformers_backend", False)
    return SimpleNamespace(
        model_config=SimpleNamespace(using_transformers_backend=lambda: backend),
        parallel_config=SimpleNamespace(**{name: given.get(name, value) for name, value in parallel.items()}),
        cache_config=SimpleNamespace(enable_prefix_caching=given["enable_prefix_caching"]),
        scheduler_config=SimpleNamespace(scheduler_cls=given["scheduler_cls"]),
        speculative_config=given["speculative_config"],
        kv_transfer_config=given.get("kv_transfer_config"),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_config": "ngram"}, "speculative decoding"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"use_ubatching": True}, "microbatches"),
        ({"kv_transfer_config": "OffloadingConnector"}, "kv_offloading_size"),
        ({"using_transformers_backend": True}, "Transformers backend"),
        ({"scheduler_cls": None}, "scheduler_cls=None: its prefix cache"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, said):
    aqn = AQNConfig(enabled=True, draw="sequence")
    with pytest.raises(ValueError, match=rf"^aqn\.draw=sequence .*{said}.* Accepted is .* [Ss]et "):
        check_draws(config(**changes), aqn)
    check_draws(config(**changes), AQNConfig(enabled=True))
    check_draws(config(), aqn)
    check_draws(config(scheduler_cls=None, enable_prefix_caching=False), aqn)


def test_the_other_runner_is_refused(runner):
    kind = type("GPUModelRunner", (Runner,), {"__module__": "vllm.v1.worker.gpu.model_runner"})
    with pytest.raises(ValueError, match=r"^aqn\.draw=token .*V2 model runner.* Set VLLM_USE_V2_MODEL_RUNNER=0"):
        NoiseRows(kind(), "token")


# In engines. Greedy, so that sequences of one prompt differ by their draws alone.

SIGMA = 5e-2
LENGTH = 24


@pytest.fixture(scope="module")
def engines(start, packed_dir):
    """By their draw; one of `sequence` and of `token` is given back without noise."""
    return {
        draw: start(packed_dir, aqn={"enabled": True, "draw": draw}, scheduler_cls=SCHEDULER, max_num_seqs=8)
        for draw in ("batch", "sequence", "token")
    }


def set_noise(engine, sigma: float, step: int = 1) -> None:
    ((num_norms, _),) = engine.collective_rpc("qerl_set_noise", args=(sigma, step))
    assert num_norms == 4
    assert engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def answer(vllm, prompt):
    """[n, LENGTH] log-probs of the tokens of greedy answers to one prompt; the tokens."""

    def ask(engine, n: int = 4, **options):
        params = vllm.SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=0, ignore_eos=True, **options)
        outputs = engine.generate([{"prompt_token_ids": prompt}] * n, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        steps = [
            [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)] for one in answers
        ]
        return torch.tensor(steps, dtype=torch.float64), [list(one.token_ids) for one in answers]

    return ask


def test_sequences_of_one_prompt_have_draws_of_their_own(engines, answer):
    engine = engines["sequence"]
    clean, _ = answer(engine)
    assert torch.equal(clean, clean[:1].expand_as(clean))
    set_noise(engine, SIGMA)
    found, _ = answer(engine)
    assert torch.equal(found[:, 0], clean[:, 0])  # of the prompt's last token, which is clean
    second = found[:, 1].tolist()
    assert len(set(second)) == len(second)
    assert clean[0, 1] not in second
    set_noise(engine, 0.0)
    assert torch.equal(answer(engine)[0], clean)


def test_with_one_draw_for_all_sequences_of_one_prompt_are_the_same(engines, answer):
    engine = engines["batch"]
    clean, _ = answer(engine)
    set_noise(engine, SIGMA)
    found, _ = answer(engine)
    assert torch.equal(found, found[:1].expand_as(found))
    assert not torch.equal(found[:, 0], clean[:, 0])  # the prompt has the noise too
    set_noise(engine, 0.0)


@pytest.mark.parametrize("draw", ["sequence", "token"])
def test_without_noise_answers_are_those_of_one_draw_and_of_no_noise(engines, start, packed_dir, answer, draw):
    expected = answer(engines["batch"])
    found = answer(engines[draw])
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("draw", ["sequence", "token"])
@pytest.mark.parametrize("row", [1, 5])
def test_a_row_is_the_model_with_its_draw(engines, vllm, prompt, draw, row):
    """Of a whole request, prompt included, against the engine whose norms have this draw."""

    def place(worker, row: int) -> None:
        from verl_qerl.algos.aqn import NUM_DRAWS, draw_noise

        for name, norm in worker._qerl_noise._norms.items():
            size = norm.weight.numel()
            drawn = draw_noise(0, 3, name, NUM_DRAWS * size).view(NUM_DRAWS, size)
            norm.weight.data.copy_(worker._qerl_noise.clean[name] + 5e-2 * drawn[row - 1])

    def score(engine, **options):
        params = vllm.SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, logprobs=0, **options)
        (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answer = output.outputs[0]
        pairs = [*zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        pairs += zip(answer.token_ids, answer.logprobs, strict=True)
        return torch.tensor([found[token].logprob for token, found in pairs])

    set_noise(engines[draw], SIGMA, 3)
    found = score(engines[draw], extra_args={FORCED_DRAW: row})
    clean = score(engines[draw])
    set_noise(engines[draw], 0.0)
    engines["batch"].collective_rpc(place, args=(row,))
    assert engines["batch"].reset_prefix_cache()
    expected = score(engines["batch"])
    set_noise(engines["batch"], 0.0)
    assert torch.equal(found, expected)
    assert torch.equal(clean[:200], score(engines["batch"])[:200])  # prompts are clean
    assert not torch.equal(found[:200], clean[:200])


def test_an_answer_is_scored_as_it_was_sampled_behind_a_clean_prompt(engines, vllm, prompt):
    engine = engines["sequence"]

    def ask(tokens, length, row):
        asked = {FORCED_DRAW: row, FORCED_FROM: len(prompt)}
        params = vllm.SamplingParams(
            temperature=0, max_tokens=length, prompt_logprobs=0, logprobs=0, ignore_eos=True, extra_args=asked
        )
        (output,) = engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return output

    set_noise(engine, SIGMA, 3)
    answer = ask(prompt, 8, 5).outputs[0]
    sampled = torch.tensor(
        [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    )
    whole = [*prompt, *answer.token_ids]
    scores = [ask(whole, 1, row).prompt_logprobs[len(prompt) :] for row in (5, 0)]
    set_noise(engine, 0.0)
    noisy, clean = (
        torch.tensor([found[token].logprob for token, found in zip(answer.token_ids, score, strict=True)])
        for score in scores
    )
    assert noisy[0] == clean[0]  # of the prompt's last token
    assert (noisy - sampled).abs().mean() < (clean - sampled).abs().mean() / 5


def test_tokens_have_draws_of_their_own(engines, answer):
    engine = engines["token"]
    clean, _ = answer(engine)
    set_noise(engine, SIGMA)
    found, _ = answer(engine)
    set_noise(engine, 0.0)
    assert torch.equal(found[:, 0], clean[:, 0])
    # Two tokens of a step have the same one of NUM_DRAWS now and then, two answers do not.
    assert len({tuple(one) for one in found.tolist()}) == 4


@pytest.fixture
def same_rows(monkeypatch):
    """Requests of the same name get the same rows: vLLM puts random characters behind it."""
    by_name = SimpleNamespace(crc32=lambda name: zlib.crc32(name.rpartition(b"-")[0]))
    monkeypatch.setattr(noise_rows, "zlib", by_name)


@pytest.mark.parametrize("draw", ["sequence", "token"])
def test_an_answer_that_is_computed_again_keeps_its_draws(engines, vllm, prompt, same_rows, monkeypatch, draw):
    engine = engines[draw]
    set_noise(engine, SIGMA)

    def run(stops_at: int = 0) -> torch.Tensor:
        assert engine.reset_prefix_cache()
        params = vllm.SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=0, ignore_eos=True)
        for name in ("first", "second"):
            engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        done, steps = {}, 0
        while engine.llm_engine.has_unfinished_requests():
            done |= {one.request_id: one.outputs[0] for one in engine.llm_engine.step() if one.finished}
            steps += 1
            if steps == stops_at:
                assert engine.reset_prefix_cache(reset_running_requests=True)
        answers = [done[name] for name in ("first", "second")]
        return torch.tensor([[next(iter(one.values())).logprob for one in answer.logprobs] for answer in answers])

    whole, again = run(), run(stops_at=12)
    fill = NoiseRows.fill

    def take_for_prompts(rows, num_scheduled):
        lengths = rows._runner.input_batch.num_prompt_tokens
        saved = lengths.copy()
        lengths[: len(num_scheduled)][num_scheduled > 1] = 1000
        fill(rows, num_scheduled)
        lengths[:] = saved

    monkeypatch.setattr(NoiseRows, "fill", take_for_prompts)
    clean = run(stops_at=12)
    set_noise(engine, 0.0)
    assert torch.equal(whole[:, :12], again[:, :12])
    assert (whole - again).abs().mean() < (whole - clean).abs().mean() / 5
