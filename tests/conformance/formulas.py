"""Formulas that are public but not in kvpress, written out again for these fixtures: R-KV, KVCache-Factory's and
sparse-frontier's SnapKV, and the filters of Q-Filters. README.md says where each comes from."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """`[B, Hq, L, D]` to `[B, Hkv, G, L, D]`."""
    batch, heads, length, width = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads, length, width)


def window_logits(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Scaled logits of the last `window` queries over all keys, `[B, Hkv, G, window, T]`."""
    queries = grouped(q[:, :, -window:], k.shape[1])
    return torch.einsum("bhgqd,bhkd->bhgqk", queries, k) * q.shape[-1] ** -0.5


def window_attention(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Causal softmax of `window_logits`."""
    tokens = k.shape[2]
    seen = torch.arange(tokens)[None, :] <= torch.arange(tokens - window, tokens)[:, None]
    return window_logits(q, k, window).masked_fill(~seen, float("-inf")).softmax(-1)


def protect(past: Tensor, window: int) -> Tensor:
    """Appends the window's tokens, above all others."""
    return torch.cat([past, past.max().add(1).expand(*past.shape[:2], window)], dim=-1)


def r_kv(q: Tensor, k: Tensor, *, mix: float, window: int = 8, kernel: int = 7) -> Tensor:
    """R-KV: importance to the last queries less redundancy among keys."""
    # The window's columns go before the softmax, so the past tokens share all of the attention.
    logits = window_logits(q, k, window)[..., :-window].amax(dim=2)
    importance = logits.softmax(-1).mean(-2)
    importance = torch.nn.functional.max_pool1d(importance, kernel, stride=1, padding=kernel // 2)
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    cosine = unit @ unit.transpose(-1, -2)
    tokens = k.shape[2]
    cosine[..., torch.arange(tokens), torch.arange(tokens)] = 0.0
    # The latest near-duplicate of each token is forgiven. A row without one forgives its cosine with token 0: so does
    # the authors' code.
    latest = ((cosine > 0.5) * torch.arange(tokens)).amax(-1, keepdim=True)
    cosine.scatter_(-1, latest, 0.0)
    redundancy = cosine.mean(-2).softmax(-1)[..., :-window]
    return protect(mix * importance - (1 - mix) * redundancy, window)


def snapkv_factory(q: Tensor, k: Tensor, *, window: int = 8, kernel: int = 7) -> Tensor:
    """SnapKV as KVCache-Factory runs it, one score for each KV head: sums, mean over the group, then a max pool."""
    past = window_attention(q, k, window)[..., :-window].sum(-2).mean(2)
    return protect(torch.nn.functional.max_pool1d(past, kernel, stride=1, padding=kernel // 2), window)


def snapkv_frontier(q: Tensor, k: Tensor, *, window: int, kernel: int, local: int, sink: int) -> Tensor:
    """SnapKV as sparse-frontier runs it: the pool also sees the window's columns; another window is protected."""
    scores = window_attention(q, k, window).mean(2).sum(-2)
    scores = torch.nn.functional.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    highest = scores[..., sink:-local].max() + 1
    scores[..., -local:] = highest
    scores[..., :sink] = highest
    return scores


def q_filters(q: Tensor, kv_heads: int) -> Tensor:
    """Filters `[Hkv, D]` from the queries of one sequence, as the authors make them: what kvpress downloads."""
    left, _, right = torch.linalg.svd(q[0], full_matrices=False)
    # The first direction, turned to the side on which most queries lie.
    side = torch.where((left[..., 0] > 0).float().mean(-1) > 0.5, 1.0, -1.0)
    filters = -side[:, None] * right[:, 0]
    return filters.reshape(kv_heads, -1, q.shape[-1]).mean(1)


def kept_positions(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` best of each head."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count, dim=-1).indices, True)
