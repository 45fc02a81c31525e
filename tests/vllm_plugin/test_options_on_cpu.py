from types import SimpleNamespace

import pytest

from verl_qerl.vllm_plugin.options import asked_of_vllm, rollout_options


def config(options):
    return SimpleNamespace(additional_config={"verl_qerl": options, "another_plugin": {"linear": 3}})


@pytest.mark.parametrize("vllm_config", [None, SimpleNamespace(additional_config=None), config(None), config({})])
def test_defaults(vllm_config):
    options = rollout_options(vllm_config)
    assert (options.linear, options.lora, options.aqn.enabled) == ("auto", "single", False)
    assert options.train_norms is False
    assert (options.sampler, options.attention) == ("auto", "auto")


def test_options_are_read():
    options = rollout_options(config({"linear": "stock", "lora": "stock", "aqn": {"enabled": True, "seed": 3}}))
    assert (options.linear, options.lora, options.aqn.seed) == ("stock", "stock", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linears": "auto"}, r"unknown option additional_config\.verl_qerl\.linears='auto'.*sampler, attention"),
        ({"linear": "fast"}, r"additional_config\.verl_qerl\.linear='fast'.*auto, stock"),
        ({"train_norms": 1}, r"additional_config\.verl_qerl\.train_norms=1.*true, false"),
        ({"aqn": {"sigma": 1}}, r"unknown option aqn\.sigma"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rollout_options(config(options))


@pytest.mark.parametrize(
    ("invariant", "backend", "asked"),
    [
        (False, "auto", None),
        (False, "marlin", "linear_backend='marlin'"),
        (True, "auto", "VLLM_BATCH_INVARIANT=1"),
        (True, "marlin", "VLLM_BATCH_INVARIANT=1"),
    ],
)
def test_what_the_user_asks_of_vllm(monkeypatch, invariant, backend, asked):
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", invariant)  # the environment is read once a process
    assert asked_of_vllm(SimpleNamespace(kernel_config=SimpleNamespace(linear_backend=backend))) == asked
    assert asked_of_vllm(None) == (asked if invariant else None)
