"""Few queries against many keys: blocks share the keys out, segment by segment, and a merge joins them.

Segments have 1,024 keys, so these calls are as small as calls of several segments can be.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cache_support import NAN, store
from cuda_support import PARTS, attention, attention_with_kv_cache, check_forward, check_gradients
from op_support import (
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    make,
)
from torch import Tensor

import attn_ext

LENGTHS = (1023, 1024, 1025, 0, 2049, 7)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (1030, 0)},  # the longest sequence's first segment is not seen
    "many": {
        "window": (1030, 0),
        "scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.001, 0.7, 4),
        "sinks": torch.linspace(-1.0, 1.0, 4),
    },
}


def filled(kind: str, lengths: tuple[int, ...], capacity: int, dtype: torch.dtype) -> dict[str, Any]:
    """A cache (cache_support.store) whose sequences have so many tokens; all other slots stay as they were: NaN."""
    cache = store(kind, len(lengths), capacity, dtype)
    work = torch.float32 if dtype == torch.int8 else dtype
    for b, n in enumerate(lengths):
        k, v = (make((1, 2, n, d), work, seed=10 * b + d) for d in (8, 6))
        paged = "block_table" in cache  # then the others have no batch dim
        one = {name: t[b : b + 1] if name == "block_table" or not paged else t for name, t in cache.items()}
        attn_ext.reference.kv_cache_append_(**one, k=k, v=v, cache_lengths=0)
    return cache


def queries(sequences: int, n: int, dtype: torch.dtype) -> Tensor:
    return make((sequences, 4, n, 8), dtype, seed=3)


def check(q: Tensor, cache: dict[str, Any], lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and lse of a call over a cache, held against the reference."""
    call = {**cache, "cache_lengths": lengths, **options, "return_lse": True}
    got = attention_with_kv_cache(q, **call)
    plain_work = None if cache["k_cache"].dtype == torch.int8 else q.dtype
    truth, plain = (
        attn_ext.reference.attention_with_kv_cache(q, **call, dtype=work)
        for work in (torch.float64, plain_work)
    )
    for n, what in enumerate(("output", "lse")):
        assert_close_to_reference(got[n], truth[n], plain[n], what=what)
    return got


# ------------------------------------------------------------------------------------------------ over a cache


@pytest.mark.parametrize("option", OPTIONS)
def test_lengths_around_segments(dtype: torch.dtype, option: str) -> None:
    cache = filled("contiguous", LENGTHS, 2112, dtype)
    check(queries(len(LENGTHS), 1, dtype), cache, torch.tensor(LENGTHS), **OPTIONS[option])


@pytest.mark.parametrize("kind", ["pages of 16", "tokens first"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
def test_caches_of_other_kinds(stored: torch.dtype, kind: str) -> None:
    lengths = (1030, 5, 1100)
    cache = filled(kind, lengths, 1104, stored)
    work = torch.float32 if stored == torch.int8 else stored
    check(queries(3, 3, work), cache, torch.tensor(lengths, dtype=torch.int32))


def test_an_int8_cache_and_queries_of_float64() -> None:
    cache = filled("contiguous", (1030, 5), 1104, torch.int8)
    check(queries(2, 1, torch.float64), cache, torch.tensor([1030, 5]))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [1, 1500, 2047, 2048, 2049, 5000])
def test_rings(held: int, stored: torch.dtype) -> None:
    """A ring's positions go on and on: its keys begin and end anywhere in a segment."""
    capacity, new = 1500, 2
    cache = store("contiguous", 1, capacity, stored)
    k, v = (make((1, 2, capacity, d), stored, seed=d) for d in (8, 6))
    first = max(0, held - capacity)  # the oldest token that a ring still has
    attn_ext.reference.kv_cache_append_(
        **cache, k=k[:, :, : held - first], v=v[:, :, : held - first], cache_lengths=first, ring=True
    )
    lengths = torch.tensor([held])
    for window in (capacity - new, 1100, 20):
        options = {"ring": True, "window": (window, 0)}
        check(queries(1, min(new, held), stored), cache, lengths, **options)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_capacity_of_more_keys_than_segments_of_1024_cover(stored: torch.dtype) -> None:
    cache = store("contiguous", 2, 70_000, stored)
    for name, d in (("k", 8), ("v", 6)):
        cache[f"{name}_cache"][:, :, :2100] = make((2, 2, 2100, d), stored, seed=d)
    check(queries(2, 1, stored), cache, torch.tensor([2100, 2047]))


def test_packed_queries_walk_over_the_segments_that_others_share_out(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1023, 2049, 1500])
    cache = filled("contiguous", (1023, 2049, 1500), 2100, dtype)
    q = queries(3, 1, dtype)
    shared = attention_with_kv_cache(q, **cache, cache_lengths=lengths)
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    packed = attention_with_kv_cache(q[:, :, 0], **cache, cache_lengths=lengths, cu_seqlens=cu)
    assert_same_bits(packed, shared[:, :, 0], "packed or not")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_stays_with_the_rows_that_see_it(dtype: torch.dtype, name: str) -> None:
    lengths, q = torch.tensor([1100, 1100]), queries(2, 1, dtype)
    options = {"window": (1060, 0)}
    cache = filled("contiguous", (1100, 1100), 1104, dtype)
    clean = attention_with_kv_cache(q, **cache, cache_lengths=lengths, **options)
    for key in (0, 38):  # before the window
        cache[name][0, 0, key] = NAN
    hidden = attention_with_kv_cache(q, **cache, cache_lengths=lengths, **options)
    assert_same_bits(hidden, clean, "NaN before the window")
    for key in (39, 1023, 1099):
        dirty = {**cache, name: cache[name].clone()}
        dirty[name][0, 0, key] = NAN
        out = attention_with_kv_cache(q, **dirty, cache_lengths=lengths, **options)
        assert out[0, :2].isnan().all(), key
        assert_same_bits(out[0, 2:], clean[0, 2:], "the other key/value head")
        assert_same_bits(out[1], clean[1], "the other sequence")


def test_sequences_that_hold_nothing() -> None:
    cache = filled("contiguous", (0, 1100), 1104, torch.float32)
    out, lse = check(queries(2, 1, torch.float32), cache, torch.tensor([0, 1100]))
    assert not out[0].any() and (lse[0] == -math.inf).all()
    sinks = torch.linspace(-1.0, 1.0, 4)
    out, lse = check(queries(2, 1, torch.float32), cache, torch.tensor([0, 1100]), sinks=sinks)
    assert not out[0].any() and torch.equal(lse[0, :, 0], sinks)


# ------------------------------------------------------------------------------------------------ the same bits


def test_a_sequence_alone_or_in_a_batch_once_or_again(dtype: torch.dtype) -> None:
    cache = filled("contiguous", LENGTHS, 2112, dtype)
    q = queries(len(LENGTHS), 1, dtype)
    options: dict[str, Any] = {"sinks": torch.linspace(-1.0, 1.0, 4), "return_lse": True}
    batch = attention_with_kv_cache(q, **cache, cache_lengths=torch.tensor(LENGTHS), **options)
    again = attention_with_kv_cache(q, **cache, cache_lengths=torch.tensor(LENGTHS), **options)
    for n, what in enumerate(("output", "lse")):
        assert_same_bits(again[n], batch[n], f"{what} of a second run")
    for b, length in enumerate(LENGTHS):
        one = {name: t[b : b + 1] for name, t in cache.items()}
        alone = attention_with_kv_cache(q[b : b + 1], **one, cache_lengths=length, **options)
        for n, what in enumerate(("output", "lse")):
            assert_same_bits(alone[n], batch[n][b : b + 1], f"{what} of {length} keys alone")


def test_a_token_alone_or_in_a_chunk(dtype: torch.dtype) -> None:
    """So many queries that blocks do not share their keys out, and one that does."""
    cache = filled("contiguous", (2100,), 2112, dtype)
    q = queries(1, 60, dtype)
    for options in ({}, {"window": (1040, 0)}):
        chunk = attention_with_kv_cache(q, **cache, cache_lengths=2100, **options)
        for i in (0, 7, 12, 59):
            token = attention_with_kv_cache(
                q[:, :, i : i + 1], **cache, cache_lengths=2100 - 59 + i, **options
            )
            assert_same_bits(token, chunk[:, :, i : i + 1].contiguous(), f"query {i} of {options}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_keeps_its_sign_whatever_segments_other_rows_see(dtype: torch.dtype) -> None:
    """Rows of a chunk around a border see two keys each: the product of a weight and a value that is below all numbers
    makes −0 of their sum, and the hidden keys' weights 0 leave it so."""
    k, v = torch.zeros(2, 1, 1, 1034, 1, dtype=dtype)
    v = -v
    k[:, :, 1::2], v[:, :, 1::2] = -100.0, -torch.finfo(dtype).tiny
    q = torch.ones(1, 1, 20, 1, dtype=dtype)
    options = {"k_cache": k, "v_cache": v, "window": (1, 0), "scale": 1.0}
    chunk = attention_with_kv_cache(q, **options, cache_lengths=1034)
    joined = torch.arange(1014, 1034) == 1024  # the one row with keys of two segments: −0 + 0
    assert not chunk.any() and torch.equal(chunk.flatten().signbit(), ~joined)
    for i in range(20):
        token = attention_with_kv_cache(q[:, :, :1], **options, cache_lengths=1015 + i)
        assert_same_bits(token, chunk[:, :, i : i + 1].contiguous(), f"query {i}")


# ------------------------------------------------------------------------------------------------ without a cache


@pytest.mark.parametrize("part", PARTS)
def test_every_option(part: str) -> None:
    s = Shape(2, 2, 1, 2, 1100, 5, 3)
    for dtype in (torch.float32, torch.bfloat16):
        check_forward(*s.qkv(dtype), PARTS[part](s), attention=attention)


def test_columns_of_several_blocks(dtype: torch.dtype) -> None:
    check_forward(*Shape(1, 2, 1, 1, 1030, 3, 200).qkv(dtype), {"sinks": torch.tensor([0.5, -1.0])})
    check_forward(*Shape(1, 1, 1, 1, 1030, 3, 300).qkv(dtype), {})


def test_gradients(dtype: torch.dtype) -> None:
    s = Shape(1, 2, 1, 2, 1100, 3, 2)
    check_gradients(
        *s.qkv(dtype), {"causal": "bottom_right", "sinks": torch.tensor([0.5, -1.0])}, with_lse=True
    )
