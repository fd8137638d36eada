"""Attention in plain PyTorch (and NumPy): short, slow and right. The truth for tests, bench and lessons.

    scores = q·kᵀ·scale → softcap·tanh(scores/softcap) → + bias → masks → softmax (with sinks) → dropout → ·v

B batch · Hq query heads · Hkv key/value heads · Lq queries · Lk keys
D head dim of q and k · Dv head dim of v and out

It is also the road that `attn_ext.attention` takes for double backward, forward-mode AD and `torch.func`:
nothing here works in place or branches on the values of a tensor (lengths are looked at only to refuse those
out of range), everything can be differentiated as often as one likes.

One rule shapes the code: *a key hidden from a row never touches that row, whatever it holds*. A plain matrix
product breaks it, for 0·NaN is NaN: a hidden v of NaN would spoil the output, a hidden k of NaN the gradient
of q, and a row's bad incoming gradient the gradients of keys it never saw. So both matrix products are
replaced by two that know which pairs see each other, `_visible_dot` and `_visible_sum`. The gradient of each
is made of the two again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_ext import masks
from attn_ext._arguments import FLOATS, check_call, integer_tensor, read_options, read_window
from attn_ext.reference_cache import attention_with_kv_cache, kv_cache_append_

__all__ = [
    "attention",
    "attention_numpy",
    "attention_varlen",
    "attention_weights",
    "attention_with_kv_cache",
    "dropout_keep",
    "kv_cache_append_",
    "lse",
    "stable_softmax",
    "visible",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_sequence: int = 0,
    return_lse: bool = False,
    return_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Scaled dot-product attention, every option of `attn_ext.attention`.

    Args:
        q: (B, Hq, Lq, D), or (Hq, Lq, D), or with two batch dims.
        k: (B, Hkv, Lk, D); query head h reads key/value head h // (Hq / Hkv).
        v: (B, Hkv, Lk, Dv).
        mask: bool, True = attend; or float, a second bias. Broadcasts to (B, Hq, Lq, Lk) from the right.
        bias: float, added to the scaled scores; −inf hides a key as False does.
        causal: False, "top_left" or "bottom_right"; True where Lq == Lk.
        window: (left, right), the keys from i − left to i + right; None = unbounded.
        scale: 1/√D where not given.
        softcap: caps the scores smoothly at ±softcap; None or 0 = off.
        alibi_slopes: (Hq,) or (B, Hq), any float dtype; takes slope·|distance| off the scores. No gradient.
        sinks: (Hq,) logits that take part in the softmax without a key or value of their own.
        key_lengths: (B,) integers; keys at and past the length are hidden.
        dropout_p: probability of dropping a weight after the softmax, rounded to a multiple of 1/65536: from
            1 − 1/131072 on (0.999999, say) all weights are dropped.
        dropout_seed: 64-bit seed of the dropout mask; drawn from torch's generator where not given.
        dropout_sequence: index of the first sequence, where this batch is a part of a larger one.
        return_lse: also return the log-sum-exp of each row's scores, (B, Hq, Lq); −inf where it sees none.
        return_weights: also return the weights before dropout, (B, Hq, Lq, Lk).
        dtype: compute and return in this dtype. Where not given: in float32 (float64 for float64 inputs),
            with one rounding to the dtype of q at the end.

    Returns:
        out (B, Hq, Lq, Dv), or a tuple (out[, lse][, weights]). A row that sees no key gives exactly 0.

    Raises:
        TypeError: dtypes of q, k, v that differ or that attention does not work in, a mask, bias, sinks or key_lengths
            of a wrong dtype, a scale, softcap or dropout_p that is no plain number.
        ValueError: shapes or options that do not fit together, numbers out of range, slopes that want a gradient.
    """
    weights, lse_, seen = _weights_and_lse(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        dtype=dtype,
    )
    dropped = weights
    if dropout_p > 0.0:
        if dropout_seed is None:
            dropout_seed = torch.randint(-(2**63), 2**63 - 1, (), device=q.device)
        *batch, Hq, Lq, Lk = weights.shape
        sequences = range(dropout_sequence, dropout_sequence + math.prod(batch))
        keep = dropout_keep(dropout_seed, sequences, Hq, Lq, Lk, dropout_p, device=q.device)
        keep = keep.reshape(weights.shape)
        dropped = torch.where(
            keep, weights * _dropout_scale(dropout_p), 0.0
        )  # 0, but still seen: 0·NaN is NaN
    values = _repeat_heads(v.to(weights.dtype), q.shape[-3])
    out = _visible_sum(dropped, values, seen)  # (B, Hq, Lq, Dv)

    result = [out.to(dtype or q.dtype)]
    if return_lse:
        result.append(lse_)
    if return_weights:
        result.append(weights.to(dtype or q.dtype))
    return result[0] if len(result) == 1 else tuple(result)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """The softmax probabilities before dropout, (B, Hq, Lq, Lk), or only those of some rows or heads.

    Args:
        q: (B, Hq, Lq, D).
        k: (B, Hkv, Lk, D).
        rows: which queries, default all.
        heads: which query heads, default all.
        dtype: as in `attention`.
        **options: mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, key_lengths as there.
            Where q holds only some rows of a longer one: row_positions (Lq,), the places they have among
            num_queries.

    Returns:
        (B, heads, rows, Lk) in `dtype`, or in the dtype of q where not given.

    Raises:
        TypeError, ValueError: as `attention`; IndexError: a row or head that is not there.
    """
    weights = _weights_and_lse(q, k, k, dtype=dtype, **options)[0].to(dtype or q.dtype)
    if heads is not None:
        weights = weights.index_select(-3, torch.as_tensor(heads, dtype=torch.int64, device=q.device))
    if rows is not None:
        weights = weights.index_select(-2, torch.as_tensor(rows, dtype=torch.int64, device=q.device))
    return weights


def lse(q: Tensor, k: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Log-sum-exp of each row's scores, (B, Hq, Lq); options as in `attention_weights`.

    Returns:
        (B, Hq, Lq) in `dtype`; where not given in float32, or float64 for float64 inputs. −inf where a row sees no key.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    return _weights_and_lse(q, k, k, dtype=dtype, **options)[1]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Attention over sequences packed one behind the other, by calling `attention` for each.

    Args:
        q: (total of Lq, Hq, D). Sequence b holds the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] − 1.
        k: (total of Lk, Hkv, D), likewise with cu_seqlens_k.
        v: (total of Lk, Hkv, Dv).
        cu_seqlens_q: (B + 1,) integers: 0, then the running total of the lengths.
        cu_seqlens_k: (B + 1,) integers.
        causal, window, scale, softcap, sinks: as in `attention`, by each sequence's own lengths.
        alibi_slopes: (Hq,) or (B, Hq).
        dropout_p, dropout_seed, return_lse, dtype: as in `attention`.

    Returns:
        out (total of Lq, Hq, Dv), with return_lse also the lse (Hq, total of Lq).

    Raises:
        TypeError: cu_seqlens that are no tensors of int32 or int64, and as `attention`.
        ValueError: cu_seqlens that do not start with 0, that fall, that do not end with the rows of q and of k or that
            describe different numbers of sequences; shapes and options as in `attention`.
    """
    op = "reference.attention_varlen"
    options = read_options(
        op,
        q,
        k,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
    )
    cu_seqlens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, cu in cu_seqlens.items():
        integer_tensor(op, name, cu)
    check_call(op, q, k, v, options._replace(**cu_seqlens), FLOATS)
    if dropout_p > 0.0 and dropout_seed is None:
        dropout_seed = torch.randint(-(2**63), 2**63 - 1, (), device=q.device)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        out, row_lse = attention(
            *(x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])),  # each (H, L, D)
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b],
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            dropout_sequence=b,
            return_lse=True,
            dtype=dtype,
        )
        outs.append(out.transpose(0, 1))
        lses.append(row_lse)
    out = torch.cat(outs) if outs else v.new_zeros(0, q.shape[1], v.shape[2])
    return (out, torch.cat(lses, dim=-1)) if return_lse else out


def stable_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dim that neither overflows nor divides by zero.

    Args:
        scores: (..., Lk), floating point.
        mask: bool, True = keep, broadcast from the right. Rows without any True give 0, not NaN.

    Raises:
        TypeError: a mask that is not bool.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"stable_softmax: mask must be bool (True = keep), got {mask.dtype}; mask.bool() makes one"
        )
    return _softmax(scores, None if mask is None else mask.expand(scores.shape), None)[0]


def visible(
    Lq: int,
    Lk: int,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Which query may see which key by position alone.

    Args:
        Lq, Lk: number of queries and keys.
        causal, window: as in `attention`.
        key_lengths: integers of the shape of the batch dims.
        rows: which of the Lq queries to answer for, default all.

    Returns:
        bool, broadcastable to (B, Hq, Lq, Lk), True = sees; None where every query sees every key.

    Raises:
        ValueError: `causal=True` where Lq and Lk differ, a corner that does not exist, or a negative window.
    """
    if causal is True:
        if Lq != Lk:
            raise ValueError(
                f"attention: causal=True is ambiguous for Lq = {Lq} queries and Lk = {Lk} keys; "
                'say "top_left" (the first query sees the first key) or "bottom_right" (the last the last)'
            )
        causal = "bottom_right"
    if causal not in (False, "top_left", "bottom_right"):
        raise ValueError(
            f'attention: causal must be False, True, "top_left" or "bottom_right", got {causal!r}'
        )
    left, right = read_window("reference.visible", window)
    at = _aligned_keys(Lq, Lk, causal, rows, device)  # (Lq, 1)
    keys = torch.arange(Lk, device=device)
    rules = []
    if causal:
        rules.append(keys <= at)
    if left is not None:
        rules.append(keys >= at - left)
    if right is not None:
        rules.append(keys <= at + right)
    if key_lengths is not None:
        rules.append(keys < key_lengths[..., None, None, None])
    return masks.combine(*rules) if rules else None


def dropout_keep(
    seed: int | Tensor,
    B: int | range,
    H: int,
    Lq: int,
    Lk: int,
    p: float,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Which weights dropout keeps: bool (B, H, Lq, Lk), a pure function of the seed and the place.

    Philox 4x32-10 with the seed as key and (b, h, i, j // 8) as counter gives four 32-bit words, hence eight
    16-bit numbers for eight neighbouring keys. A weight is kept where its number is not below p·65536, rounded.
    A range in place of B makes the part of the mask that belongs to those sequences of the batch.

    Raises:
        ValueError: a p outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"attn_ext.reference.dropout_keep: p must lie between 0 and 1, not be {p}")
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device).reshape(())
    sequences = B if isinstance(B, range) else range(B)
    b, h, i = (torch.arange(n.start, n.stop, device=device) for n in (sequences, range(H), range(Lq)))
    blocks = torch.arange((Lk + 7) // 8, device=device)
    counter = torch.broadcast_tensors(b[:, None, None, None], h[:, None, None], i[:, None], blocks)
    words = torch.stack(philox_4x32_10(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)), dim=-1)
    numbers = torch.stack((words & 0xFFFF, words >> 16), dim=-1)  # (B, H, Lq, blocks, 4 words, 2 halves)
    return numbers.flatten(-3)[..., :Lk] >= _dropout_threshold(p)


def philox_4x32_10(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32 with 10 rounds (Salmon et al. 2011); words of 32 bits, held in int64 tensors.

    int64 products wrap around modulo 2⁶⁴, which leaves both 32-bit halves of the true product intact.
    """
    low32 = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & low32) ^ c1 ^ k0,
            product1 & low32,
            ((product0 >> 32) & low32) ^ c3 ^ k1,
            product0 & low32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & low32, (k1 + 0xBB67AE85) & low32
    return c0, c1, c2, c3


def attention_numpy(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    return_weights: bool = False,
) -> Any:
    """Attention in NumPy, float64, one query at a time: only the keys that it may see are ever looked at.

    Args:
        q: (..., Lq, D).
        k: (..., Lk, D), the leading dims of q.
        v: (..., Lk, Dv).
        mask: bool, True = attend, broadcast to (..., Lq, Lk).
        bias: float, added to the scaled scores; −inf hides.
        causal: False, "top_left", "bottom_right", or True where Lq == Lk.
        scale: 1/√D where not given.
        return_weights: also return the weights (..., Lq, Lk).

    Returns:
        out (..., Lq, Dv), or a tuple of it and the weights, float64. A row that sees no key: 0.

    Raises:
        ValueError: a mask or bias that does not broadcast, a corner that does not exist, `causal=True` where Lq and Lk
            differ, shapes of q, k and v that do not fit (NumPy's own message).
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    *leading, Lq, D = q.shape
    Lk, Dv = v.shape[-2:]
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    full = (*leading, Lq, Lk)
    added = np.broadcast_to(0.0 if bias is None else np.asarray(bias, dtype=np.float64), full)
    seen = np.broadcast_to(True if mask is None else mask, full) & (added != -np.inf)
    by_position = visible(Lq, Lk, causal=causal)
    if by_position is not None:
        seen = seen & by_position.numpy()

    out, weights = np.zeros((*leading, Lq, Dv)), np.zeros(full)
    for *head, i in np.ndindex(*leading, Lq):
        at = tuple(head)
        keys = np.flatnonzero(seen[(*at, i)])
        if keys.size == 0:
            continue  # nothing to attend to: the row stays 0
        scores = k[at][keys] @ q[(*at, i)] * scale + added[(*at, i)][keys]
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        weights[(*at, i)][keys] = probabilities
        out[(*at, i)] = probabilities @ v[at][keys]
    return (out, weights) if return_weights else out


# ------------------------------------------------------------------------------------------ the steps


def _bias_in(work: torch.dtype, x: Tensor) -> Tensor:
    """A bias in the dtype of the scores. What is finite and too large for it stays finite, for −inf means hidden."""
    cast = x.to(work)
    if torch.finfo(x.dtype).max <= torch.finfo(work).max:
        return cast
    largest = torch.finfo(work).max
    return torch.where(torch.isfinite(x), cast.clamp(-largest, largest), cast)


def _weights_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    row_positions: Tensor | None = None,
    num_queries: int | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights (B, Hq, Lq, Lk), lse (B, Hq, Lq), and who sees whom, (B, Hq, Lq, Lk) bool or None for all.

    With row_positions and num_queries, row r of q is query row_positions[r] of num_queries.
    """
    op = "reference.attention"
    options = read_options(
        op,
        q,
        k,
        mask=mask,
        bias=bias,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
    )
    check_call(op, q, k, v, options, FLOATS)
    *batch, Hq, Lq, D = q.shape
    Lk = k.shape[-2]
    work = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    scale = 1.0 / math.sqrt(D) if scale is None else scale

    # 1. Who sees whom: all rules must agree.
    if key_lengths is not None:
        key_lengths = key_lengths.reshape(batch)
    queries = Lq if num_queries is None else num_queries
    where = {"causal": causal, "rows": row_positions, "device": q.device}
    seen = visible(queries, Lk, window=window, key_lengths=key_lengths, **where)
    biases = [_bias_in(work, x) for x in (mask, bias) if x is not None and x.dtype != torch.bool]
    rules = [] if seen is None else [seen]
    rules += [x for x in (mask,) if x is not None and x.dtype == torch.bool]
    rules += [x != -torch.inf for x in biases]
    if rules:
        seen = masks.combine(*rules).expand(*batch, Hq, Lq, Lk)

    # 2. Scores (B, Hq, Lq, Lk).
    scores = _visible_dot(q.to(work), _repeat_heads(k.to(work), Hq).mT, seen) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for x in biases:
        scores = scores + x
    if alibi_slopes is not None:
        distance = torch.arange(Lk, device=q.device) - _aligned_keys(queries, Lk, **where)
        slopes = alibi_slopes.reshape(*(batch if alibi_slopes.dim() > 1 else ()), Hq, 1, 1)
        scores = scores - slopes.to(work) * distance.abs()

    # 3. Weights.
    sink = None if sinks is None else sinks.to(work)[:, None, None].expand(*batch, Hq, Lq, 1)
    return (*_softmax(scores, seen, sink), seen)


def _aligned_keys(
    Lq: int, Lk: int, causal: bool | str, rows: Tensor | None, device: torch.device | None
) -> Tensor:
    """The key that each of the Lq queries (or of some rows of them) stands at, (Lq, 1)."""
    at = masks.query_positions(Lq, Lk, causal if isinstance(causal, str) else "bottom_right", device=device)
    return at if rows is None else at[rows]


def _softmax(scores: Tensor, seen: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights (..., Lk) and log-sum-exp (...) of the scores that are seen and of the sink (..., 1).

    Hidden scores become 0 before exp and the result becomes 0 after it: with −inf alone, a row that sees
    nothing would be −inf − (−inf), and the gradient of what `where` throws away would be 0·NaN.
    """

    def hide(x: Tensor, filler: float) -> Tensor:
        return x if seen is None else torch.where(seen, x, filler)

    # The result does not depend on what is subtracted, so no gradient goes through the maximum.
    candidates = hide(scores, -torch.inf).detach()
    if scores.shape[-1] > 0:
        top = candidates.amax(-1, keepdim=True)  # (..., 1)
    else:
        top = torch.full((*scores.shape[:-1], 1), -torch.inf, dtype=scores.dtype, device=scores.device)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)  # nothing seen at all

    exponentials = hide(hide(scores - top, 0.0).exp(), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        # A sink of +inf takes everything: its share is 1, not exp(inf − inf).
        total = total + torch.where(sink == torch.inf, 1.0, (sink - top).exp())
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    weights = hide(exponentials / total, 0.0)
    return weights, torch.where(nothing, -torch.inf, top + total.log()).squeeze(-1)


def _repeat_heads(x: Tensor, Hq: int) -> Tensor:
    """(B, Hkv, L, D) → (B, Hq, L, D), each head Hq/Hkv times in a row: 0 0 1 1, not 0 1 0 1."""
    *batch, Hkv, L, D = x.shape
    if Hkv == Hq:
        return x
    return x[..., :, None, :, :].expand(*batch, Hkv, Hq // Hkv, L, D).flatten(-4, -3)


def _dropout_threshold(p: float) -> int:
    return round(p * 65536)


def _dropout_scale(p: float) -> float:
    """1/(1 − p) for the p that 16 random bits can express; nothing is left to be scaled where p = 1."""
    kept = 65536 - _dropout_threshold(p)
    return 65536 / kept if kept else 0.0


# ------------------------------------------------------------------------------------------ the two products


def _visible_dot(a: Tensor, b: Tensor, seen: Tensor | None) -> Tensor:
    """a·b where seen and 0 elsewhere: (…, M, D), (…, D, N) → (…, M, N)."""
    if seen is None:
        return _matmul(a, b)
    # torch.compile traces an autograd function only without a jvp rule.
    function = _VisibleDot if torch.compiler.is_compiling() else _VisibleDotWithJvp
    return function.apply(a, b, seen)


def _visible_sum(w: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
    """Row i is the sum of w[i, j]·x[j] over the j it sees: (…, M, N), (…, N, D) → (…, M, D)."""
    if seen is None:
        return _matmul(w, x)
    function = _VisibleSum if torch.compiler.is_compiling() else _VisibleSumWithJvp
    return function.apply(w, x, seen)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # autocast would round both to 16 bits
        return a @ b


class _VisibleDot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, _matmul(a, b), 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, seen = ctx.saved_tensors
        return _visible_sum(grad, b.mT, seen), _visible_sum(grad.mT, a, seen.mT).mT, None


class _VisibleDotWithJvp(_VisibleDot):
    @staticmethod
    def jvp(ctx: Any, a_tangent: Tensor, b_tangent: Tensor, _: None) -> Tensor:
        a, b, seen = ctx.saved_tensors
        return _visible_dot(a_tangent, b, seen) + _visible_dot(a, b_tangent, seen)


class _VisibleSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        w, finite = torch.where(seen, w, 0.0), x.isfinite()
        total = _matmul(w, torch.where(finite, x, 0.0))
        # What is not finite is left out above and put back for the rows that see it, as plain sums would have
        # it: infinities of one sign stay that, anything else (both signs, NaN, 0·inf) is NaN.
        infinities = _matmul(w.sign(), torch.where(x.isinf(), x.sign(), 0.0))
        not_finite = _matmul(seen.to(w.dtype), (~finite).to(w.dtype))  # how many each row sees
        bad = torch.where(infinities.abs() == not_finite, infinities * torch.inf, torch.nan)
        return torch.where(not_finite == 0, total, total + bad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        w, x, seen = ctx.saved_tensors
        return _visible_dot(grad, x.mT, seen), _visible_sum(w.mT, grad, seen.mT), None


class _VisibleSumWithJvp(_VisibleSum):
    @staticmethod
    def jvp(ctx: Any, w_tangent: Tensor, x_tangent: Tensor, _: None) -> Tensor:
        w, x, seen = ctx.saved_tensors
        return _visible_sum(w_tangent, x, seen) + _visible_sum(w, x_tangent, seen)
