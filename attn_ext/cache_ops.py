"""Attention over a KV cache, and the append that fills it: the functions that the cache classes call.

A cache is a pair of tensors that keep the keys and values of the tokens so far, so that a new token costs its own work
and one pass over them, instead of the whole sequence again. For inference: nothing here has a gradient.

On a GPU cache_lengths, block_table and cu_seqlens are checked there, and the call does not wait: a sequence for which
they are wrong is not written to and gets zeros, and `backend.check_cuda` tells. All else is refused at once, as below.

Letters: B batch, Hq and Hkv heads, Lq queries, n new tokens, D and Dv head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ext._arguments import (
    FLOATS,
    check_device,
    compiling,
    expect_tensor,
    have_tangent,
    index_of,
    integer_tensor,
    named,
    read_options,
)
from attn_ext._fake import empty_in_order_of
from attn_ext._load import _C  # noqa: F401  registers torch.ops.attn_ext

__all__ = ["attention_with_kv_cache", "kv_cache_append_"]

_append = torch.ops.attn_ext.kv_cache_append_.default
_attend = torch.ops.attn_ext.attention_with_kv_cache.default
_append_and_attend = torch.ops.attn_ext.attention_with_kv_cache_append_.default
_increment_version = torch.autograd.graph.increment_version

Rotary = tuple[Tensor, Tensor]


def kv_cache_append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: Tensor | int,
    *,
    block_table: Tensor | None = None,
    ring: bool = False,
    cu_seqlens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
) -> None:
    """Writes new keys and values into a cache, in place, at the cost of what is written.

    Token i of sequence b goes to position cache_lengths[b] + i. The lengths are not changed: the caller adds n.

    Args:
        k_cache: (B, Hkv, capacity, D), any strides (one layer of a stacked cache, say). With a block_table
            (blocks, Hkv, page, D): a pool of pages that all sequences share. The dtype of k, or int8.
        v_cache: (B, Hkv, capacity, Dv) or (blocks, Hkv, page, Dv).
        k: (B, Hkv, n, D), n ≥ 0; or packed (total, Hkv, D), by cu_seqlens. float32, bfloat16, float16 or float64.
        v: (B, Hkv, n, Dv) or (total, Hkv, Dv).
        cache_lengths: how many positions each sequence holds already: (B,) int32 or int64, or one integer for all.
        block_table: (B, blocks per sequence) int32: position p of sequence b is row p % page of block
            block_table[b, p // page]. Entries that a call does not need are not looked at.
        ring: position p goes to row p % capacity, where the last `capacity` positions are then held.
        cu_seqlens: (B + 1,) int32 or int64: sequence b's new tokens are rows cu_seqlens[b] to cu_seqlens[b + 1] − 1.
        k_scales: float32 (B, Hkv, capacity) or (blocks, Hkv, page), for int8 caches: a token is stored as
            round(x / scale) with scale = max|x| / 127, one scale a head. A token with NaN or Inf becomes NaN.
        v_scales: likewise for v.
        rotary: (cos, sin), (positions, rotary_dim / 2) each, float32 (float64 for float64): k is turned by the angles
            of its position before it is stored (Su et al. 2021, arXiv:2104.09864). See `nn.RotaryEmbedding.tables`.
        rotary_interleaved: pairs of neighbours (2n, 2n + 1), in place of (n, n + rotary_dim / 2).

    Raises:
        IndexError: more tokens than the capacity has room for; the message names sequence, position, count, capacity.
            Blocks that are not in the pool; rotary tables that do not reach so far.
        TypeError, ValueError: dtypes, shapes or lengths that do not fit; blocks that would be written for two
            sequences; a cache that lies in the memory of another argument; inputs that need a gradient.
        Nothing is written then.
    """
    op = "kv_cache_append_"
    tensors = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "k_scales": k_scales,
        "v_scales": v_scales,
    }
    cache_lengths, cos, sin = _read(
        op, tensors, k, cache_lengths, block_table, cu_seqlens, rotary, ("k_scales", "v_scales")
    )
    try:
        _append(
            k_cache, v_cache, k, v, cache_lengths, block_table, k_scales, v_scales, cu_seqlens, cos, sin,
            bool(ring), bool(rotary_interleaved),
        )  # fmt: skip
    except (ValueError, IndexError) as error:
        raise named(op, error) from None
    _note_writes(k_cache, v_cache, k_scales, v_scales)


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor | int,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    block_table: Tensor | None = None,
    ring: bool = False,
    cu_seqlens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    causal: bool | str = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of new queries to a cache, after appending the keys and values that come with them.

    One token, a chunk of a prompt or the whole of it: the same call. Sequence b has T keys, cache_lengths[b] and what
    is appended; its query i of Lq stands at position T − Lq + i. Rows past T are never read. A row has the same bits as
    in `attention` over the whole sequence, however it was cut into calls, contiguous or paged (not with int8).

    Args:
        q: (B, Hq, Lq, D), Hq a multiple of Hkv; or packed (total, Hq, D), by cu_seqlens.
        k_cache, v_cache, cache_lengths, block_table, ring, cu_seqlens, k_scales, v_scales: as in `kv_cache_append_`.
        k, v: new tokens, appended first as `kv_cache_append_` does it; or neither.
        ring: every key that a query may see must still be there: with window=(left, …), left + Lq ≤ capacity.
        causal: whether a query sees no key behind its own position (True and "bottom_right" say the same).
        window: (left, right) around a query's position; None is unbounded.
        scale, softcap, alibi_slopes, sinks: as in `attention`.
        rotary: (cos, sin): turns q as well as k by the positions, in float32 (float64), rounded once.
        return_lse: also return the natural log-sum-exp of each row's scores.

    Returns:
        out (B, Hq, Lq, Dv), or (total, Hq, Dv); with return_lse also the lse (B, Hq, Lq), or (Hq, total). A row that
        sees no key: 0 and −inf.

    Raises:
        As `kv_cache_append_`; ValueError also for options that do not fit. Nothing is written then.
    """
    op = "attention_with_kv_cache"
    if (k is None) != (v is None):
        raise ValueError(f"attn_ext.{op}: k and v must be given together")
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales,
        "sinks": sinks,
    }  # fmt: skip
    optional = ("k", "v", "k_scales", "v_scales", "sinks")
    cache_lengths, cos, sin = _read(op, tensors, q, cache_lengths, block_table, cu_seqlens, rotary, optional)
    if not isinstance(causal, bool) and causal != "bottom_right":
        raise ValueError(f"attn_ext.{op}: causal must be False, True or 'bottom_right', not {causal!r}")
    options = read_options(
        op, q, q, causal="bottom_right" if causal else False, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    cache = (
        cache_lengths,
        block_table,
        k_scales,
        v_scales,
        cu_seqlens,
        cos,
        sin,
        bool(ring),
        bool(rotary_interleaved),
    )
    rest = (
        alibi_slopes,
        sinks,
        options.causal,
        options.window_left,
        options.window_right,
        options.scale,
        options.softcap,
    )
    try:
        if k is None:
            out, lse = _attend(q, k_cache, v_cache, *cache, *rest)
        else:
            out, lse = _append_and_attend(q, k_cache, v_cache, k, v, *cache, *rest)
            _note_writes(k_cache, v_cache, k_scales, v_scales)
    except (ValueError, IndexError) as error:
        raise named(op, error) from None
    return (out, lse) if return_lse else out


# --- helpers of the functions above ---------------------------------------------------------------------------------


def _read(
    op: str,
    tensors: dict[str, Tensor | None],
    like: Tensor,
    cache_lengths: Tensor | int,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    optional: tuple[str, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Checks types, where `optional` tensors may be None; returns the lengths as a tensor, and the rotary tables."""
    for name, t in tensors.items():
        if t is not None or name not in optional:
            expect_tensor(op, name, t)
    if like.dtype not in FLOATS:
        raise TypeError(
            f"attn_ext.{op}: q, k and v must be float32, bfloat16, float16 or float64, not {like.dtype}"
        )
    cached = tensors["k_cache"].dtype
    for name, t in tensors.items():
        wanted = (cached,) if name.endswith("cache") or cached != torch.int8 else (like.dtype,)
        if t is not None and name in ("q", "k", "v", "v_cache") and t.dtype not in wanted:
            raise TypeError(
                f"attn_ext.{op}: {name} must be {wanted[0]} for a cache of {cached}, not {t.dtype}"
            )
    if block_table is not None:
        expect_tensor(op, "block_table", block_table)
        if block_table.dtype != torch.int32:
            raise TypeError(f"attn_ext.{op}: block_table must be int32, not {block_table.dtype}")
    if cu_seqlens is not None:
        integer_tensor(op, "cu_seqlens", cu_seqlens)
    cos, sin = (None, None) if rotary is None else _tables(op, rotary, like)
    if isinstance(cache_lengths, Tensor):
        integer_tensor(op, "cache_lengths", cache_lengths)
        if cache_lengths.dim() == 0:
            cache_lengths = cache_lengths.expand(_sequences(tensors["k_cache"], block_table))
    elif isinstance(cache_lengths, torch.SymInt) or index_of(cache_lengths) is not None:
        cache_lengths = torch.full(
            (_sequences(tensors["k_cache"], block_table),), cache_lengths, device=like.device
        )
    else:
        raise TypeError(
            f"attn_ext.{op}: cache_lengths must be an integer or a tensor of int32 or int64, "
            f"not {type(cache_lengths).__name__}"
        )
    everything = (*tensors.values(), cache_lengths, block_table, cu_seqlens, cos, sin)
    check_device(op, *everything)
    for name, t in tensors.items():
        if t is not None and ((t.requires_grad and torch.is_grad_enabled()) or have_tangent(t)):
            raise ValueError(
                f"attn_ext.{op}: {name} needs a gradient, and a KV cache has none; call it under torch.no_grad(), "
                f"or pass {name}.detach()"
            )
    return cache_lengths, cos, sin


def _sequences(k_cache: Tensor, block_table: Tensor | None) -> int:
    t = k_cache if block_table is None else block_table
    return t.shape[0] if t.dim() else 0


def _tables(op: str, rotary: Rotary, like: Tensor) -> Rotary:
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(
            f"attn_ext.{op}: rotary must be (cos, sin), two tensors in a tuple, not {type(rotary).__name__}"
        )
    cos, sin = rotary
    wanted = torch.float64 if like.dtype == torch.float64 else torch.float32
    for name, t in (("rotary cos", cos), ("rotary sin", sin)):
        expect_tensor(op, name, t)
        if t.dtype != wanted:
            raise TypeError(f"attn_ext.{op}: {name} must be {wanted} for {like.dtype} tokens, not {t.dtype}")
    return cos, sin


def _note_writes(*written: Tensor | None) -> None:
    """Tells autograd, so that a graph that still holds a view of the cache notices."""
    if compiling():
        return
    for t in written:
        if t is not None and not t.is_inference():
            _increment_version(t)


# --- fake tensors: shapes, dtypes and strides without data ----------------------------------------------------------


@torch.library.register_fake("attn_ext::kv_cache_append_")
def _fake_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    _check_shapes("kv_cache_append_", None, k_cache, v_cache, k, v, rest)


@torch.library.register_fake("attn_ext::attention_with_kv_cache")
def _fake_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _check_shapes("attention_with_kv_cache", q, k_cache, v_cache, None, None, rest)


@torch.library.register_fake("attn_ext::attention_with_kv_cache_append_")
def _fake_append_and_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _check_shapes("attention_with_kv_cache", q, k_cache, v_cache, k, v, rest)


def _check_shapes(
    op: str,
    q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """The shapes and dtypes that csrc/kv_cache.cpp checks. Returns empty outputs for q, if any."""
    cache_lengths, block_table, k_scales, v_scales, cu_seqlens = rest[:5]
    check_device(op, q, k_cache, v_cache, k, v, *(t for t in rest if isinstance(t, Tensor)))
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"attn_ext.{op}: k_cache and v_cache must be (B, Hkv, capacity, D), or (blocks, Hkv, page, D) with a "
            f"block_table, not {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    sequences, heads = _sequences(k_cache, block_table), k_cache.shape[1]
    if tuple(cache_lengths.shape) != (sequences,):
        raise ValueError(
            f"attn_ext.{op}: cache_lengths must have one number for each of the {sequences} sequences, "
            f"not shape {tuple(cache_lengths.shape)}"
        )
    for name, t in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (t is not None) != (k_cache.dtype == torch.int8) or (
            t is not None and t.shape != k_cache.shape[:3]
        ):
            raise ValueError(
                f"attn_ext.{op}: int8 caches and no others have {name}, of shape {tuple(k_cache.shape[:3])}"
            )
    packed = cu_seqlens is not None
    if packed and tuple(cu_seqlens.shape) != (sequences + 1,):
        raise ValueError(
            f"attn_ext.{op}: cu_seqlens must be ({sequences + 1},), one more than the sequences of cache_lengths, "
            f"not {tuple(cu_seqlens.shape)}"
        )
    if k is not None and v is not None and k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"attn_ext.{op}: k and v must have the same sizes but for the last, not {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    of_tokens = [t.dtype for t in (q, k, v) if t is not None]
    stored = k_cache.dtype if k_cache.dtype != torch.int8 else of_tokens[0]
    if v_cache.dtype != k_cache.dtype or any(dtype != stored for dtype in of_tokens):
        raise ValueError(
            f"attn_ext.{op}: tokens of one float dtype belong to a cache of that dtype or of int8, not "
            f"{', '.join(map(str, of_tokens))} to k_cache {k_cache.dtype} and v_cache {v_cache.dtype}"
        )
    for name, t, width in (
        ("q", q, k_cache.shape[3]),
        ("k", k, k_cache.shape[3]),
        ("v", v, v_cache.shape[3]),
    ):
        if t is None:
            continue
        right = (
            t.dim() == (3 if packed else 4) and t.shape[-1] == width and (packed or t.shape[0] == sequences)
        )
        if not right or (t.shape[1] != heads if t is not q else heads == 0 or t.shape[1] % heads):
            wanted = "(total, heads, " if packed else f"({sequences}, heads, tokens, "
            raise ValueError(
                f"attn_ext.{op}: {name} must be {wanted}{width}) for a cache with {heads} heads, not {tuple(t.shape)}"
            )
    if q is None:
        return k_cache, v_cache  # nothing is returned
    sizes = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:-1])
    lse = q.new_empty(sizes, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return empty_in_order_of(q, v_cache.shape[-1]), lse
