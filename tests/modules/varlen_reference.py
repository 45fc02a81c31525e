"""Attention written down token by token, for the tests of varlen_attention."""

import torch


def attention(query, key, value, lengths, window=None, scale=None):
    """[T, H, D] and twice [T, G, D], sequences behind each other -> [T, H, D]; in float64, one token at a time."""
    query, key, value = (x.double() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // key.shape[1]
    outputs, start = [], 0
    for length in lengths:
        for at in range(start, start + length):
            first = start if window is None else max(start, at - window + 1)
            keys, values = (x[first : at + 1].repeat_interleave(group, dim=1) for x in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[at], keys) * scale).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values))
        start += length
    return torch.stack(outputs)


def inputs(lengths, heads, groups, size, dtype, device="cpu", seed=0):
    """Queries, keys, values [1, H, T, D], as transformers has them, and a gradient of the output; normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, groups, groups)
    made = [torch.randn(1, count, sum(lengths), size, generator=generator) for count in counts]
    grad = torch.randn(1, sum(lengths), heads, size, generator=generator)
    *made, grad = (x.to(device, dtype) for x in (*made, grad))
    return [x.requires_grad_() for x in made], grad


def positions(lengths, device="cpu"):
    """[1, T]: from 0 on for each sequence."""
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)
