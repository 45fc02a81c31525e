import pytest
import torch
import torch.nn as nn

from verl_qerl.modules.rounded import rounded_linears

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(16, 8), "b": nn.Linear(16, 8, bias=False), "c": nn.Linear(16, 8)}).eval()


def half(weights):
    """Rounds to multiples of half the group's largest magnitude."""
    step = max(weight.abs().max() for weight in weights.values()) / 2
    return {name: (weight / step).round() * step for name, weight in weights.items()}


@torch.no_grad()
def outputs(found):
    return {name: linear(X) for name, linear in found.items()}


def test_each_linear_multiplies_by_its_groups_rounded_weight():
    found, expected = model(), model()
    before = {name: parameter.clone() for name, parameter in found.named_parameters()}
    plain = outputs(found)
    with torch.no_grad():
        rounded = half({"a": expected["a"].weight, "b": expected["b"].weight})
        for name, weight in rounded.items():
            expected[name].weight.copy_(weight)
        assert not torch.equal(rounded["b"], half({"b": found["b"].weight})["b"])  # the group matters
    with rounded_linears(found, [["a", "b"]], half):
        inside = outputs(found)
    for name, value in outputs(expected).items():
        assert torch.equal(inside[name], value), name
    assert not torch.equal(inside["a"], plain["a"])
    assert all(torch.equal(value, plain[name]) for name, value in outputs(found).items())
    assert all(torch.equal(parameter, before[name]) for name, parameter in found.named_parameters())


def test_an_error_inside_leaves_the_model_as_it_was():
    found = model()
    plain = outputs(found)
    with pytest.raises(RuntimeError, match="shapes"), rounded_linears(found, [["a"]], half):
        found["a"](torch.randn(2, 3))
    assert torch.equal(outputs(found)["a"], plain["a"])


@pytest.mark.parametrize("groups", [[], [["a", ""]]], ids=["none", "no-linear"])
def test_nothing_to_round_is_refused(groups):
    with pytest.raises(ValueError, match="Accepted are names of nn"), rounded_linears(model(), groups, half):
        pass
