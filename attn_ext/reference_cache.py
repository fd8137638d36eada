"""The two KV-cache operators in plain PyTorch: short, slow and right. `attn_ext.reference` has them too.

Everything goes sequence by sequence, and a cache is seen in one way only: position p of sequence b is row
`p % page` of block `table[b][p // page]`. A contiguous cache is the case of one block a sequence; in a ring all
positions share that block.

Nothing is written before everything is known to be right: `attention_with_kv_cache` attends to the old rows of the
cache and the new ones side by side, and stores the new ones last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ext import reference
from attn_ext._arguments import (
    FLOATS,
    check_boundaries,
    check_device,
    check_slopes,
    expect_tensor,
    index_of,
    integer_tensor,
    read_window,
)

__all__ = ["attention_with_kv_cache", "kv_cache_append_"]

_INT8_LARGEST = 127


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
    """Write new tokens behind the old ones, in place; as `attn_ext.kv_cache_append_`."""
    op = "reference.kv_cache_append_"
    cache = _read_cache(op, k_cache, v_cache, k_scales, v_scales, block_table, ring)
    new = _read_new(op, cache, k, v, cu_seqlens)
    lengths = _read_lengths(op, cache_lengths, cache.sequences)
    _refuse_gradients(op, k_cache, v_cache, k, v, k_scales, v_scales)
    tables = _read_rotary(op, rotary, cache, k)
    stored = [_stored(op, cache, *new[b], b, lengths[b], tables, rotary_interleaved) for b in range(len(new))]
    _write(op, cache, stored, lengths)


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
    causal: bool | str = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Append k and v where given, then attend; as `attn_ext.attention_with_kv_cache`.

    Args:
        dtype: compute the attention and return it in this dtype; what the cache holds, and q once it is turned, are
            rounded as ever. Where not given: float32 (float64 for float64), with one rounding to the dtype of q.
    """
    op = "reference.attention_with_kv_cache"
    cache = _read_cache(op, k_cache, v_cache, k_scales, v_scales, block_table, ring)
    lengths = _read_lengths(op, cache_lengths, cache.sequences)
    queries = _read_queries(op, cache, q, cu_seqlens)
    if (k is None) != (v is None):
        raise ValueError(f"attn_ext.{op}: k and v must be given together")
    if not isinstance(causal, bool) and causal != "bottom_right":
        raise ValueError(f"attn_ext.{op}: causal must be False, True or 'bottom_right', not {causal!r}")
    _refuse_gradients(op, q, k_cache, v_cache, k, v, k_scales, v_scales, sinks)
    tables = _read_rotary(op, rotary, cache, q)
    left, _ = read_window(op, window)
    heads = q.shape[-2] if cu_seqlens is not None else q.shape[-3]
    if alibi_slopes is not None:
        expect_tensor(op, "alibi_slopes", alibi_slopes)
        check_slopes(op, alibi_slopes, cache.sequences, heads)

    stored = None
    if k is not None and v is not None:
        new = _read_new(op, cache, k, v, cu_seqlens)
        if k.dtype != q.dtype:
            raise TypeError(
                f"attn_ext.{op}: q, k, v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}"
            )
        stored = [
            _stored(op, cache, *new[b], b, lengths[b], tables, rotary_interleaved) for b in range(len(new))
        ]

    work = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    outs, lses = [], []
    for b, q_b in enumerate(queries):
        # 1. The positions that this sequence's queries may see: first … total − 1.
        length, Lq = lengths[b], q_b.shape[-2]
        total = length + (0 if stored is None else stored[b].count)
        first = total if Lq == 0 else 0 if left is None else max(0, total - Lq - left)
        cache.expect_room(op, b, length, total - length)
        if ring and first < total - cache.capacity:
            raise ValueError(
                f"attn_ext.{op}: sequence {b}: the ring of {cache.capacity} places holds the positions from "
                f"{total - cache.capacity} on, and the queries may see keys from position {first} on; "
                f"give a window with left + queries <= capacity"
            )

        # 2. Their keys and values, the old ones from the cache.
        k_b, v_b = cache.read(op, b, range(min(first, length), length), work)
        if stored is not None:
            skipped = max(0, first - length)
            k_b = torch.cat((k_b, stored[b].k_values(work)[:, skipped:]), dim=1)
            v_b = torch.cat((v_b, stored[b].v_values(work)[:, skipped:]), dim=1)

        # 3. Attention; counting from the end, no query notices that the keys before `first` are left out.
        if tables is not None:
            q_b = _turn(op, q_b, b, total - Lq, tables, rotary_interleaved)
        out, lse = reference.attention(
            q_b.to(work),
            k_b,
            v_b,
            causal="bottom_right" if causal else False,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b],
            sinks=sinks,
            return_lse=True,
            dtype=work,
        )
        outs.append(out.to(dtype or q.dtype))
        lses.append(lse)

    if stored is not None:
        _write(op, cache, stored, lengths)
    if not outs:
        out, lse = q.new_zeros(*q.shape[:-1], v_cache.shape[-1]), q.new_zeros(q.shape[:-1], dtype=work)
        lse = lse if cu_seqlens is None else lse.mT
    elif cu_seqlens is None:
        out, lse = torch.stack(outs), torch.stack(lses)
    else:
        out, lse = torch.cat([x.transpose(0, 1) for x in outs]), torch.cat(lses, dim=-1)
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------------------ what a cache holds


class _Rows(NamedTuple):
    """What a cache holds of n tokens: k (Hkv, n, D), v (Hkv, n, Dv), and for int8 one scale a token and head."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def count(self) -> int:
        return self.k.shape[1]

    def k_values(self, work: torch.dtype) -> Tensor:
        return self.k.to(work) if self.k_scales is None else self.k.to(work) * self.k_scales[..., None]

    def v_values(self, work: torch.dtype) -> Tensor:
        return self.v.to(work) if self.v_scales is None else self.v.to(work) * self.v_scales[..., None]


class _Cache(NamedTuple):
    k: Tensor  # (blocks, Hkv, page, D)
    v: Tensor  # (blocks, Hkv, page, Dv)
    k_scales: Tensor | None  # (blocks, Hkv, page) float32, with int8
    v_scales: Tensor | None
    table: list[list[int]]  # the blocks of each sequence
    ring: bool

    @property
    def sequences(self) -> int:
        return len(self.table)

    @property
    def page(self) -> int:
        return self.k.shape[2]

    @property
    def capacity(self) -> int:
        """How many positions a sequence has room for."""
        return self.page * (len(self.table[0]) if self.table else 0)

    def expect_room(self, op: str, b: int, length: int, count: int) -> None:
        if self.ring and self.capacity == 0 and length + count > 0:
            raise IndexError(f"attn_ext.{op}: sequence {b}: the ring has no places at all")
        if not self.ring and length + count > self.capacity:
            raise IndexError(
                f"attn_ext.{op}: sequence {b}: {count} tokens at position {length} need {length + count} places, "
                f"and the cache has {self.capacity}"
            )

    def slots(self, op: str, b: int, positions: range) -> list[tuple[int, int]]:
        """(block, row) of each position."""
        if self.ring:
            return [(self.table[b][0], p % self.page) for p in positions]
        found = [(self.table[b][p // self.page], p % self.page) for p in positions]
        for p, (block, _) in zip(positions, found, strict=True):
            if not 0 <= block < self.k.shape[0]:
                raise IndexError(
                    f"attn_ext.{op}: sequence {b}: block_table entry {p // self.page}, which position {p} needs, must "
                    f"lie between 0 and the {self.k.shape[0]} blocks of the cache, not be {block}"
                )
        return found

    def read(self, op: str, b: int, positions: range, work: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys (Hkv, n, D) and values (Hkv, n, Dv) of some positions."""
        blocks, rows = _columns(self.slots(op, b, positions))
        k, v, k_scales, v_scales = (
            None if t is None else t[blocks, :, rows].transpose(0, 1) for t in self[:4]
        )
        found = _Rows(k, v, k_scales, v_scales)
        return found.k_values(work), found.v_values(work)


def _columns(slots: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    columns = torch.tensor(slots, dtype=torch.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _stored(
    op: str,
    cache: _Cache,
    k: Tensor,
    v: Tensor,
    b: int,
    length: int,
    tables: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> _Rows:
    """New tokens of one sequence as the cache will hold them: turned, and for an int8 cache quantised."""
    if tables is not None:
        k = _turn(op, k, b, length, tables, interleaved)
    if cache.k_scales is None:
        return _Rows(k, v)
    (k, k_scales), (v, v_scales) = _quantise(k), _quantise(v)
    return _Rows(k, v, k_scales, v_scales)


def _write(op: str, cache: _Cache, stored: Sequence[_Rows], lengths: Sequence[int]) -> None:
    """Stores the new tokens of all sequences, once all of them are known to have a place of their own."""
    places: list[list[tuple[int, int]]] = []
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for b, rows in enumerate(stored):
        length, total = lengths[b], lengths[b] + rows.count
        cache.expect_room(op, b, length, rows.count)
        # Of more tokens than a ring has places, the last ones stay.
        positions = range(max(length, total - cache.capacity) if cache.ring else length, total)
        places.append(cache.slots(op, b, positions))
        for p, slot in zip(positions, places[b], strict=True):
            if slot in taken:
                other, there = taken[slot]
                raise ValueError(
                    f"attn_ext.{op}: position {there} of sequence {other} and position {p} of sequence {b} would be "
                    f"written to the same place, row {slot[1]} of block {slot[0]}"
                )
            taken[slot] = (b, p)
    if taken:
        for name, t in zip(("k_cache", "v_cache", "k_scales", "v_scales"), cache[:4], strict=True):
            if t is not None and any(
                step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True)
            ):
                raise ValueError(
                    f"attn_ext.{op}: {name} has entries that share memory (strides {t.stride()}), "
                    f"and cannot be written to"
                )
    with torch.no_grad():
        for rows, slots in zip(stored, places, strict=True):
            at = _columns(slots)
            for t, new in zip(cache[:4], rows, strict=True):
                if t is not None and new is not None and slots:
                    t[at[0], :, at[1]] = new[:, -len(slots) :].transpose(0, 1)


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers (Hkv, n, D) and float32 scales (Hkv, n): x ≈ number · scale, with scale = max|x| / 127.

    The scale of a token that holds NaN or infinities is NaN.
    """
    exact = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = (exact.abs().amax(-1) / _INT8_LARGEST).to(torch.float32)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    step = scale[..., None].to(exact.dtype)
    numbers = torch.where(step > 0, exact / step, 0.0).round()  # to even; NaN > 0 is False
    # A scale that is a subnormal number is rounded coarsely, so that the quotient can be above 127.
    return numbers.clamp(-_INT8_LARGEST, _INT8_LARGEST).to(torch.int8), scale


def _turn(op: str, x: Tensor, b: int, first: int, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x (H, n, D), tokens from position `first` on, turned as `nn.RotaryEmbedding` does, in the dtype of x."""
    n, rows = x.shape[1], tables[0].shape[0]
    if n and not (first >= 0 and first + n <= rows):
        raise IndexError(
            f"attn_ext.{op}: sequence {b}: {n} tokens from position {first} on need rotary tables with rows for them, "
            f"and the tables have rows for positions 0 to {rows - 1}"
        )
    cos, sin = (t[first : first + n] for t in tables)  # (n, rotary_dim / 2)
    turned, rest = x[..., : 2 * cos.shape[-1]].to(cos.dtype), x[..., 2 * cos.shape[-1] :]
    one, two = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pair = (one * cos - two * sin, two * cos + one * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


# ------------------------------------------------------------------------------------------ reading the arguments


def _read_cache(
    op: str,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    block_table: Tensor | None,
    ring: bool,
) -> _Cache:
    for name, t in (("k_cache", k), ("v_cache", v)):
        expect_tensor(op, name, t)
    check_device(op, k, v, k_scales, v_scales, block_table)
    if k.dtype != v.dtype or k.dtype not in (*FLOATS, torch.int8):
        raise TypeError(
            f"attn_ext.{op}: k_cache and v_cache must have one dtype out of float32, bfloat16, float16, float64 and "
            f"int8, not {k.dtype} and {v.dtype}"
        )
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        shape = "(B, Hkv, capacity, D)" if block_table is None else "(blocks, Hkv, page, D)"
        raise ValueError(
            f"attn_ext.{op}: k_cache and v_cache must be {shape}, alike but for D, "
            f"not {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[-1] == 0:
        raise ValueError(f"attn_ext.{op}: the head dim of k_cache must be at least 1: {tuple(k.shape)}")
    for name, t in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (t is not None) != (k.dtype == torch.int8):
            raise ValueError(f"attn_ext.{op}: {name} belongs to caches of int8, and these are {k.dtype}")
        if t is not None and t.dtype != torch.float32:
            raise TypeError(f"attn_ext.{op}: {name} must be float32, not {t.dtype}")
        if t is not None and t.shape != k.shape[:3]:
            raise ValueError(
                f"attn_ext.{op}: {name} must be {tuple(k.shape[:3])}, one scale a token and head, not {tuple(t.shape)}"
            )
    if block_table is None:
        return _Cache(k, v, k_scales, v_scales, [[b] for b in range(k.shape[0])], ring)
    if ring:
        raise ValueError(f"attn_ext.{op}: a ring is for contiguous caches, without a block_table")
    expect_tensor(op, "block_table", block_table)
    if block_table.dtype != torch.int32:
        raise TypeError(f"attn_ext.{op}: block_table must be int32, not {block_table.dtype}")
    if block_table.dim() != 2:
        raise ValueError(
            f"attn_ext.{op}: block_table must be (B, blocks per sequence), not {tuple(block_table.shape)}"
        )
    if k.shape[2] == 0:
        raise ValueError(f"attn_ext.{op}: the pages of k_cache must hold at least 1 token: {tuple(k.shape)}")
    return _Cache(k, v, k_scales, v_scales, block_table.tolist(), ring)


def _read_lengths(op: str, lengths: Any, sequences: int) -> list[int]:
    """How many positions each sequence holds before the call."""
    if isinstance(lengths, Tensor):
        integer_tensor(op, "cache_lengths", lengths)
        if lengths.dim() and tuple(lengths.shape) != (sequences,):
            raise ValueError(
                f"attn_ext.{op}: cache_lengths must be one integer or ({sequences},), one a sequence, "
                f"not {tuple(lengths.shape)}"
            )
        found = lengths.tolist() if lengths.dim() else [lengths.item()] * sequences
    else:
        one = index_of(lengths)
        if one is None:
            raise TypeError(
                f"attn_ext.{op}: cache_lengths must be an integer or a tensor of int32 or int64, not {lengths!r}"
            )
        found = [one] * sequences
    for b, n in enumerate(found):
        if n < 0:
            raise ValueError(f"attn_ext.{op}: sequence {b}: its length must be at least 0, not {n}")
    return found


def _read_queries(op: str, cache: _Cache, q: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """q of each sequence, (Hq, Lq, D)."""
    expect_tensor(op, "q", q)
    _expect_dtype(op, cache, q=q)
    found = _split(op, cache, cu_seqlens, q=q)[0]
    if q.shape[-1] != cache.k.shape[-1]:
        raise ValueError(
            f"attn_ext.{op}: q and k_cache must have the same head dim, not {tuple(q.shape)} and {tuple(cache.k.shape)}"
        )
    return found


def _read_new(
    op: str, cache: _Cache, k: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """k (Hkv, n, D) and v (Hkv, n, Dv) of each sequence."""
    for name, t in (("k", k), ("v", v)):
        expect_tensor(op, name, t)
    _expect_dtype(op, cache, k=k, v=v)
    found = _split(op, cache, cu_seqlens, k=k, v=v)
    heads = -3 if cu_seqlens is None else -2
    for name, t, cached in (("k", k, cache.k), ("v", v, cache.v)):
        if t.shape[heads] != cached.shape[1] or t.shape[-1] != cached.shape[-1]:
            raise ValueError(
                f"attn_ext.{op}: {name} {tuple(t.shape)} must have the heads and the head dim of {name}_cache "
                f"{tuple(cached.shape)}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"attn_ext.{op}: k and v must have as many tokens, not {tuple(k.shape)}, {tuple(v.shape)}"
        )
    return list(zip(*found, strict=True))


def _expect_dtype(op: str, cache: _Cache, **tensors: Tensor) -> None:
    dtypes = {t.dtype for t in tensors.values()}
    names = ", ".join(tensors)
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise TypeError(
            f"attn_ext.{op}: {names} must have one dtype out of float32, bfloat16, float16 and float64, "
            f"not {', '.join(str(t.dtype) for t in tensors.values())}"
        )
    if cache.k.dtype != torch.int8 and dtypes != {cache.k.dtype}:
        raise TypeError(
            f"attn_ext.{op}: {names} must have the dtype of the cache, {cache.k.dtype}, not {dtypes.pop()}"
        )


def _split(op: str, cache: _Cache, cu_seqlens: Tensor | None, **tensors: Tensor) -> list[list[Tensor]]:
    """Each tensor sequence by sequence, (H, n, D)."""
    check_device(op, cache.k, cu_seqlens, *tensors.values())
    names = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    if cu_seqlens is None:
        if any(t.dim() != 4 or t.shape[0] != cache.sequences for t in tensors.values()):
            raise ValueError(
                f"attn_ext.{op}: expected {cache.sequences} sequences as the cache has, (B, H, L, D), not {names}"
            )
        return [list(t.unbind()) for t in tensors.values()]
    integer_tensor(op, "cu_seqlens", cu_seqlens)
    if tuple(cu_seqlens.shape) != (cache.sequences + 1,):
        raise ValueError(
            f"attn_ext.{op}: cu_seqlens must be ({cache.sequences + 1},), one more than the sequences of the cache, "
            f"not {tuple(cu_seqlens.shape)}"
        )
    if any(t.dim() != 3 for t in tensors.values()):
        raise ValueError(f"attn_ext.{op}: packed tokens must be (total, H, D), not {names}")
    ends = cu_seqlens.tolist()
    for name, t in tensors.items():
        check_boundaries(op, "cu_seqlens", ends, name, t.shape[0])
    return [
        [t[start:end].transpose(0, 1) for start, end in zip(ends, ends[1:], strict=False)]
        for t in tensors.values()
    ]


def _read_rotary(op: str, rotary: Any, cache: _Cache, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two tables, each (positions, rotary_dim / 2)."""
    if rotary is None:
        return None
    if not (isinstance(rotary, (tuple, list)) and len(rotary) == 2):
        raise TypeError(f"attn_ext.{op}: rotary must be two tensors (cos, sin), not {rotary!r}")
    cos, sin = rotary
    expect_tensor(op, "cos", cos)
    expect_tensor(op, "sin", sin)
    check_device(op, cache.k, cos, sin)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    if cos.dtype != exact or sin.dtype != exact:
        raise TypeError(
            f"attn_ext.{op}: the rotary tables must be {exact} for {x.dtype}, not {cos.dtype} and {sin.dtype}"
        )
    widest = cache.k.shape[-1] // 2
    if cos.dim() != 2 or cos.shape != sin.shape or not 1 <= cos.shape[1] <= widest:
        raise ValueError(
            f"attn_ext.{op}: the rotary tables must both be (positions, rotary_dim / 2), the latter 1 to {widest}, "
            f"not {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    _refuse_gradients(op, cos, sin)
    return cos, sin


def _refuse_gradients(op: str, *tensors: Any) -> None:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise ValueError(
            f"attn_ext.{op}: a cache is for inference, and an input needs a gradient; "
            f"call it under torch.no_grad() or with detached tensors"
        )
