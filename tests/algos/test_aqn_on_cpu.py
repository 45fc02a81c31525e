import math
from itertools import pairwise

import pytest
import torch

from verl_qerl.algos.aqn import (
    MODES,
    SCHEDULES,
    AQNConfig,
    draw_noise,
    noisy_weight,
    norm_rms,
    sigma_at_step,
    stage_of,
)

NORM = "model.layers.0.input_layernorm"

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def sigmas(num_stages: int = 10, **options) -> list[float]:
    """Sigma of every stage, in a training that has one step a stage."""
    config = AQNConfig(enabled=True, num_stages=num_stages, **options)
    return [sigma_at_step(config, step, num_stages) for step in range(1, num_stages + 1)]


def test_defaults_are_the_papers():
    config = AQNConfig()
    assert (config.enabled, config.schedule, config.mode) == (False, "exponential", "additive")
    assert (config.sigma_start, config.sigma_end, config.num_stages) == (1e-2, 5e-4, 10)
    assert config.norms == ("input_layernorm", "post_attention_layernorm")


def test_exponential_is_equation_8():
    # 1e-2 * 0.05 ** ((k - 1) / 8), by hand: 0.05 ** (1 / 8) = 0.687656, 0.05 ** (1 / 2) = 0.223607.
    found = sigmas()
    assert found[0] == 0.0
    assert found[1] == 1e-2
    assert found[2] == pytest.approx(6.87656e-3, rel=1e-5)
    assert found[5] == pytest.approx(2.23607e-3, rel=1e-5)
    assert found[9] == 5e-4
    ratios = [after / before for before, after in pairwise(found[1:])]
    assert ratios == pytest.approx([0.05 ** (1 / 8)] * 8)


def test_linear_by_hand():
    # Eight equal intervals of 9.5e-3 / 8 = 1.1875e-3.
    assert sigmas(schedule="linear")[2:4] == pytest.approx([8.8125e-3, 7.625e-3])


def test_cosine_by_hand():
    # Half way, stage 5 of 1 .. 9: the mean of both ends. A quarter: 5e-4 + 9.5e-3 * (1 + cos(pi / 4)) / 2.
    found = sigmas(schedule="cosine")
    assert found[5] == pytest.approx(5.25e-3)
    assert found[3] == pytest.approx(5e-4 + 9.5e-3 * (1 + math.sqrt(0.5)) / 2)


def test_logarithmic_by_hand():
    # ln(1 + i) / ln(9) of the way after i of 8 intervals: half of it at i = 2.
    assert sigmas(schedule="logarithmic")[3] == pytest.approx(5.25e-3)


@each_schedule
@pytest.mark.parametrize("ends", [(1e-2, 5e-4), (0.1, 0.03), (7e-3, 1.1e-3)], ids=str)
def test_every_schedule_goes_from_start_to_end(schedule, ends):
    start, end = ends
    found = sigmas(schedule=schedule, sigma_start=start, sigma_end=end)
    assert found[0] == 0.0
    assert found[1] == start
    assert found[-1] == end
    assert all(before > after for before, after in pairwise(found[1:]))


@each_schedule
def test_few_stages(schedule):
    assert sigmas(2, schedule=schedule, sigma_start=5e-4) == [0.0, 5e-4]
    assert sigmas(3, schedule=schedule) == [0.0, 1e-2, 5e-4]


@each_schedule
def test_equal_ends_are_constant(schedule):
    assert sigmas(schedule=schedule, sigma_start=2e-3, sigma_end=2e-3) == pytest.approx([0.0] + [2e-3] * 9)


def test_without_enabled_there_is_no_noise():
    assert sigma_at_step(AQNConfig(), 10, 10) == 0.0


@pytest.mark.parametrize(("total", "stages"), [(100, 10), (10, 10), (30, 3), (7, 7), (1000, 8)])
def test_stages_are_the_papers_when_they_divide_the_steps(total, stages):
    length = total // stages
    assert [stage_of(AQNConfig(num_stages=stages), step, total) for step in range(1, total + 1)] == [
        (step - 1) // length for step in range(1, total + 1)
    ]


@pytest.mark.parametrize(("total", "stages"), [(7468, 10), (13, 4), (11, 10)])
def test_stage_lengths_differ_by_one_step_at_most(total, stages):
    found = [stage_of(AQNConfig(num_stages=stages), step, total) for step in range(1, total + 1)]
    lengths = {found.count(stage) for stage in range(stages)}
    assert found == sorted(found)
    assert max(lengths) - min(lengths) <= 1


def test_fewer_steps_than_stages_skip_stages():
    assert [stage_of(AQNConfig(num_stages=10), step, 4) for step in range(1, 5)] == [0, 2, 5, 7]
    assert stage_of(AQNConfig(num_stages=10), 1, 1) == 0


def test_stages_may_be_spread_over_other_steps_than_the_runs():
    config = AQNConfig(enabled=True, num_stages=4, total_steps=8)
    assert [sigma_at_step(config, step, 100) for step in (1, 2, 3, 5, 7, 8, 9, 100)] == pytest.approx(
        [0, 0, 1e-2, 5e-6**0.5, 5e-4, 5e-4, 5e-4, 5e-4]
    )
    assert sigma_at_step(config, 4, 4) == 1e-2  # a run that is shorter ends in an earlier stage
    assert [stage_of(config, step, 100) for step in (2, 3, 8, 100)] == [0, 1, 3, 3]


def test_stages_spread_over_fewer_steps_do_not_reach_sigma_end():
    config = AQNConfig(enabled=True, num_stages=10, total_steps=4)
    last = 1e-2 * 0.05 ** (6 / 8)
    assert [sigma_at_step(config, step, 100) for step in (4, 5, 100)] == pytest.approx([last] * 3)
    assert last > 2 * config.sigma_end


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sigma_that_was_searched_for_stands_in_for_sigma_start(schedule):
    config = AQNConfig(enabled=True, num_stages=4, schedule=schedule, target_kl=1e-2)
    searched = {1: (2, 0.2), 2: (3, 0.3), 3: (4, 0.1)}
    plain = sigmas(4, schedule=schedule)
    found = [sigma_at_step(config, step, 4, searched) for step in range(1, 5)]
    assert found == pytest.approx([0.0, 0.2, 30 * plain[2], 10 * plain[3]])
    assert sigma_at_step(config, 2, 4, {}) == 0.0  # until one has been found
    assert [sigma_at_step(config, step, 8, {1: (4, 0.2)}) for step in (3, 4)] == [0.0, 0.2]
    assert sigma_at_step(AQNConfig(enabled=True, num_stages=2, target_kl=1e-2), 2, 2, {1: (2, 0.2)}) == 0.2
    assert sigma_at_step(AQNConfig(enabled=True, num_stages=4), 2, 4, searched) == 1e-2


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_outside_of_training(step):
    with pytest.raises(ValueError, match=rf"step={step} is outside of training\. .* 1 to total_steps=10\."):
        sigma_at_step(AQNConfig(), step, 10)


BAD = [
    *[("enabled", value) for value in (1, "true", None)],
    *[("sigma_start", value) for value in (0, -1e-2, 1.0, 5, math.nan, math.inf, "1e-2", True, None)],
    *[("sigma_end", value) for value in (0.0, -1.0, math.nan, 0.5, 1.0001e-2, None)],
    *[("num_stages", value) for value in (1, 0, -3, 10.0, "10", True, None)],
    *[("schedule", value) for value in ("step", "Linear", "", None, ["linear"])],
    *[("mode", value) for value in ("add", None)],
    *[("draw", value) for value in ("sequences", None)],
    *[("targets", value) for value in ("input_layernorm", [], (), [1], 5, {"a": 1})],
    *[("seed", value) for value in (1.5, "0", True, None)],
    *[("total_steps", value) for value in (0, -1, 1.5, "100", True)],
    *[("target_kl", value) for value in (0, -1e-3, 1.5, math.nan, math.inf, "1e-3", True)],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda part: str(part) or "empty")
def test_a_bad_value_gives_option_value_and_remedy(name, value):
    with pytest.raises(ValueError, match="is no value of this option") as raised:
        AQNConfig.from_mapping({name: value})
    message = str(raised.value)
    assert message.startswith(f"aqn.{name}={value!r} is no value of this option. Accepted: ")
    assert message.endswith(" Correct the option.")


def test_one_stage_with_noise_has_one_sigma():
    with pytest.raises(
        ValueError, match=r"aqn\.sigma_end=0\.0005 .* Accepted: sigma_start=0\.05: num_stages=2 has one"
    ):
        AQNConfig(enabled=True, num_stages=2, sigma_start=0.05)
    config = AQNConfig(enabled=True, num_stages=2, sigma_start=0.05, sigma_end=0.05)
    assert [sigma_at_step(config, step, 4) for step in range(1, 5)] == [0, 0, 0.05, 0.05]


def test_a_list_of_targets_becomes_a_tuple():
    assert AQNConfig.from_mapping({"enabled": True, "targets": ["a", "b"]}).targets == ("a", "b")


def test_the_stream_of_numbers_is_fixed():
    # As drawn by numpy 2.3. A change makes a resumed run differ from one that was not stopped.
    expected = [2.4542267322540283, 0.4745299518108368, -0.8633591532707214, 0.5961751341819763, -0.1770455241203308]
    found = draw_noise(0, 1, NORM, 5)
    assert found.dtype == torch.float32
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("seed", "step", "name", "first"),
    [
        pytest.param(1, 1, NORM, 1.448561668395996, id="seed"),
        pytest.param(0, 2, NORM, 0.2524082660675049, id="step"),
        pytest.param(0, 1, NORM.replace("0", "1"), 0.9610068798065186, id="name"),
    ],
)
def test_seed_step_and_name_each_count(seed, step, name, first):
    found = draw_noise(seed, step, name, 100_000)
    assert found[0].item() == first
    # Independent draws of n numbers correlate by 1 / sqrt(n) = 0.003.
    correlation = torch.corrcoef(torch.stack((found, draw_noise(0, 1, NORM, 100_000))))[0, 1]
    assert abs(correlation) < 0.015


def test_nothing_else_counts():
    torch.manual_seed(0)
    first = draw_noise(3, 4, NORM, 64)
    torch.manual_seed(1)
    assert torch.equal(first, draw_noise(3, 4, NORM, 64))


def test_the_draw_is_standard_normal():
    noise = draw_noise(0, 1, NORM, 1_000_000).double()
    # Standard errors of one million: 1e-3 for the mean, 0.7e-3 for the deviation, 5e-3 for the fourth moment of 3.
    assert abs(noise.mean()) < 5e-3
    assert abs(noise.std() - 1) < 4e-3
    assert abs((noise**4).mean() - 3) < 6e-2


def test_additive_and_multiplicative():
    weight, noise = torch.tensor([1.0, 2.0, -4.0, 0.0]), torch.tensor([1.0, -2.0, 1.0, 3.0])
    assert noisy_weight(weight, noise, 0.25, "additive").tolist() == [1.25, 1.5, -3.75, 0.75]
    assert noisy_weight(weight, noise, 0.25, "multiplicative").tolist() == [1.25, 1.0, -5.0, 0.0]


def test_relative_is_in_units_of_the_norms_root_mean_square():
    weight, noise = torch.tensor([1.0, -7.0, 5.0, 5.0]), torch.tensor([1.0, -2.0, 1.0, 3.0])
    assert norm_rms(weight).item() == 5.0
    assert noisy_weight(weight, noise, 0.25, "relative").tolist() == [2.25, -9.5, 6.25, 8.75]
    # The model of norms ten times as large with linears of a tenth: the same noise. Additive has a tenth of it.
    assert torch.allclose(noisy_weight(10 * weight, noise, 0.25, "relative"), torch.tensor([22.5, -95, 62.5, 87.5]))
    assert norm_rms(torch.full((3,), 1e-30)).item() == pytest.approx(1e-30, rel=1e-6)  # whose square is none in float32


@pytest.mark.parametrize("mode", MODES)
def test_sigma_zero_is_exact(mode):
    # Negative zero and infinite noise would both leave a trace in w + 0 Z.
    weight, noise = torch.tensor([-0.0, 1.0, 3e-41]), torch.tensor([1.0, math.inf, 1.0])
    found = noisy_weight(weight, noise, 0.0, mode)
    assert torch.equal(found.view(torch.int32), weight.view(torch.int32))
