import math
import re
import sys

import pytest
import torch
from qerl_testing import (
    assert_close,
    compare_greedy,
    current_commit,
    load_beside,
    random_packed_weight,
    rms_error_ratio,
    sqnr_db,
    verl_config,
)

from verl_qerl.checkpoints.digest import weight_digest


def test_error_ratio_by_hand() -> None:
    # error (0, 1), expected (3, 4): 1 / 5
    assert rms_error_ratio(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert rms_error_ratio(torch.tensor([3e4, 5e4]), torch.tensor([3e4, 4e4])) == pytest.approx(0.2)


def test_error_against_zero_is_absolute() -> None:
    assert rms_error_ratio(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(5.0)
    assert rms_error_ratio(torch.zeros(2), torch.zeros(2)) == 0


def test_assert_close_passes_at_the_ratio_and_fails_beyond() -> None:
    expected, actual = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert_close(actual, expected, 0.2001)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close(actual, expected, 0.1999)


@pytest.mark.parametrize("actual", [torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.inf])])
def test_values_that_are_not_finite_never_pass(actual: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, torch.tensor([3.0, 4.0]), 1e9)


def test_shapes_must_agree_even_where_they_broadcast() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(1, 4), torch.ones(4), 1.0)


def test_sqnr_by_hand() -> None:
    assert sqnr_db(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(20 * math.log10(5))
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf


def test_random_weights_depend_on_the_seed_only() -> None:
    weight = random_packed_weight(8, 32, seed=1)
    assert weight.shape == (8, 32)
    assert weight_digest(weight) == weight_digest(random_packed_weight(8, 32, seed=1))
    assert weight_digest(weight) != weight_digest(random_packed_weight(8, 32, seed=2))


def test_a_result_file_names_the_commit(monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "abc1234")
    assert current_commit() == "abc1234"
    monkeypatch.delenv("QERL_COMMIT")
    assert re.fullmatch(r"[0-9a-f]{7,}|unknown", current_commit())


def test_greedy_answers_are_compared_up_to_the_first_token_that_differs():
    one = [[(1, -1.0), (2, -1.0), (3, -1.0)], [(4, -2.0), (5, -2.0), (6, -2.0)]]
    other = [[(1, -1.5), (2, -1.0), (3, -1.25)], [(4, -2.0), (7, -2.5), (8, -9.0)]]
    differences, agreed = compare_greedy(one, other)
    assert differences == [0.5, 0.0, 0.25, 0.0, 0.5]
    assert agreed == pytest.approx(4 / 5)


def test_greedy_answers_of_other_lengths_are_no_pair():
    with pytest.raises(ValueError, match="longer"):
        compare_greedy([[(1, -1.0)]], [[(1, -1.0)], [(2, -1.0)]])


def test_a_module_beside_a_file(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_a_test.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: 'int' = 3\n"
    )
    monkeypatch.delitem(sys.modules, "neighbour_of_a_test", raising=False)
    found = load_beside(str(tmp_path / "bench.py"), "neighbour_of_a_test")
    assert found.A().b == 3
    assert sys.modules.pop("neighbour_of_a_test") is found
    with pytest.raises(FileNotFoundError):
        load_beside(str(tmp_path / "bench.py"), "absent")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("+rollout=nvfp4", "+aqn.enabled=true", "+qerl.gate.max_initial_kl=0.1"),
        ("+rollout=fp8", "+platform=cpu", "~data.seed", "++data.new=[1,{a: b}]", "trainer.logger=[console]"),
        ("model_engine=megatron", "data.train_batch_size=8", "data.train_batch_size=16"),
        ("data.none=1",),
        ("~data.none",),
        ("rollout=nvfp4",),
    ],
)
def test_a_configuration_is_what_hydra_makes_of_all_overrides_at_once(overrides) -> None:
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    def whole(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))

    def outcome(make):
        try:
            config = make(*overrides)
        except HydraException as error:
            return type(error), str(error).splitlines()[0]
        return OmegaConf.to_container(config), OmegaConf.is_struct(config), list(config)

    assert outcome(verl_config) == outcome(whole)
    assert outcome(verl_config) == outcome(whole)  # what an earlier call made is not changed by the next
