"""KV caches of every kind, beside the reference, which keeps a cache of its own; and scripts of the cache classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_support import (
    STORES,
    Tokens,
    assert_unchanged,
    full_pass,
    packed,
    snapshot,
    stacked,
    store,
    tokens,
)
from cuda_support import attention, attention_with_kv_cache, kv_cache_append_
from device_support import DEVICE, carried
from op_support import DTYPE_IDS, DTYPES, assert_close_to_reference, assert_same_bits
from torch import Tensor

import attn_ext

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no corner": {"causal": False},
    "window": {"window": (3, 0)},
    "many": {
        "window": (6, 2),
        "scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.7, 4),
        "sinks": torch.linspace(-1.0, 1.0, 4),
    },
}
SPANS = ([(0, 3), (0, 20), (0, 0)], [(3, 3), (20, 21), (0, 16)], [(3, 9), (21, 30), (16, 17)])


def tables(dtype: torch.dtype, rotary_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 10.0 ** -torch.arange(rotary_dim // 2).double()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(exact), angle.sin().to(exact)


class Twins:
    """A cache and the reference's copies of it, one that computes in float64 and one in the dtype of the tokens."""

    def __init__(self, kind: str, sequences: int, capacity: int, dtype: torch.dtype, heads: int = 2) -> None:
        self.cache = store(kind, sequences, capacity, dtype, heads=heads)
        self.copies = [snapshot(self.cache) for _ in range(2)]

    def append(self, **call: Any) -> None:
        kv_cache_append_(**self.cache, **call)
        for copy in self.copies:
            attn_ext.reference.kv_cache_append_(**copy, **call)
        self.compare()

    def attend(self, q: Tensor, step: float = 0.0, **call: Any) -> Tensor:
        got = attention_with_kv_cache(q, **self.cache, **call, return_lse=True)
        # What an int8 cache holds is multiplied out in float32 (float64), whatever the tokens are.
        plain_work = None if self.cache["k_cache"].dtype == torch.int8 else q.dtype
        truth, plain = (
            attn_ext.reference.attention_with_kv_cache(q, **copy, **call, return_lse=True, dtype=work)
            for copy, work in zip(self.copies, (torch.float64, plain_work), strict=True)
        )
        self.compare()
        for n, what in enumerate(("output", "lse")):
            assert_close_to_reference(
                got[n], truth[n], plain[n], rounding=step if got[n].numel() else 0.0, what=what
            )
        return got[0]

    def compare(self) -> None:
        assert_unchanged(self.cache, self.copies[0])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", STORES)
def test_packed_tokens_come_and_attend(dtype: torch.dtype, kind: str, option: str) -> None:
    sequences = tokens([9, 30, 17], dtype)
    twins = Twins(kind, 3, 32, dtype)
    for at in SPANS:
        (q, k, v), cu = packed(sequences, at)
        lengths = torch.tensor([start for start, _ in at], dtype=torch.int32)
        twins.attend(q, cache_lengths=lengths, k=k, v=v, cu_seqlens=cu, **OPTIONS[option])


@pytest.mark.parametrize("kind", STORES)
def test_packed_tokens_of_many_sequences(dtype: torch.dtype, kind: str) -> None:
    """Empty ones at the start, among the others and at the end."""
    ends = [0, 0, *(n * 5 % 4 for n in range(30)), 21, 0, 33, 0, 0]
    sequences = tokens([max(n, 1) for n in ends], dtype)
    twins = Twins(kind, len(ends), 36, dtype)
    (q, k, v), cu = packed(sequences, [(0, end) for end in ends])
    twins.attend(q, cache_lengths=torch.zeros(len(ends), dtype=torch.int32), k=k, v=v, cu_seqlens=cu)


@pytest.mark.parametrize("kind", STORES)
def test_chunks_and_single_tokens_have_the_bits_of_one_pass(kind: str) -> None:
    sequences = tokens([37, 37])
    cache = store(kind, 2, 40)
    found = []
    for start, end in ((0, 13), (13, 14), (14, 14), (14, 37)):
        q, k, v = stacked(sequences, start, end)
        found.append(attention_with_kv_cache(q, **cache, cache_lengths=start, k=k, v=v))
    whole = attention(*stacked(sequences, 0, 37), causal="bottom_right")
    assert_same_bits(torch.cat(found, 2), whole, kind)


@pytest.mark.parametrize("kind", STORES)
def test_appending_first_and_attending_later(dtype: torch.dtype, kind: str) -> None:
    sequences = tokens([21, 21], dtype)
    twins = Twins(kind, 2, 24, dtype)
    for start, end in ((0, 20), (20, 21)):
        q, k, v = stacked(sequences, start, end)
        twins.append(k=k, v=v, cache_lengths=start)
        twins.attend(q, cache_lengths=end)


@pytest.mark.parametrize("capacity", [5, 9, 64])
def test_rings(dtype: torch.dtype, capacity: int) -> None:
    sequences = tokens([40, 40], dtype)
    twins = Twins("contiguous", 2, capacity, dtype)
    start = 0
    for n in (2, 1, 0, capacity - 3, 1, capacity - 3, 1):
        n = min(n, 40 - start)
        q, k, v = stacked(sequences, start, start + n)
        twins.attend(q, cache_lengths=start, k=k, v=v, ring=True, window=(3, 0))
        start += n


@pytest.mark.parametrize("packs", [False, True])
def test_of_more_tokens_than_a_ring_has_places_the_last_ones_stay(packs: bool) -> None:
    sequences = tokens([33, 33])
    twins = Twins("contiguous", 2, 5, torch.float32)
    if packs:
        (_, k, v), cu = packed(sequences, [(0, 33), (0, 12)])
        twins.append(k=k, v=v, cache_lengths=torch.tensor([2, 0]), ring=True, cu_seqlens=cu)
    else:
        _, k, v = stacked(sequences, 0, 33)
        twins.append(k=k, v=v, cache_lengths=torch.tensor([2, 0]), ring=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("kind", STORES)
def test_int8_caches_take_tokens_of_every_dtype(dtype: torch.dtype, kind: str) -> None:
    sequences = tokens([20, 20], dtype)
    twins = Twins(kind, 2, 24, torch.int8)
    for start, end in ((0, 13), (13, 14), (14, 20)):
        q, k, v = stacked(sequences, start, end)
        twins.attend(q, cache_lengths=start, k=k, v=v, window=(9, 0))


def test_int8_rows_of_zeros_nan_and_infinity() -> None:
    twins = Twins("contiguous", 1, 6, torch.int8, heads=1)
    k = torch.tensor(
        [[127, 0.5, 1.5, -2.5], [0, 0, 0, 0], [1, torch.nan, 2, 0], [1, torch.inf, 2, 0], [1, 2, -4, 3]]
    ).repeat(1, 2)[None, None]
    twins.append(k=k, v=k[..., :6].clone(), cache_lengths=1)
    assert twins.cache["k_scales"][0, 0, 3:5].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("kind", ["contiguous", "pages of 3"])
def test_rotary(dtype: torch.dtype, kind: str, rotary_dim: int, interleaved: bool) -> None:
    sequences = tokens([9, 30, 17], dtype)
    twins = Twins(kind, 3, 32, dtype)
    rotary = tables(dtype, rotary_dim, 32)
    for at in SPANS:
        (q, k, v), cu = packed(sequences, at)
        lengths = torch.tensor([start for start, _ in at])
        twins.attend(
            q, 4 * torch.finfo(dtype).eps, cache_lengths=lengths, k=k, v=v, cu_seqlens=cu, rotary=rotary,
            rotary_interleaved=interleaved,
        )  # fmt: skip


def test_rotary_into_an_int8_cache_and_from_tables_with_strides() -> None:
    sequences = tokens([9, 30, 17])
    twins = Twins("pages of 3", 3, 32, torch.int8)
    cos, sin = (t.repeat(1, 2)[:, ::2].repeat(2, 1)[:32] for t in tables(torch.float32, 8, 32))
    for at in SPANS:
        (q, k, v), cu = packed(sequences, at)
        lengths = torch.tensor([start for start, _ in at])
        twins.attend(q, 1e-6, cache_lengths=lengths, k=k, v=v, cu_seqlens=cu, rotary=(cos, sin))


def test_nothing_to_do() -> None:
    cache = store("contiguous", 2, 8)
    before = snapshot(cache)
    q, k, v = stacked(tokens([8, 8]), 0, 0)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=8)
    assert attention_with_kv_cache(q, **cache, cache_lengths=8, k=k, v=v).shape == (2, 4, 0, 6)
    assert_unchanged(cache, before)
    none = store("contiguous", 0, 8)
    out = attention_with_kv_cache(
        torch.zeros(0, 4, 1, 8), **none, cache_lengths=torch.zeros(0, dtype=torch.int64)
    )
    assert out.shape == (0, 4, 1, 6)


def test_sequences_that_hold_nothing_and_queries_before_the_first_token_give_zeros() -> None:
    twins = Twins("contiguous", 2, 8, torch.float32)
    q, k, v = stacked(tokens([5, 5]), 0, 5)
    twins.append(k=k[:, :, :2], v=v[:, :, :2], cache_lengths=0)
    out = twins.attend(q, cache_lengths=torch.tensor([2, 0]))
    assert not out[0, :, :3].any() and not out[1].any()


MAKE: dict[str, Callable[[torch.dtype], Any]] = {
    "KVCache": lambda dtype: attn_ext.KVCache(2, 2, 8, v_head_dim=6, capacity=4, dtype=dtype, device=DEVICE),
    "PagedKVCache": lambda dtype: attn_ext.PagedKVCache(
        2, 2, 8, v_head_dim=6, page_size=3, dtype=dtype, device=DEVICE
    ),
    "SlidingKVCache": lambda dtype: attn_ext.SlidingKVCache(
        2, 2, 8, v_head_dim=6, window=4, capacity=9, dtype=dtype, device=DEVICE
    ),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_script_of_calls_to_a_cache_class(dtype: torch.dtype, kind: str) -> None:
    sequences = tokens([30, 30], dtype)
    cache = MAKE[kind](dtype)
    options = {"window": (3, 0)} if kind == "SlidingKVCache" else {}  # itself and the three before it
    held = [0, 0]
    for step in ((4, 2), (1, 1), (0, 3), (2, 0), "cut", (3, 3), "reorder", (1, 2), "reset", (5, 1), (1, 1)):
        if step == "cut":
            held = [n - 1 for n in held]
            cache.truncate(held)
        elif step == "reorder":
            held, sequences = held[::-1], sequences[::-1]
            cache.reorder([1, 0])
        elif step == "reset":
            held = [0, 0]
            cache.reset()
        else:
            spans = [(at, at + n) for at, n in zip(held, step, strict=True)]
            (q, k, v), cu = packed(sequences, spans)
            out = carried(cache.attend)(q, k, v, cu_seqlens=cu)
            held = [end for _, end in spans]
            for b, (start, end) in enumerate(spans):
                seq = Tokens(*(x[:, :end] for x in sequences[b]))
                truth, plain = (full_pass(seq, work, **options)[0] for work in (torch.float64, dtype))
                rows = out[int(cu[b]) : int(cu[b + 1])].transpose(0, 1)
                assert_close_to_reference(rows, truth[:, start:end], plain[:, start:end])
