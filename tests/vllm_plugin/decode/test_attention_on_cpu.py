"""Which layers and steps have the attention of ours, and what it is given."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from verl_qerl.vllm_plugin.decode import attention as module
from verl_qerl.vllm_plugin.decode.attention import DecodeAttentionImpl, use_decode_attention, why_stock
from verl_qerl.vllm_plugin.log import say_once

CACHE = torch.zeros(9, 2, 16, 2, 64, dtype=torch.bfloat16)
STOCK = ("do_kv_cache_update", "forward")


def make_impl(heads=8, head_size=64, **options):
    """As vLLM makes it for a layer."""
    named = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
    return FlashAttentionImpl(heads, head_size, 0.125, 2, **named)


@pytest.fixture
def model(monkeypatch):
    """Two layers with attention on a GPU's implementation."""
    from vllm.model_executor.layers import attention

    class Layer(torch.nn.Module):
        def __init__(self, name, impl):
            super().__init__()
            self.impl, self.layer_name, self.weight = impl, name, torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(attention, "Attention", Layer)
    return torch.nn.ModuleList([Layer("first", make_impl()), Layer("second", make_impl())])


def config_of(mode="FULL_AND_PIECEWISE", v2=True):
    graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode] if mode else None)
    return SimpleNamespace(compilation_config=graphs, use_v2_model_runner=v2)


@pytest.fixture
def calls(monkeypatch):
    """What is called from now on, ours or vLLM's, with its arguments."""
    seen = []

    def record(name):
        return lambda *args, **kwargs: seen.append((name, args, kwargs))

    monkeypatch.setattr(module, "decode_attention", record("decode"))
    for name in STOCK:
        monkeypatch.setattr(FlashAttentionImpl, name, record(name))
    return seen


def make_metadata(rows=3, **changes):
    named = {
        "max_query_len": 1,
        "use_cascade": False,
        "causal": True,
        "num_actual_tokens": rows,
        "seq_lens": torch.ones(4, dtype=torch.int32),
        "slot_mapping": torch.zeros(4, dtype=torch.int64),
        "block_table": torch.zeros(4, 2, dtype=torch.int32),
    }
    return SimpleNamespace(**(named | changes))


def step(layer, metadata, monkeypatch, cache=CACHE, wrap=None):
    """As vLLM's Attention: the cache first, then the product."""
    q, k, v, out = (torch.zeros(5, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2, 8))
    context = SimpleNamespace(attn_metadata={layer.layer_name: metadata} if wrap is None else wrap)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    layer.impl.do_kv_cache_update(layer, k, v, cache, torch.zeros(4, dtype=torch.int64))
    layer.impl.forward(layer, q, k, v, cache, metadata, output=out)


def test_one_token_of_each_sequence_is_ours(model, calls, monkeypatch):
    use_decode_attention(model, config_of())
    metadata = make_metadata()
    step(model[0], metadata, monkeypatch)
    ((name, (q, k, v, cache, lengths, table, slots, scale, out), _),) = calls
    assert (name, len(q), len(k), len(v), len(out), scale) == ("decode", 3, 3, 3, 3, 0.125)
    assert cache is CACHE
    assert (lengths, table, slots) == (metadata.seq_lens, metadata.block_table, metadata.slot_mapping)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        make_metadata(max_query_len=2),
        make_metadata(use_cascade=True),
        make_metadata(causal=False),
        make_metadata(causal=torch.ones(4)),
        make_metadata(rows=5),
    ],
    ids=["profile", "prompt", "cascade", "not causal", "causal by sequence", "rows without a sequence"],
)
def test_other_steps_are_vllms(model, calls, monkeypatch, metadata):
    use_decode_attention(model, config_of())
    step(model[1], metadata, monkeypatch)
    assert [name for name, *_ in calls] == list(STOCK)


def test_a_cache_that_cannot_be_read_is_vllms_and_it_says_so(model, calls, monkeypatch, caplog):
    say_once.cache_clear()
    use_decode_attention(model, config_of())
    for _ in range(2):
        step(model[0], make_metadata(), monkeypatch, cache=CACHE.half())
    assert [name for name, *_ in calls] == [*STOCK, *STOCK]
    assert caplog.text.count("vLLM's attention decodes: a cache (9, 2, 16, 2, 64) of torch.float16") == 1


def test_keys_are_kept_where_it_is_not_known_who_keeps_them(model, calls, monkeypatch):
    """With batches in halves vLLM gives no metadata by layer; to put them there twice is right."""
    use_decode_attention(model, config_of())
    step(model[0], make_metadata(), monkeypatch, wrap=[])
    assert [name for name, *_ in calls] == ["do_kv_cache_update", "decode"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a soft cap of logits"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"kv_sharing_target_layer_name": "first"}, "the cache of another layer"),
        ({"kv_cache_dtype": "float16"}, "a cache in float16"),
        ({"head_size": 96}, "8 heads on 2 of 96 columns"),
        ({"heads": 18}, "18 heads on 2 of 64 columns"),
    ],
    ids=str,
)
def test_layers_that_stay_with_vllm(model, caplog, options, reason):
    say_once.cache_clear()
    model[0].impl = make_impl(**options)
    assert why_stock(model[0].impl) == f"it has {reason}"
    use_decode_attention(model, config_of())
    assert type(model[0].impl) is FlashAttentionImpl
    assert type(model[1].impl) is DecodeAttentionImpl
    assert f"vLLM's attention decodes: it has {reason}, and the faster one takes none such." in caplog.text


def test_other_implementations_stay():
    assert why_stock(SimpleNamespace()) == "its implementation is SimpleNamespace"


@pytest.mark.parametrize(
    ("mode", "v2", "ours"),
    [
        ("FULL", True, False),
        ("FULL", False, True),
        ("FULL_DECODE_ONLY", True, True),
        ("PIECEWISE", True, True),
        (None, True, True),
    ],
)
def test_graphs_of_what_begins_keep_vllms(model, caplog, mode, v2, ours):
    say_once.cache_clear()
    use_decode_attention(model, config_of(mode, v2))
    assert [type(layer.impl) is DecodeAttentionImpl for layer in model] == [ours, ours]
    assert ("its V2 runner captures steps in which requests begin" in caplog.text) != ours
