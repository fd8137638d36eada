"""Attention over a key/value cache, and appending to one: the two functions of the package that write in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ext import reference

__all__ = ["attention_with_kv_cache", "kv_cache_append_"]


def kv_cache_append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: int | Tensor,
    *,
    block_table: Tensor | None = None,
    ring: bool = False,
    cu_seqlens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
) -> None:
    """Write new keys and values into a cache, in place, behind the tokens that it holds.

    Token i of sequence b gets position cache_lengths[b] + i. The lengths themselves are the caller's to move along.

    Args:
        k_cache: contiguous: (B, Hkv, capacity, D), any strides (one layer of a stacked cache, say). Paged, where
            block_table is given: (blocks, Hkv, page, D). float32, bfloat16, float16, float64, or int8 with scales.
        v_cache: likewise, with Dv.
        k: (B, Hkv, n, D), n ≥ 0, in the dtype of the cache (any of the four floats for int8); or packed, with
            cu_seqlens: (total, Hkv, D).
        v: likewise, with Dv.
        cache_lengths: how many tokens each sequence holds before the call: an integer, the same for all, or
            (B,) int32 or int64.
        block_table: (B, blocks per sequence) int32: position p of sequence b is row p % page of block
            block_table[b, p // page]. Only the entries that the call needs are looked at.
        ring: position p stands in slot p % capacity, so that the last `capacity` positions are there. Contiguous only.
        cu_seqlens: (B + 1,) int32 or int64: sequence b brings the tokens cu_seqlens[b] to cu_seqlens[b + 1] − 1.
        k_scales, v_scales: float32 (B, Hkv, capacity), paged (blocks, Hkv, page), for int8: one scale a token and
            head, max|x| / 127. Numbers are rounded to nearest, ties to even; a token with NaN or Inf gets a NaN scale.
        rotary: (cos, sin), each (positions, rotary_dim / 2), float32 (float64 for float64), row p for position p:
            k is turned by its positions before it is stored (Su et al. 2021, equation 34), and rounded once.
        rotary_interleaved: pairs features 2n with 2n + 1 instead of n with n + rotary_dim / 2.

    Raises:
        IndexError: a sequence that would outgrow its capacity, a block_table entry outside the pool, a position
            without a row in the rotary tables.
        ValueError: shapes that do not fit, negative lengths, two tokens that would be written to the same place, inputs
            that need a gradient.
        TypeError: dtypes that do not fit.
        Whatever is raised, nothing was written.
    """
    reference.kv_cache_append_(
        k_cache,
        v_cache,
        k,
        v,
        cache_lengths,
        block_table=block_table,
        ring=ring,
        cu_seqlens=cu_seqlens,
        k_scales=k_scales,
        v_scales=v_scales,
        rotary=rotary,
        rotary_interleaved=rotary_interleaved,
    )


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: int | Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    block_table: Tensor | None = None,
    ring: bool = False,
    cu_seqlens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
) -> Any:
    """Append k and v to a cache where they are given, then attend to what it holds: prefill, chunk and decode alike.

    Sequence b then holds T = cache_lengths[b] + n tokens, and its query i stands at position T − Lq + i.

    Args:
        q: (B, Hq, Lq, D), or packed, with cu_seqlens: (total, Hq, D). Dtype of the cache (any float for int8).
        k_cache, v_cache, cache_lengths, block_table, ring, k_scales, v_scales: as in `kv_cache_append_`. A ring must
            still hold every key that a query may see: T ≤ capacity, or a window with left + Lq ≤ capacity.
        k, v: new tokens, appended first, as in `kv_cache_append_`; both or neither.
        cu_seqlens: for packed q, and k, v, which then have as many tokens in each sequence.
        causal: True: a query sees the keys up to its own position; False: all T.
        window: (left, right) around the query's own position; None = unbounded.
        scale, softcap, sinks: as in `attention`.
        alibi_slopes: (Hq,) or (B, Hq) float32; by the distance of the positions.
        rotary, rotary_interleaved: as in `kv_cache_append_`; q is turned too, by its positions.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out (B, Hq, Lq, Dv) or (total, Hq, Dv) in the dtype of q; with return_lse also the lse, (B, Hq, Lq) or
        (Hq, total), float32 (float64 for float64). A row that sees no key: 0 and −inf. Slots past the lengths are
        never read. For inference: it has no gradient.

    Raises:
        IndexError, ValueError, TypeError: as `kv_cache_append_`, and as `attention`. Nothing was written then.
    """
    return reference.attention_with_kv_cache(
        q,
        k_cache,
        v_cache,
        cache_lengths,
        k=k,
        v=v,
        block_table=block_table,
        ring=ring,
        cu_seqlens=cu_seqlens,
        k_scales=k_scales,
        v_scales=v_scales,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        rotary=rotary,
        rotary_interleaved=rotary_interleaved,
        return_lse=return_lse,
    )
