from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch
from qerl_testing import assert_close, load_beside
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, MistralConfig, Qwen2Config

from verl_qerl.modules import varlen_attention as varlen

reference = load_beside(__file__, "varlen_reference")
attention, inputs, positions = reference.attention, reference.inputs, reference.positions

LENGTHS = (7, 1, 40, 2, 1, 19)
LAYER = SimpleNamespace(is_causal=True)
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def _registered():
    varlen.register()


@pytest.fixture
def computed(monkeypatch):
    """How often the host has looked where sequences lie."""
    seen = []
    for name in ("_from_positions", "_from_mask"):
        original = getattr(varlen, name)
        monkeypatch.setattr(varlen, name, lambda x, original=original: (seen.append(x), original(x))[1])
    return seen


def causal_lm(config_class=Qwen2Config, attention=varlen.NAME, **options):
    torch.manual_seed(0)
    config = config_class(**SIZES | {"attn_implementation": attention} | options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(count, seed=1):
    return torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 2, 5, 40, 100])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 16), (6, 1, 64), (2, 2, 8)])
def test_each_token_attends_to_its_sequence_up_to_itself(heads, groups, size, window):
    (query, key, value), grad = inputs(LENGTHS, heads, groups, size, torch.float32)
    options = {"sliding_window": window, "scaling": 0.2}
    out, scores = varlen.varlen_attention(LAYER, query, key, value, None, position_ids=positions(LENGTHS), **options)
    assert scores is None
    found = torch.autograd.grad(out, (query, key, value), grad)
    rows = [x.detach()[0].transpose(0, 1).double().requires_grad_() for x in (query, key, value)]
    expected = attention(*rows, LENGTHS, window, 0.2)
    # float32 sums of at most 40 products: 1e-6.
    assert_close(out.detach()[0], expected.detach(), 1e-6)
    for mine, row in zip(found, torch.autograd.grad(expected, rows, grad[0].double()), strict=True):
        assert_close(mine[0].transpose(0, 1), row, 2e-6)


def test_a_window_of_one_token_gives_the_values():
    (query, key, value), _ = inputs(LENGTHS, 4, 2, 16, torch.float32)
    out, _ = varlen.varlen_attention(LAYER, query, key, value, None, position_ids=positions(LENGTHS), sliding_window=1)
    assert torch.equal(out, value.transpose(1, 2).repeat_interleave(2, dim=2))


def test_wrong_borders_change_the_result():
    (query, key, value), _ = inputs(LENGTHS, 4, 2, 16, torch.float32)
    rows = [x.detach()[0].transpose(0, 1) for x in (query, key, value)]
    expected = attention(*rows, LENGTHS)
    shifted = (8, *LENGTHS[2:3], *LENGTHS[3:])  # the first two are one
    bounds = torch.tensor([0, *torch.tensor(shifted).cumsum(0).tolist()], dtype=torch.int32)
    out = varlen.packed_attention(*rows, varlen.Packing(shifted, bounds))
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close(out, expected, 0.01)


@pytest.mark.parametrize("config_class", [Qwen2Config, MistralConfig], ids=["qwen2", "mistral"])
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "window"])
def test_models_compute_what_they_do_with_sdpa(config_class, sliding):
    options = {"sliding_window": 6 if sliding else None}
    if config_class is Qwen2Config:
        options |= {"use_sliding_window": sliding, "max_window_layers": 1}
    packed = {"input_ids": tokens(sum(LENGTHS)), "position_ids": positions(LENGTHS), "use_cache": False}
    ours, theirs = (causal_lm(config_class, name, **options)(**packed).logits for name in (varlen.NAME, "sdpa"))
    assert_close(ours, theirs, 1e-5)
    alone = [
        causal_lm(config_class, **options)(row, use_cache=False).logits for row in packed["input_ids"].split(LENGTHS, 1)
    ]
    assert_close(ours, torch.cat(alone, 1), 1e-5)


def test_padding_is_left_out_and_has_no_influence(computed):
    model = causal_lm()
    ids = torch.cat([tokens(9, 1), tokens(9, 2), tokens(9, 3)])
    mask = torch.tensor([[1] * 4 + [0] * 5, [1] * 9, [0] * 3 + [1] * 6])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    assert len(computed) == 1
    for row, length in ((0, slice(0, 4)), (1, slice(0, 9)), (2, slice(3, 9))):
        alone = model(ids[row : row + 1, length], use_cache=False).logits[0]
        assert_close(found[row, length], alone, 1e-5)


def test_rows_without_padding_are_sequences_of_their_own():
    model = causal_lm()
    ids = torch.cat([tokens(9, 1), tokens(9, 2)])
    for more in ({}, {"attention_mask": torch.ones_like(ids)}, {"use_cache": True}):
        found = model(ids, **more).logits
        assert_close(found, torch.cat([model(row).logits for row in ids.split(1)]), 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_host_looks_once_a_pass_and_again_for_the_next(computed, checkpointing):
    model = causal_lm().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = tokens(sum(LENGTHS))
    grads = []
    for lengths in (LENGTHS, LENGTHS[::-1]):
        model.zero_grad()
        model(ids, position_ids=positions(lengths), use_cache=False).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert len(computed) == 2
    assert not torch.equal(*grads)
    assert not varlen._known  # nothing is kept of a pass that is over


@pytest.mark.parametrize("inference", [False, True])
def test_positions_that_were_changed_in_place_are_read_again(inference):
    (query, key, value), _ = inputs((8,), 2, 1, 8, torch.float32)
    with torch.inference_mode(inference):
        places = positions((8,))
        first, _ = varlen.varlen_attention(LAYER, query, key, value, None, position_ids=places)
        places[0, 4:] -= 4
        second, _ = varlen.varlen_attention(LAYER, query, key, value, None, position_ids=places)
    torch.testing.assert_close(first[:, :4], second[:, :4])  # some CPUs sum 4 tokens in another order than 8
    assert (first[:, 4:] - second[:, 4:]).abs().max() > 0.1


def test_float32_under_autocast_is_computed_in_its_dtype():
    (query, key, value), _ = inputs(LENGTHS, 4, 2, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = varlen.varlen_attention(LAYER, query, key, value.bfloat16(), None, position_ids=positions(LENGTHS))
    assert out.dtype == torch.bfloat16
    rows = [x.detach()[0].transpose(0, 1) for x in (query, key, value)]
    assert_close(out[0], attention(*rows, LENGTHS), 1e-2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"is_causal": False}, r"is_causal=False"),
        ({"dropout": 0.1}, r"dropout=0\.1"),
        ({"softcap": 30.0}, r"softcap"),
        ({"s_aux": torch.zeros(2)}, r"sinks"),
        ({"attention_mask": torch.zeros(1, 1, 8, 8)}, r"mask of 4 dimensions"),
        ({"position_ids": None}, r"no positions"),
        ({"position_ids": torch.zeros(3, 1, 8)}, r"no positions"),
        ({"key": torch.zeros(1, 1, 9, 8)}, r"use_cache=True"),
        ({"value": torch.zeros(1, 1, 8, 16)}, r"heads of \[8, 16\]"),
    ],
    ids=str,
)
def test_what_it_cannot_compute_is_refused(options, said):
    (query, key, value), _ = inputs((8,), 2, 1, 8, torch.float32)
    call = {"query": query, "key": key, "value": value, "attention_mask": None, "position_ids": positions((8,))}
    with pytest.raises(
        ValueError, match=rf"SimpleNamespace has .*{said}.* cannot compute that\. Accepted are .* Set \+\+"
    ):
        varlen.varlen_attention(LAYER, **call | options)


@pytest.mark.parametrize("size", [12, 264])
def test_sizes_of_heads_that_the_kernels_lack_are_refused(size):
    (query, key, value), _ = inputs((8,), 2, 1, size, torch.float32)
    with pytest.raises(ValueError, match=rf"heads of \[{size}\] elements"):
        varlen.varlen_attention(LAYER, query, key, value, None, position_ids=positions((8,)))


def test_models_with_other_attention_are_refused_before_they_compute():
    with pytest.raises(ValueError, match=r"^Gemma2ForCausalLM has capped scores .* Set \+\+actor_rollout_ref.*=eager"):
        varlen.check_model(causal_lm(Gemma2Config))
    varlen.check_model(causal_lm(Gemma2Config, "eager"))
    varlen.check_model(causal_lm())
    own = causal_lm()
    own._supports_attention_backend = False
    with pytest.raises(ValueError, match=r"no attention that can be exchanged"):
        varlen.check_model(own)


def test_attention_sinks_are_refused_by_the_first_pass():
    with pytest.raises(ValueError, match=r"^GptOssAttention has attention sinks"):
        causal_lm(GptOssConfig, num_local_experts=2, num_experts_per_tok=1)(tokens(8), use_cache=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_function": lambda row, head, q, k: k <= q + 1}, r"qwen2 has a mask of its own"),
        ({"use_vmap": True}, r"qwen2 has a mask of its own"),
        ({"local_size": 4}, r"qwen2 has attention in chunks of 4"),
    ],
    ids=["later tokens", "of the model", "chunks"],
)
def test_masks_that_are_not_causal_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        varlen.padding_mask(1, 8, 8, config=Qwen2Config(), **options)


def test_registering_again_changes_nothing():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    varlen.register()
    assert ALL_ATTENTION_FUNCTIONS[varlen.NAME] is varlen.varlen_attention
