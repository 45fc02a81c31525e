"""Which layers are checkpointed, with a GPU that only says how much memory there is, and what gradients come of it."""

import logging
from contextlib import contextmanager

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.verl_plugin.actor import recompute
from verl_qerl.verl_plugin.actor.recompute import Recompute, checkpointed_layers

GIB, LAYERS, TOKENS = 2**30, 4, 24
CPU = torch.device("cpu")
PER_TOKEN = GIB // 2  # of a layer, as this GPU tells


class Cuda:
    """A GPU of 80 GiB: 10 are held, and each layer that keeps its activations adds PER_TOKEN a token."""

    def __init__(self, monkeypatch):
        self.allocated, self.peak, self.free, self.resets = 10 * GIB, 40 * GIB, 60 * GIB, 0
        for name in ("is_available", "memory_allocated", "max_memory_allocated", "mem_get_info", "memory_reserved"):
            monkeypatch.setattr(recompute.torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(recompute.torch.cuda, "reset_peak_memory_stats", self.reset)

    def is_available(self):
        return True

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.peak

    def memory_reserved(self):
        return 12 * GIB

    def mem_get_info(self):
        return self.free, 80 * GIB

    def reset(self):
        self.resets += 1
        self.peak = 14 * GIB  # of the passes of an update


@contextmanager
def mode():
    yield "mode"


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=LAYERS, **sizes))
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made.train()


def tokens(count=TOKENS):
    return torch.arange(count).reshape(2, -1) % 64


def calls_of_layers(model):
    """How often each layer has been computed since."""
    counts = [0] * LAYERS

    def count(at):
        def hook(*_):
            counts[at] += 1

        return hook

    for at, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(count(at))
    return counts


def update(model, count=TOKENS):
    model.zero_grad()
    model(tokens(count)).logits.float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measured(model, cuda):
    """After a first update, in which the last layer took PER_TOKEN a token."""
    found = Recompute(model, CPU)
    last = model.model.layers[-1].mlp

    def take(*_):
        if torch._C._current_graph_task_id() == -1:
            cuda.allocated += PER_TOKEN * TOKENS

    handle = last.register_forward_hook(take)
    with found.within(mode()) as entered:
        assert entered == "mode"
        with found.within(mode()):  # of a mini-batch
            update(model)
        assert found.budget is None
        cuda.allocated = 10 * GIB
    handle.remove()
    return found


def test_the_first_update_measures_and_the_next_ones_keep_what_fits(model, monkeypatch, caplog):
    cuda = Cuda(monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = measured(model, cuda)
    assert cuda.resets == 1
    assert found.bytes_per_token == PER_TOKEN
    # 60 free and 12 reserved, less the peak of 14, 2 to spare and 5 % of 80.
    assert found.budget == (60 + 12 - 14 - 2 - 4) * GIB
    assert "52.0 GiB are left for activations, 524288 KiB a token and layer" in caplog.text
    assert "4 of 4 layers keep theirs with 24 tokens" in caplog.text
    assert [found.num_kept(count) for count in (1, 12, 24)] == [4, 4, 4]


def test_larger_micro_batches_than_the_first_leave_room_for_what_else_grows(model, monkeypatch):
    cuda = Cuda(monkeypatch)
    found = measured(model, cuda)
    # The update took 4 GiB above the 10 that were held.
    assert (found.most_tokens, found.growth) == (TOKENS, 4 * GIB / TOKENS)
    # With 84 tokens that is 10 GiB more, and one layer takes the 42 that are left of 52.
    assert [found.num_kept(count) for count in (25, 26, 42, 84, 85, 336, 337)] == [4, 3, 2, 1, 0, 0, 0]
    found.budget = 20 * GIB
    # As before up to the tokens of the first update.
    assert [found.num_kept(count) for count in (10, 13, 20, 24)] == [4, 3, 2, 1]


def test_the_largest_pass_of_the_update_counts_and_no_other(model, monkeypatch):
    Cuda(monkeypatch)
    found = Recompute(model, CPU)
    found.bytes_per_token = 1.0
    loss = model.register_forward_hook(lambda *_: {}["loss"])
    with pytest.raises(KeyError), found.within(mode()):
        update(model, 8 * TOKENS)
    loss.remove()
    with found.within(mode()):
        update(model, 2 * TOKENS)
        update(model)
        with torch.no_grad():
            model(tokens(4 * TOKENS))
    assert (found.most_tokens, found.growth) == (2 * TOKENS, 4 * GIB / (2 * TOKENS))
    update(model, 8 * TOKENS)
    assert found.most_tokens == 2 * TOKENS


def test_ranks_agree_on_what_is_safe_for_all(model, monkeypatch):
    def all_reduce(found, op):
        assert op == recompute.dist.ReduceOp.MIN
        other = torch.tensor([48 * GIB, -PER_TOKEN / 2, -GIB, 2 * TOKENS], dtype=torch.float64)
        found.copy_(torch.minimum(found, other))

    monkeypatch.setattr(recompute.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(recompute.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(recompute.dist, "all_reduce", all_reduce)
    found = measured(model, Cuda(monkeypatch))
    assert (found.budget, found.bytes_per_token) == (48 * GIB, PER_TOKEN)
    assert (found.growth, found.most_tokens) == (GIB, TOKENS)


def test_only_the_layers_that_do_not_fit_are_computed_twice(model, monkeypatch):
    found = measured(model, Cuda(monkeypatch))
    found.budget, found.growth = 2 * PER_TOKEN * TOKENS, 0.0
    counts = calls_of_layers(model)
    update(model)
    assert counts == [2, 2, 1, 1]
    update(model, 2 * TOKENS)  # a larger micro-batch
    assert counts == [4, 4, 3, 2]
    update(model, TOKENS // 2)
    assert counts == [5, 5, 4, 3]


def test_gradients_are_those_of_full_checkpointing(model, monkeypatch):
    expected = update(model)
    found = measured(model, Cuda(monkeypatch))
    for kept in range(LAYERS + 1):
        found.budget = kept * PER_TOKEN * TOKENS
        grads = update(model)
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[name], expected[name]) for name in grads)


def test_an_optimizer_whose_state_came_last_is_counted(model, monkeypatch):
    cuda = Cuda(monkeypatch)
    found = Recompute(model, CPU)
    found.bytes_per_token = 1.0
    with found.within(mode()):
        update(model)
        cuda.allocated += 9 * GIB
    assert found.budget == (60 + 12 - 14 - 9 - 2 - 4) * GIB


def test_it_waits_for_an_update_that_ends_well(model, monkeypatch):
    cuda = Cuda(monkeypatch)
    found = Recompute(model, CPU)
    found.bytes_per_token = 1.0
    with pytest.raises(KeyError), found.within(mode()):
        raise KeyError
    assert found.budget is None
    cuda.free = 0
    with found.within(mode()):
        update(model)
    assert found.budget == 0
    assert found.num_kept(1) == 0


def test_without_a_gpu_all_layers_are_checkpointed(model):
    found = Recompute(model, CPU)
    counts = calls_of_layers(model)
    with found.within(mode()):
        update(model)
    assert (counts, found.budget) == ([2] * LAYERS, None)


def test_a_model_without_checkpointing_is_left_alone(model):
    model.gradient_checkpointing_disable()
    assert checkpointed_layers(model) == ([], None)
    counts = calls_of_layers(model)
    with Recompute(model, CPU).within(mode()):
        update(model)
    assert counts == [1] * LAYERS
