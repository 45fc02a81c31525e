"""verl's own training loop with our trainer: what noise the rollout workers hold whenever something is sampled."""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_qerl.algos.aqn import AQNConfig, sigma_at_step
from verl_qerl.verl_plugin.trainer import trainer
from verl_qerl.verl_plugin.trainer.feature import Feature
from verl_qerl.verl_plugin.trainer.trainer import FEATURES, FeaturedTrainer

AQN = {"enabled": True, "num_stages": 4}
MODES = ("sync", "colocate_async")
CLEAN = (0.0, 0)


class Server:
    """A rollout server with two workers; `log` receives what is done to them."""

    def __init__(self, log, norms=5):
        self.norms = norms
        self.collective_rpc = SimpleNamespace(remote=self._rpc)
        self.qerl_clear_kv_cache = SimpleNamespace(remote=lambda: log.append(("clear",)))
        self._log = log

    def _rpc(self, method, kwargs=None):
        if method == "qerl_norm_sizes":
            return [{"input_layernorm": 1.0, "post_attention_layernorm": 1.0}] * 2
        if method == "qerl_last_sync":
            return [{"number": self._log.num_syncs, "checksum": 7}] * 2
        assert method == "qerl_set_noise"
        self._log.append(("noise", kwargs["sigma"], kwargs["step"]))
        return [(self.norms, 7), (self.norms, 7)]


class Log(list):
    """What happened, in order."""

    @property
    def num_syncs(self):
        return sum(event[0] == "sync" for event in self)


class Logger:
    def __init__(self, log):
        self.log = lambda data, step: log.append(("metrics", step, data))


def configuration(mode="sync", aqn=AQN, **options):
    """Of a run; `options` are of `trainer`."""
    return OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": mode, "colocate_async": {"num_warmup_batches": 1}}}
            | {"project_name": "p", "experiment_name": "e", "logger": [], "total_epochs": 100, "save_freq": -1}
            | {"test_freq": -1, "val_before_train": False, "nnodes": 1}
            | options,
            "global_profiler": {"steps": None},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "engine_kwargs": {"vllm": {}}}},
            **({"aqn": aqn} if aqn else {}),
        }
    )


@pytest.fixture
def fit(bare_trainers, monkeypatch):
    """Runs verl's init() and fit() around stubs, from `start` finished steps on, and returns what happened in order."""
    log = Log()

    def recorder(name):
        return lambda *args: log.append((name, *args))

    monkeypatch.setattr(ray, "get", lambda results: results)
    monkeypatch.setattr(trainer_base, "Tracking", lambda **kwargs: Logger(log))
    monkeypatch.setattr(trainer_base, "SkipManager", SimpleNamespace(init=lambda c: None, set_step=lambda s: None))
    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_clear=lambda **kwargs: None))
    for name in ("_reissue_inflight_prompts", "_compute_metrics", "_start_profiling", "_stop_profiling"):
        monkeypatch.setattr(trainer_base.PPOTrainer, name, lambda self, *args, **kwargs: None)
    for name in ("_shutdown_dump_executor", "_save_checkpoint", "_add_async_warmup_batches"):
        monkeypatch.setattr(trainer_base.PPOTrainer, name, lambda self, *args: None)

    def run(config, steps, start=0, servers=2, norms=None):
        mode = config.trainer.v1.trainer_mode
        found = get_trainer_cls(mode)(config)

        def setup():
            found.global_steps, found.total_training_steps, found.steps_per_epoch = start, steps, 10
            replicas = [SimpleNamespace(servers=[Server(log, (norms or [5] * servers)[i])]) for i in range(servers)]
            found.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)

        found._setup = setup
        found.checkpoint_manager = SimpleNamespace(
            update_weights=recorder("sync"), resume_generation_replicas=recorder("resume")
        )
        batch = SimpleNamespace(keys=[], partition_id="train")
        found.step = lambda metrics, timing: log.append(("sample", found.global_steps)) or batch
        found._validate = lambda: log.append(("validate", found.global_steps)) or {"val": 1.0}
        log.features = found.features
        found.init()
        found.fit(agent_loop_manager=None)
        return log

    return run


def held(log, kind):
    """(sigma, step) that the workers hold at each event of `kind`, which has a step of its own."""
    now, found = None, []
    for event in log:
        if event[0] == "noise":
            now = event[1:]
        elif event[0] == kind:
            found.append((event[1], now))
    return found


def expected(steps, start=0, aqn=AQN):
    config = AQNConfig(**aqn)
    return [(step, (sigma_at_step(config, step, steps), step)) for step in range(start + 1, steps + 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_before_train": True},
        {"test_freq": 1},
        {"test_freq": 3, "val_before_train": True},
    ],
    ids=["no-validation", "before", "in-the-loop", "both"],
)
def test_every_step_samples_with_its_own_noise(fit, mode, options):
    log = fit(configuration(mode, **options), steps=8)
    assert held(log, "sample") == expected(8)
    assert len({sigma for _, (sigma, _) in held(log, "sample")}) == 4  # the stages, the first of which is clean
    assert {state for _, state in held(log, "validate")} <= {CLEAN}
    before = [0] if options.get("val_before_train") else []
    freq = options.get("test_freq")
    inside = [step for step in range(1, 9) if freq and (step % freq == 0 or step == 8)]
    assert [step for step, _ in held(log, "validate")] == before + inside


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_set_before_the_weights_are_sent(fit, mode):
    log = fit(configuration(mode), steps=4)
    kinds = [event[0] for event in log if event[0] in ("noise", "sync", "resume", "sample")]
    resume = ["resume"] if mode == "colocate_async" else []
    # Two servers each time. The first sync has nothing to resume.
    assert kinds == ["noise", "noise", "sync", *4 * ["sample", "noise", "noise", "sync", *resume]]


def test_no_cache_outlives_a_change_of_noise(fit):
    """verl drops the prefix cache with each weight sync; any other change needs a call of its own."""
    log = fit(configuration(test_freq=2, val_before_train=True), steps=5)
    fresh = True
    for event in log:
        if event[0] == "noise":
            fresh = False
        elif event[0] in ("clear", "sync"):
            fresh = True
        elif event[0] in ("sample", "validate"):
            assert fresh, f"{event} reads what was computed with other weights"
    # Both servers, clean and noisy again, at four validations: before, 2, 4, and after the last step.
    assert log.count(("clear",)) == 2 * 2 * 4


def test_nothing_is_left_after_the_last_step(fit):
    log = fit(configuration(test_freq=5), steps=5)
    noise = [event[1:] for event in log if event[0] == "noise"]
    assert {sigma for sigma, _ in noise[-6:]} == {0.0}  # last sync, validation, end of validation


@pytest.mark.parametrize("start", [3, 7])
def test_resume_continues_the_schedule(fit, start):
    log = fit(configuration(val_before_train=True), steps=8, start=start)
    assert held(log, "sample") == expected(8, start)
    assert log[0] == ("noise", sigma_at_step(AQNConfig(**AQN), start + 1, 8), start + 1)
    assert held(log, "sync")[0] == (start, log[0][1:])


def test_metrics_are_those_of_the_step_just_done(fit):
    log = fit(configuration(test_freq=2), steps=8)
    logged = {step: data for kind, step, data in [event for event in log if event[0] == "metrics"]}
    found = [(step, (data["aqn/sigma"], step)) for step, data in logged.items()]
    assert found == expected(8)
    assert all(data["val"] == 1.0 for step, data in logged.items() if step % 2 == 0)


@pytest.mark.parametrize("aqn", [None, {"enabled": False, "sigma_start": 0.02}], ids=["absent", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_without_aqn_nothing_is_called_and_nothing_logged(fit, aqn, mode):
    config = configuration(mode, aqn, test_freq=2, val_before_train=True)
    log = fit(config, steps=4)
    assert not [event for event in log if event[0] in ("noise", "clear")]
    assert not any("aqn" in key for event in log if event[0] == "metrics" for key in event[2])
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}


@pytest.mark.parametrize(("norms", "told"), [([5, 4], r"\[4, 5\]"), ([0, 0], r"\[0\]")], ids=["unequal", "none"])
def test_workers_must_agree(fit, norms, told):
    with pytest.raises(RuntimeError, match=f"the rollout workers set {told} norms"):
        fit(configuration(), steps=2, norms=norms)


def test_verls_registry_holds_our_trainers():
    stock = {
        "sync": PPOTrainerSync,
        "colocate_async": PPOTrainerColocateAsync,
        "separate_async": PPOTrainerSeparateAsync,
    }
    for mode, base in stock.items():
        found = get_trainer_cls(mode)
        assert found.__bases__ == (FeaturedTrainer, base)
    before = dict(trainer_base.TRAINER_REGISTRY)
    trainer.install(SimpleNamespace(trainer_base=trainer_base))
    assert before == trainer_base.TRAINER_REGISTRY


def test_install_replaces_every_trainer_once():
    class Other(PPOTrainerSync):
        """Says what it does."""

    module = SimpleNamespace(trainer_base=SimpleNamespace(TRAINER_REGISTRY={"sync": PPOTrainerSync, "other": Other}))
    trainer.install(module)
    first = dict(module.trainer_base.TRAINER_REGISTRY)
    assert [found.__name__ for found in first.values()] == ["QerlPPOTrainerSync", "QerlOther"]
    assert all(issubclass(found, FeaturedTrainer) for found in first.values())
    assert first["other"].__doc__ == "Says what it does."
    trainer.install(module)
    assert first == module.trainer_base.TRAINER_REGISTRY


OWN = ("_tell", "_errors_told")


def functions_of(cls):
    return {name: found for name, found in vars(cls).items() if inspect.isfunction(found) and name != "__init__"}


def test_overrides_are_of_methods_that_verl_has_and_call_them():
    # The generator of `_errors_told` wraps one.
    overrides = {
        name: found for name, found in functions_of(FeaturedTrainer).items() if name not in ("_tell", "_errors_told")
    }
    assert len(overrides) == 17
    assert not [name for name in overrides if not hasattr(trainer_base.PPOTrainer, name)]
    assert not [name for name, found in overrides.items() if "__class__" not in found.__code__.co_freevars]


def test_every_hook_is_called_and_has_a_user():
    """A misspelt hook of a feature would never be called."""
    hooks = functions_of(Feature).keys()
    used = {
        name for feature in FEATURES for name in functions_of(feature) if name.startswith(("on_", "before_", "after_"))
    }
    assert used == hooks
    called = {
        constant
        for found in functions_of(FeaturedTrainer).values()
        for constant in inspect.unwrap(found).__code__.co_consts
        if isinstance(constant, str)
    }
    assert hooks <= called


def test_features_are_called_in_their_order(fit):
    """Noise before the sync whose time is taken, the check of the sync before the norms are asked about."""
    log = fit(configuration(), steps=1)
    found = [type(feature).__name__ for feature in log.features]
    assert found == [
        "EngineHealth",
        "Noise",
        "SyncCheck",
        "NoiseEffect",
        "Gate",
        "NoiseSchedule",
    ]


@pytest.mark.parametrize("left", [0, 3])
def test_questions_that_do_not_fill_a_step_stop_it_before_there_are_engines(left):
    class Loads:
        def _init_dataloader(self):
            self.train_dataset = range(left)
            if not left:
                raise ValueError("num_samples should be a positive integer value")

    kept = object.__new__(type("Trainer", (FeaturedTrainer, Loads), {}))
    data = {"train_files": "train.parquet", "train_batch_size": 4, "max_prompt_length": 5}
    kept.config = OmegaConf.create({"data": data})
    told = (
        rf"=4 is more than the {left} questions of up to data\.max_prompt_length=5 tokens of data\.train_files=train\."
    )
    with pytest.raises(ValueError, match=told):
        kept._init_dataloader()
    kept.config.data.train_batch_size = 3
    if left:
        kept._init_dataloader()
