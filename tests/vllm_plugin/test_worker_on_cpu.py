"""Noise in engines: what it changes, what undoes it, and which norms of which model family get it."""

from types import SimpleNamespace

import pytest
import torch
from qerl_testing import float32_norms

import verl_qerl
from verl_qerl.algos.aqn import draw_noise
from verl_qerl.vllm_plugin import worker as worker_module
from verl_qerl.vllm_plugin.options import rollout_options
from verl_qerl.vllm_plugin.worker import PREPARED, RolloutWorkerExtension, prepare_model

NAMES = [
    f"model.layers.{index}.{kind}" for index in range(2) for kind in ("input_layernorm", "post_attention_layernorm")
]


@pytest.fixture
def noisy(engine):
    """The shared engine, given back without noise and with an empty prefix cache."""
    engine.reset_prefix_cache()
    yield engine
    set_noise(engine, 0.0)


def set_noise(engine, sigma: float, step: int = 1) -> None:
    ((num_norms, _),) = engine.collective_rpc("qerl_set_noise", args=(sigma, step))
    assert num_norms == 4
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("sigma", [1e-2, 5e-4], ids=str)
def test_noise_changes_log_probs_and_zero_restores_them(noisy, prompt_log_probs, generate, sigma):
    clean, steps = prompt_log_probs(noisy), generate(noisy)[0]
    set_noise(noisy, sigma)
    found = prompt_log_probs(noisy)
    # Most of 199 positions, not one that happens to flip.
    assert torch.count_nonzero(found - clean) > 150
    assert generate(noisy)[0] != steps
    set_noise(noisy, 0.0)
    assert torch.equal(prompt_log_probs(noisy), clean)
    assert generate(noisy)[0] == steps


def test_noise_grows_with_sigma_and_changes_with_the_step(noisy, prompt_log_probs):
    clean = prompt_log_probs(noisy)
    found = {}
    for sigma, step in ((5e-2, 1), (5e-3, 1), (5e-2, 2)):
        set_noise(noisy, sigma, step)
        found[sigma, step] = prompt_log_probs(noisy)
    assert (found[5e-2, 1] - clean).norm() > 3 * (found[5e-3, 1] - clean).norm()
    assert not torch.equal(found[5e-2, 1], found[5e-2, 2])


def test_another_engine_with_the_same_options_samples_with_the_same_noise(noisy, start, packed_dir, prompt_log_probs):
    other = start(packed_dir, aqn={"enabled": True})
    for engine in (noisy, other):
        set_noise(engine, 1e-2, 5)
    (first,), (second,) = (engine.collective_rpc(float32_norms) for engine in (noisy, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert torch.equal(prompt_log_probs(noisy), prompt_log_probs(other))


def test_the_norms_hold_clean_weight_plus_sigma_times_the_draw(noisy):
    (clean,) = noisy.collective_rpc(float32_norms)
    assert list(clean) == NAMES
    set_noise(noisy, 1e-2, 3)
    (found,) = noisy.collective_rpc(float32_norms)
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, clean[name] + 1e-2 * draw_noise(0, 3, name, 128))


def test_without_a_reset_of_the_prefix_cache_old_keys_and_values_are_used(noisy, generate):
    clean, _ = generate(noisy)
    noisy.collective_rpc("qerl_set_noise", args=(5e-2, 1))
    stale, num_cached = generate(noisy)
    assert num_cached == 128
    assert noisy.reset_prefix_cache()
    fresh, num_cached = generate(noisy)
    assert num_cached == 0
    assert stale not in (clean, fresh)


def test_after_a_full_sync_recapture_puts_the_noise_on_the_new_weights(noisy, prompt_log_probs):
    def sync(worker, value: float) -> None:
        for norm in worker._qerl_noise._norms.values():
            norm.weight.data.fill_(value)
        worker._qerl_noise.recapture()

    clean = prompt_log_probs(noisy)
    set_noise(noisy, 1e-2, 2)
    on_ones = prompt_log_probs(noisy)  # transformers starts norms at 1
    noisy.collective_rpc(sync, args=(0.5,))
    assert not torch.equal(prompt_log_probs(noisy), on_ones)
    noisy.collective_rpc(sync, args=(1.0,))
    assert torch.equal(prompt_log_probs(noisy), on_ones)
    set_noise(noisy, 0.0)
    assert torch.equal(prompt_log_probs(noisy), clean)


def test_an_engine_without_noise_says_how_to_get_it(packed_engine):
    with pytest.raises(ValueError, match=r"started without noise\. .* Start it with `\+aqn\.enabled=true`\."):
        packed_engine.collective_rpc("qerl_set_noise", args=(1e-2, 1))
    assert packed_engine.collective_rpc(float32_norms) == [{}]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_norms_of_the_other_families(start, model_dir, family):
    engine = start(model_dir(family), aqn={"enabled": True})
    before = engine.collective_rpc(norms_of)[0]
    set_noise(engine, 1e-2)
    after = engine.collective_rpc(norms_of)[0]
    assert sorted(name for name in before if not torch.equal(before[name], after[name])) == sorted(NAMES)
    others = {name.rpartition(".")[2] for name in set(before) - set(NAMES)}
    assert others == ({"norm", "q_norm", "k_norm"} if family == "qwen3" else {"norm"})


def norms_of(worker) -> dict[str, torch.Tensor]:
    named = worker.model_runner.get_model().named_parameters()
    return {name.removesuffix(".weight"): parameter.data.clone() for name, parameter in named if "norm" in name}


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("qwen2", "'input_layernorm', 'norm', 'post_attention_layernorm'"),
        ("qwen3", "'input_layernorm', 'k_norm', 'norm', 'post_attention_layernorm', 'q_norm'"),
    ],
)
def test_an_unknown_target_names_the_norms_there_are(start, model_dir, family, norms):
    with pytest.raises(ValueError, match=rf"has no norms named \['ln_f'\]\. Its norms are \[{norms}\]\."):
        start(model_dir(family), aqn={"enabled": True, "targets": ["input_layernorm", "ln_f"]})


def test_a_bad_option_stops_the_engine(start, model_dir):
    with pytest.raises(ValueError, match=r"aqn\.sigma_start=2 is no value of this option"):
        start(model_dir("qwen2"), aqn={"enabled": True, "sigma_start": 2})


class Worker:
    """As much of a vLLM worker as the extension sees."""

    def __init__(self, model):
        self.model, self.calls = model, []
        self.model_runner, self.device = self, torch.device("cpu")

    def get_model(self):
        return self.model

    def load_model(self, *args, **kwargs):
        self.calls.append((args, kwargs))


class Config:
    def __init__(self, additional_config):
        self.additional_config, self.lora_config = additional_config, None
        family = SimpleNamespace(model_type="qwen2")
        self.model_config = SimpleNamespace(hf_text_config=family, enable_sleep_mode=False)
        self.parallel_config = SimpleNamespace(use_ubatching=False)


@pytest.mark.parametrize("config", [Config(None), Config({}), Config({"verl_qerl": {}})], ids=lambda c: str(c)[:8])
def test_without_options_a_model_stays_as_it_is(config):
    model = torch.nn.ModuleDict({"input_layernorm": torch.nn.LayerNorm(4, bias=False)})
    before = repr(model), [(name, one.dtype, one.data_ptr()) for name, one in model.named_parameters()]
    worker = Worker(model)
    prepare_model(worker, config)
    worker.load_model(1)
    assert worker.calls == [((1,), {})]
    assert worker._qerl_noise is worker._qerl_norms is None
    assert before == (repr(model), [(name, one.dtype, one.data_ptr()) for name, one in model.named_parameters()])


def test_what_is_compiled_is_not_taken_for_stock_vllms(vllm, model_dir):
    """vLLM's key of compiled code knows no worker extension; options stay as they are, and the caller's too."""
    asked = {"another_plugin": 1}
    model = torch.nn.ModuleDict({"input_layernorm": torch.nn.LayerNorm(4, bias=False)})
    made = vllm.EngineArgs(str(model_dir("qwen2")), additional_config=asked)
    stock, ours = (made.create_engine_config() for _ in range(2))
    assert stock.compute_hash() == ours.compute_hash()
    worker = Worker(model)
    prepare_model(worker, ours)
    worker.load_model()
    keys = {stock.compute_hash(), ours.compute_hash()}
    ours.additional_config[PREPARED]["lora"] = 3
    assert len(keys | {ours.compute_hash()}) == 3
    assert ours.additional_config["another_plugin"] == 1
    assert asked == stock.additional_config == {"another_plugin": 1}
    assert rollout_options(ours) == rollout_options(stock)


def test_the_key_tells_which_layers_are_ours(engine, packed_engine):
    for one, layers in ((engine, 8), (packed_engine, None)):
        (found,) = one.collective_rpc(lambda worker: worker.vllm_config.additional_config[PREPARED])
        assert found == {"version": verl_qerl.__version__, "linear": []} | ({"lora": layers} if layers else {})


@pytest.mark.parametrize("lora_config", [object(), None], ids=["lora", "plain"])
def test_buffers_are_released_where_the_runner_loads_and_the_rest_is_done_outside(monkeypatch, lora_config):
    done = []
    before = ["use_segments_again", "stay_within_share"]
    for name in (*before, "release_buffers", "compute_plain_logits", "use_single_adapter"):
        monkeypatch.setattr(worker_module, name, lambda *_, name=name: done.append(name))
    runner = SimpleNamespace(load_model=lambda: done.append("loaded"), get_model=torch.nn.Identity)
    stock = runner.load_model
    worker = SimpleNamespace(model_runner=runner, load_model=lambda: (runner.load_model(), done.append("pool ends")))
    config = Config({"verl_qerl": {"sampler": "stock"}})
    config.lora_config = lora_config
    prepare_model(worker, config)
    assert done == before
    worker.load_model()
    inside, outside = ["release_buffers"], ["compute_plain_logits", "use_single_adapter"]
    expected = ["loaded", *inside, "pool ends", *outside] if lora_config else ["loaded", "pool ends"]
    assert done == [*before, *expected]
    assert lora_config or runner.load_model is stock


def test_noise_is_prepared_after_loading():
    model = torch.nn.ModuleDict({"input_layernorm": torch.nn.LayerNorm(4, bias=False)})
    worker = Worker(model)
    prepare_model(worker, Config({"verl_qerl": {"aqn": {"enabled": True, "targets": ["input_layernorm"]}}}))
    assert worker._qerl_noise is None
    worker.load_model(1, load_dummy_weights=False)
    assert worker.calls == [((1,), {"load_dummy_weights": False})]
    assert list(worker._qerl_noise.clean) == ["input_layernorm"]
    assert RolloutWorkerExtension.qerl_set_noise(worker, 0.1, 1)[0] == 1
    assert RolloutWorkerExtension.qerl_num_noisy(worker) == 1
    assert RolloutWorkerExtension.qerl_norm_sizes(worker) == {"input_layernorm": 1.0}


def test_a_family_whose_norms_may_lie_elsewhere_is_refused_before_it_is_loaded():
    config = Config({"verl_qerl": {"aqn": {"enabled": True}}})
    config.model_config.hf_text_config.model_type = "gemma3_text"
    with pytest.raises(ValueError, match=r"^it is not known where model_type=gemma3_text has the norms"):
        prepare_model(Worker(None), config)
    config.additional_config["verl_qerl"]["aqn"] = {"enabled": False}
    prepare_model(Worker(None), config)


def test_where_results_must_not_depend_on_the_batch_vllms_own_paths_stay(monkeypatch, caplog):
    monkeypatch.setitem(vars(pytest.importorskip("vllm.envs")), "VLLM_BATCH_INVARIANT", True)
    taken = []
    for name in ("use_single_adapter", "use_fused_sampler", "use_decode_attention"):
        monkeypatch.setattr(worker_module, name, lambda *_, **__: taken.append("ours"))
    monkeypatch.setattr(worker_module, "repacked_in_features", lambda _: {128})
    config, passes = Config({}), SimpleNamespace(fuse_allreduce_rms=False)
    vars(config).update(lora_config=SimpleNamespace(), compilation_config=SimpleNamespace(pass_config=passes))
    worker = Worker(torch.nn.Linear(1, 1))
    prepare_model(worker, config)
    worker.load_model()
    assert not taken
    assert "LoRA, the sampler and attention stay vLLM's: VLLM_BATCH_INVARIANT=1" in caplog.text
    with pytest.raises(ValueError, match=r"^noise does not go together with VLLM_BATCH_INVARIANT=1: "):
        prepare_model(worker, Config({"verl_qerl": {"aqn": {"enabled": True}}}))


@pytest.mark.parametrize("option", [{"enable_dbo": True}, {"ubatch_size": 2}], ids=str)
def test_packed_linears_do_not_run_on_two_streams(monkeypatch, option):
    """vLLM would compute two halves of a batch at once, and the kernels' blocks exchange sums in one workspace."""
    parallel = pytest.importorskip("vllm.config").ParallelConfig
    monkeypatch.setattr(worker_module, "use_programmatic_launch", lambda *_, **__: None)
    monkeypatch.setattr(worker_module, "use_decode_attention", lambda *_: None)
    config = Config({})
    config.compilation_config = SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=False))
    for options, columns, refused in (({}, {128}, False), (option, set(), False), (option, {128}, True)):
        monkeypatch.setattr(worker_module, "repacked_in_features", lambda _, found=columns: found)
        config.parallel_config = parallel(**options)
        worker = Worker(torch.nn.Linear(1, 1))
        prepare_model(worker, config)
        if refused:
            with pytest.raises(ValueError, match=r"on two streams at once, .*: enable_dbo=\w+, ubatch_size=\d\."):
                worker.load_model()
        else:
            worker.load_model()


class Sleepy(RolloutWorkerExtension):
    """An extended worker of vLLM, as far as it sleeps."""

    load_model = staticmethod(int)

    def __init__(self, vllm_config):
        self.slept = []

    def sleep(self, level=1):
        self.slept.append(level)


def test_a_sleep_that_would_lose_our_weights_is_refused():
    configs = [Config({}), Config({})]
    for config, name in zip(configs, ("verl_qerl_nvfp4", "auto"), strict=True):
        config.load_config = SimpleNamespace(load_format=name)
    ours, stock = (Sleepy(vllm_config=config) for config in configs)
    ours.sleep(level=1)
    with pytest.raises(ValueError, match=r"^weights of load_format=verl_qerl_nvfp4 cannot .* sleep\(level=2\) drops"):
        ours.sleep(level=2)
    stock.sleep(2)
    assert (ours.slept, stock.slept) == ([1], [2])
