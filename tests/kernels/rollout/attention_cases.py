"""Batches for the tests of `kernels.rollout.attention`, on a GPU and on the emulated one."""

from typing import Any

import torch

from verl_qerl.kernels.rollout.attention import decode_attention

SCALE = 0.11


def build(lengths: list[int], heads: int, kv_heads: int, head_size: int, page: int, device: str) -> dict[str, Any]:
    """Arguments of `decode_attention` without `out`; what no sequence holds is NaN, pages are in random order."""
    draw = torch.Generator().manual_seed(sum(lengths) + heads)
    columns = -(-max(*lengths, 1) // page)
    pages = len(lengths) * columns + 3
    table = torch.randperm(pages, generator=draw)[: len(lengths) * columns].view(len(lengths), columns).int()
    cache = torch.full((pages, 2, page, kv_heads, head_size), float("nan"))
    slots = torch.full((len(lengths),), -1)
    for sequence, length in enumerate(lengths):
        for at in range(length - 1):
            place = (table[sequence, at // page], slice(None), at % page)
            cache[place] = torch.randn((2, kv_heads, head_size), generator=draw)
        if length:
            slots[sequence] = table[sequence, (length - 1) // page] * page + (length - 1) % page
    B, columns = len(lengths), (heads + 2 * kv_heads) * head_size
    qkv = torch.randn((B, columns), generator=draw).bfloat16().to(device)
    q, k, v = (x.unflatten(1, (-1, head_size)) for x in qkv.split([heads * head_size, *[kv_heads * head_size] * 2], 1))
    named = {"cache": cache.bfloat16(), "lengths": torch.tensor(lengths).int(), "table": table, "slots": slots}
    return {"q": q, "k": k, "v": v, **{name: tensor.to(device) for name, tensor in named.items()}, "scale": SCALE}


def run(case: dict[str, Any]) -> torch.Tensor:
    """What `decode_attention` gives."""
    out = torch.empty(case["q"].shape, dtype=torch.bfloat16, device=case["q"].device)
    decode_attention(**case, out=out)
    return out


def expected(case: dict[str, Any]) -> torch.Tensor:
    """The result in float64, of a cache that holds the new tokens already."""
    q, cache = case["q"].double(), case["cache"].double()
    page = cache.shape[2]
    out = torch.zeros_like(q)
    for sequence, length in enumerate(case["lengths"].tolist()):
        if length:
            at = torch.arange(length, device=q.device)
            keys, values = cache[case["table"][sequence, at // page].long(), :, at % page].unbind(1)
            each = q.shape[1] // cache.shape[3]
            scores = torch.einsum("hd,thd->ht", q[sequence], keys.repeat_interleave(each, 1)) * case["scale"]
            out[sequence] = torch.einsum("ht,thd->hd", scores.softmax(1), values.repeat_interleave(each, 1))
    return out


def check(case: dict[str, Any]) -> torch.Tensor:
    """Run it, compare result and cache; returns the result."""
    before = case["cache"].clone()
    out = run(case)
    for sequence, slot in enumerate(case["slots"].tolist()):
        if slot >= 0:
            place = (slot // before.shape[2], slice(None), slot % before.shape[2])
            before[place] = torch.stack((case["k"][sequence], case["v"][sequence]))
    assert torch.equal(case["cache"].view(torch.int16), before.view(torch.int16))
    # Weights are rounded to bf16 before their product (2**-9 of each), the result once more.
    torch.testing.assert_close(out.double(), expected(case), rtol=2**-7, atol=2**-8)
    return out
