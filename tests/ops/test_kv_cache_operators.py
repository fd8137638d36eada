"""`kv_cache_append_` and `attention_with_kv_cache` against attention without a cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cache_support import (
    NAN,
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
from op_support import assert_close_to_reference, assert_same_bits, make
from torch import Tensor

import attn_ext
from attn_ext import attention_with_kv_cache, kv_cache_append_

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (3, 0)},
    "softcap and scale": {"softcap": 1.5, "scale": 0.4},
    "ALiBi": {"alibi_slopes": torch.linspace(0.1, 0.7, 4)},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 4)},
    "all of them": {
        "window": (6, 2),
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.7, 4),
        "sinks": torch.linspace(-1.0, 1.0, 4),
    },
}
CHUNKS = ((0, 13), (13, 14), (14, 14), (14, 15), (15, 33), (33, 37))


def check_rows(out: Tensor, lse: Tensor, seq: Tokens, rows: slice, **options: Any) -> None:
    """out (Hq, n, Dv) and lse (Hq, n) are rows of the pass over the whole sequence."""
    truth, plain = (full_pass(seq, dtype, **options) for dtype in (torch.float64, seq.q.dtype))
    assert_close_to_reference(out, truth[0][:, rows], plain[0][:, rows])
    assert_close_to_reference(lse, truth[1][:, rows], plain[1][:, rows], atol=1e-5, what="lse")


# ------------------------------------------------------------------------------------------------ right results


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", STORES)
def test_chunks_and_single_tokens_give_the_rows_of_one_pass(
    isa: str, dtype: torch.dtype, kind: str, option: str
) -> None:
    options = OPTIONS[option]
    sequences = tokens([37, 37], dtype)
    cache = store(kind, 2, 40, dtype)
    found = []
    for start, end in CHUNKS:
        q, k, v = stacked(sequences, start, end)
        found.append(
            attention_with_kv_cache(q, **cache, cache_lengths=start, k=k, v=v, **options, return_lse=True)
        )
    out, lse = torch.cat([o for o, _ in found], 2), torch.cat([x for _, x in found], 2)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for b, seq in enumerate(sequences):
        check_rows(out[b], lse[b], seq, slice(None), **options)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", STORES)
def test_appending_first_and_attending_later_is_the_same(isa: str, kind: str) -> None:
    sequences = tokens([37, 37])
    whole, split = store(kind, 2, 40), store(kind, 2, 40)
    for start, end in CHUNKS:
        q, k, v = stacked(sequences, start, end)
        assert kv_cache_append_(**split, k=k, v=v, cache_lengths=start) is None
        later = attention_with_kv_cache(q, **split, cache_lengths=end)
        assert_same_bits(later, attention_with_kv_cache(q, **whole, cache_lengths=start, k=k, v=v), "out")
    assert_unchanged(split, snapshot(whole))


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", STORES)
def test_packed_sequences_bring_different_numbers_of_tokens(isa: str, dtype: torch.dtype, kind: str) -> None:
    slopes = torch.linspace(0.1, 0.7, 12).view(3, 4)
    sequences = tokens([9, 30, 17], dtype)
    cache = store(kind, 3, 32, dtype)
    spans = [
        [(0, 3), (0, 20), (0, 0)],
        [(3, 3), (20, 21), (0, 16)],
        [(3, 9), (21, 30), (16, 17)],
        [(9, 9), (30, 30), (17, 17)],
    ]
    for at in spans:
        (q, k, v), cu = packed(sequences, at)
        lengths = torch.tensor([start for start, _ in at], dtype=torch.int32)
        out, lse = attention_with_kv_cache(
            q, **cache, cache_lengths=lengths, k=k, v=v, cu_seqlens=cu, alibi_slopes=slopes, return_lse=True
        )
        assert out.shape == (len(q), 4, 6) and lse.shape == (4, len(q))
        assert lengths.tolist() == [start for start, _ in at]
        for b, (start, end) in enumerate(at):
            rows = slice(int(cu[b]), int(cu[b + 1]))
            seq = Tokens(*(x[:, :end] for x in sequences[b]))
            check_rows(
                out[rows].transpose(0, 1), lse[:, rows], seq, slice(start, end), alibi_slopes=slopes[b]
            )


def test_lengths_come_as_integers_and_tensors_of_both_kinds() -> None:
    q, k, v = stacked(tokens([9, 9]), 0, 9)
    expected = None
    for lengths in (
        4,
        torch.tensor(4),
        torch.tensor(4, dtype=torch.int32),
        torch.tensor([4, 4]),
        np.int64(4),
    ):
        cache = store("contiguous", 2, 12)
        kv_cache_append_(**cache, k=k[:, :, :4], v=v[:, :, :4], cache_lengths=0)
        kv_cache_append_(**cache, k=k[:, :, 4:], v=v[:, :, 4:], cache_lengths=lengths)
        out = attention_with_kv_cache(q, **cache, cache_lengths=9)
        expected = out if expected is None else expected
        assert_same_bits(out, expected, repr(lengths))


def test_without_causal_every_query_sees_all_keys_of_its_sequence() -> None:
    sequences = tokens([7, 7])
    cache = store("pages of 3", 2, 12)
    q, k, v = stacked(sequences, 0, 7)
    lengths = torch.tensor([7, 4])
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0)
    out, lse = attention_with_kv_cache(q, **cache, cache_lengths=lengths, causal=False, return_lse=True)
    for b, n in enumerate(lengths.tolist()):
        seq = Tokens(sequences[b].q, sequences[b].k[:, :n], sequences[b].v[:, :n])
        check_rows(out[b], lse[b], seq, slice(None), causal=False)


def test_the_reference_takes_bottom_right_for_true_as_the_operator_does() -> None:
    cache = store("contiguous", 2, 12)
    q, k, v = stacked(tokens([7, 7]), 0, 7)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0)
    for attend in (attention_with_kv_cache, attn_ext.reference.attention_with_kv_cache):
        expected = attend(q, **cache, cache_lengths=7, causal=True)
        assert_same_bits(
            attend(q, **cache, cache_lengths=7, causal="bottom_right"), expected, attend.__module__
        )
        with pytest.raises(ValueError, match="causal must be False, True or 'bottom_right', not 'top_left'"):
            attend(q, **cache, cache_lengths=7, causal="top_left")


def test_more_queries_than_tokens_and_empty_sequences_give_zeros() -> None:
    cache = store("contiguous", 2, 8)
    q, k, v = stacked(tokens([5, 5]), 0, 5)
    kv_cache_append_(**cache, k=k[:, :, :2], v=v[:, :, :2], cache_lengths=0)
    out, lse = attention_with_kv_cache(q, **cache, cache_lengths=torch.tensor([2, 0]), return_lse=True)
    assert not out[0, :, :3].any() and out[0, :, 3:].all() and not out[1].any()
    assert (lse[0, :, :3] == -torch.inf).all() and lse[0, :, 3:].isfinite().all()
    assert (lse[1] == -torch.inf).all()
    check_rows(out[0], lse[0], Tokens(q[0], k[0, :, :2], v[0, :, :2]), slice(None))


def test_no_tokens_no_queries_and_no_sequences_are_fine() -> None:
    cache = store("contiguous", 2, 8)
    before = snapshot(cache)
    q, k, v = stacked(tokens([8, 8]), 0, 0)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=8)
    assert attention_with_kv_cache(q, **cache, cache_lengths=8, k=k, v=v).shape == (2, 4, 0, 6)
    assert_unchanged(cache, before)
    none = store("contiguous", 0, 8)
    out, lse = attention_with_kv_cache(
        torch.zeros(0, 4, 1, 8), **none, cache_lengths=torch.zeros(0, dtype=torch.int64), return_lse=True
    )
    assert out.shape == (0, 4, 1, 6) and lse.shape == (0, 4, 1)


# ------------------------------------------------------------------------------------------------------ rotary


@pytest.mark.isa_matrix
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_in_the_call_is_the_module_before_it(
    isa: str, dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    embed = attn_ext.nn.RotaryEmbedding(8, rotary_dim=rotary_dim, interleaved=interleaved)
    sequences = tokens([30, 17], dtype)
    cache = store("pages of 3", 2, 30, dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angle = torch.arange(30)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    tables = (angle.cos().to(exact), angle.sin().to(exact))
    for at in ([(0, 12), (0, 5)], [(12, 13), (5, 5)], [(13, 30), (5, 17)]):
        (q, k, v), cu = packed(sequences, at)
        out, lse = attention_with_kv_cache(
            q,
            **cache,
            cache_lengths=torch.tensor([start for start, _ in at]),
            k=k,
            v=v,
            cu_seqlens=cu,
            rotary=tables,
            rotary_interleaved=interleaved,
            return_lse=True,
        )
        for b, (start, end) in enumerate(at):
            seq = sequences[b]
            turned = Tokens(*(embed(x[None, :, :end])[0] for x in seq[:2]), seq.v[:, :end])
            rows = slice(int(cu[b]), int(cu[b + 1]))
            # A kernel may turn with fused multiply-adds: a few of the rounded numbers differ by one step.
            truth, plain = (full_pass(turned, work) for work in (torch.float64, dtype))
            step = 4 * torch.finfo(dtype).eps
            for got, i in ((out[rows].transpose(0, 1), 0), (lse[:, rows], 1)):
                assert_close_to_reference(
                    got, truth[i][:, start:end], plain[i][:, start:end], rounding=step if got.numel() else 0.0
                )


def test_rotary_tables_must_reach_as_far_as_the_tokens() -> None:
    cache = store("contiguous", 1, 8)
    q, k, v = stacked(tokens([8]), 0, 3)
    tables = (torch.ones(6, 4), torch.zeros(6, 4))
    before = snapshot(cache)
    with pytest.raises(IndexError, match="rotary"):
        kv_cache_append_(**cache, k=k, v=v, cache_lengths=4, rotary=tables)
    assert_unchanged(cache, before)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=3, rotary=tables)
    with pytest.raises(IndexError, match="rotary"):  # the query would stand before the first position
        attention_with_kv_cache(q, **cache, cache_lengths=1, rotary=tables)


# -------------------------------------------------------------------------------------------------------- int8


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (…, D) float32 → integers and scales, written from the rule alone."""
    scale = np.abs(x).max(-1) / np.float32(127)
    numbers = np.rint(np.divide(x, scale[..., None], out=np.zeros_like(x), where=scale[..., None] > 0))
    return numbers, scale


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", STORES)
def test_int8_caches_hold_rounded_tokens_and_attend_to_those(isa: str, kind: str) -> None:
    sequences = tokens([20, 20])
    cache = store(kind, 2, 24, torch.int8)
    found = []
    for start, end in ((0, 13), (13, 14), (14, 20)):
        q, k, v = stacked(sequences, start, end)
        found.append(attention_with_kv_cache(q, **cache, cache_lengths=start, k=k, v=v, return_lse=True))
    out, lse = torch.cat([o for o, _ in found], 2), torch.cat([x for _, x in found], 2)
    table = cache.get("block_table")
    for b, (q, k, v) in enumerate(sequences):
        values = []
        for name, x in (("k", k), ("v", v)):
            numbers, scale = quantised(x.numpy())
            stored, scales = cache[f"{name}_cache"], cache[f"{name}_scales"]
            if table is None:
                stored, scales = stored[b, :, :20], scales[b, :, :20]
            else:
                stored = stored[table[b]].transpose(0, 1).flatten(1, 2)[:, :20]
                scales = scales[table[b]].transpose(0, 1).flatten(1, 2)[:, :20]
            np.testing.assert_allclose(scales.numpy(), scale, rtol=1e-6)
            off = np.abs(stored.numpy() - numbers)
            # A quotient that is a tie but for its last bit may go either way.
            assert off.max() <= 1 and (off > 0).mean() < 0.01
            values.append(stored.float() * scales[..., None])
        check_rows(out[b], lse[b], Tokens(q, *values), slice(None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_int8_caches_take_tokens_of_every_dtype(dtype: torch.dtype) -> None:
    sequences = tokens([12], dtype)
    cache = store("contiguous", 1, 12, torch.int8)
    q, k, v = stacked(sequences, 0, 12)
    out = attention_with_kv_cache(q, **cache, cache_lengths=0, k=k, v=v)
    assert out.dtype == dtype
    exact, _ = full_pass(sequences[0], torch.float64)
    assert (out[0].double() - exact).abs().max() < 0.05


def test_int8_ties_go_to_even_and_zeros_nan_and_infinities_have_their_scales() -> None:
    cache = store("contiguous", 1, 6, torch.int8, heads=1, dims=(4, 4))
    k = torch.tensor(
        [
            [127.0, 0.5, 1.5, -2.5],  # scale 1: ties
            [0.0, 0.0, 0.0, 0.0],
            [1.0, NAN, 2.0, 0.0],
            [1.0, torch.inf, 2.0, 0.0],
            [1.0, 2.0, -4.0, 3.0],
        ]
    )[None, None]
    kv_cache_append_(**cache, k=k, v=k.clone(), cache_lengths=0)
    numbers, scales = cache["k_cache"][0, 0], cache["k_scales"][0, 0]
    assert numbers[0].tolist() == [127, 0, 2, -2] and scales[0] == 1
    assert not numbers[1].any() and scales[1] == 0
    assert scales[2].isnan() and scales[3].isnan()
    assert numbers[4].tolist() == [32, 64, -127, 95]
    q = torch.ones(1, 1, 1, 4)
    zero_seen = attention_with_kv_cache(q, **cache, cache_lengths=2)
    assert zero_seen.isfinite().all()
    assert attention_with_kv_cache(q, **cache, cache_lengths=3).isnan().all()


# -------------------------------------------------------------------------------------------------------- ring


@pytest.mark.isa_matrix
@pytest.mark.parametrize("capacity", [5, 9, 64])
def test_a_ring_gives_what_a_window_over_everything_gives(
    isa: str, dtype: torch.dtype, capacity: int
) -> None:
    sequences = tokens([40, 40], dtype)
    cache = store("contiguous", 2, capacity, dtype)
    at_once, found, start = capacity - 3, [], 0
    for n in (2, 1, 0, at_once, 1, 1, at_once, at_once, *[1] * 40):
        n = min(n, 40 - start)
        q, k, v = stacked(sequences, start, start + n)
        found.append(
            attention_with_kv_cache(
                q, **cache, cache_lengths=start, k=k, v=v, ring=True, window=(3, 0), return_lse=True
            )
        )
        start += n
    out, lse = torch.cat([o for o, _ in found], 2), torch.cat([x for _, x in found], 2)
    for b, seq in enumerate(sequences):
        check_rows(out[b], lse[b], seq, slice(None), window=(3, 0))


def test_a_ring_refuses_queries_of_keys_that_are_gone() -> None:
    cache = store("contiguous", 2, 6)
    q, k, v = stacked(tokens([12, 12]), 0, 12)
    attention_with_kv_cache(q[:, :, :6], **cache, cache_lengths=0, k=k[:, :, :6], v=v[:, :, :6], ring=True)
    before = snapshot(cache)
    one = {"k": k[:, :, 6:7], "v": v[:, :, 6:7]}
    for window in (None, (None, 0), (6, 0)):
        with pytest.raises(ValueError, match="ring"):
            attention_with_kv_cache(q[:, :, :1], **cache, cache_lengths=6, **one, ring=True, window=window)
    three = {"k": k[:, :, 6:9], "v": v[:, :, 6:9]}
    with pytest.raises(ValueError, match="ring"):
        attention_with_kv_cache(q[:, :, :3], **cache, cache_lengths=6, **three, ring=True, window=(4, 0))
    assert_unchanged(cache, before)
    attention_with_kv_cache(q[:, :, :3], **cache, cache_lengths=6, **three, ring=True, window=(3, 0))


def test_of_more_tokens_than_a_ring_has_places_the_last_ones_stay() -> None:
    cache = store("contiguous", 1, 5)
    q, k, v = stacked(tokens([13]), 0, 13)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0, ring=True)
    expected = torch.stack([k[0, :, p] for p in (10, 11, 12, 8, 9)], 1)
    assert torch.equal(cache["k_cache"][0], expected)
    out, lse = attention_with_kv_cache(
        q[:, :, -2:], **cache, cache_lengths=13, ring=True, window=(3, 0), return_lse=True
    )
    check_rows(out[0], lse[0], Tokens(q[0], k[0], v[0]), slice(11, 13), window=(3, 0))


# --------------------------------------------------------------------------------------------------- block tables


def test_only_the_table_entries_that_a_call_needs_are_looked_at() -> None:
    cache = store("pages of 3", 2, 12)
    q, k, v = stacked(tokens([12, 12]), 0, 7)
    cache["block_table"][:, 3] = torch.tensor([-5, 1000], dtype=torch.int32)
    out = attention_with_kv_cache(q, **cache, cache_lengths=0, k=k, v=v)
    cache["block_table"][:, 0] = -1
    kv_cache_append_(**cache, k=k[:, :, :1], v=v[:, :, :1], cache_lengths=7)  # block 2 alone
    with pytest.raises(IndexError, match=r"sequence 0.*block_table.*-1"):
        attention_with_kv_cache(q, **cache, cache_lengths=7)
    with pytest.raises(IndexError, match=r"sequence 0.*block_table.*-5"):
        kv_cache_append_(**cache, k=k[:, :, :2], v=v[:, :, :2], cache_lengths=8)
    assert out.isfinite().all()


def test_two_tokens_for_one_place_are_refused() -> None:
    cache = store("pages of 3", 2, 6)
    k, v = stacked(tokens([6, 6]), 0, 2)[1:]
    cache["block_table"][1, 1] = cache["block_table"][0, 1]
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="sequence"):
        kv_cache_append_(**cache, k=k, v=v, cache_lengths=3)
    kv_cache_append_(**cache, k=k[:, :, :1], v=v[:, :, :1], cache_lengths=torch.tensor([3, 2]))
    kv_cache_append_(**cache, k=k[:, :, :1], v=v[:, :, :1], cache_lengths=torch.tensor([3, 4]))
    before = snapshot(cache)
    expanded = {name: cache[name][:1].expand(2, -1, -1, -1) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="memory"):
        kv_cache_append_(**expanded, k=k, v=v, cache_lengths=0)
    assert_unchanged(cache, before)


def test_sequences_may_read_the_same_blocks() -> None:
    sequences = tokens([6])
    cache = store("pages of 3", 2, 6)
    cache["block_table"][1] = cache["block_table"][0]
    q, k, v = stacked(sequences, 0, 6)
    alone = {**cache, "block_table": cache["block_table"][:1]}
    expected = attention_with_kv_cache(q, **alone, cache_lengths=0, k=k, v=v)
    both = attention_with_kv_cache(q.expand(2, -1, -1, -1), **cache, cache_lengths=6)
    assert_same_bits(both, expected.expand(2, -1, -1, -1).contiguous(), "shared blocks")


# ------------------------------------------------------------------------------------------------------ bad calls


@pytest.mark.parametrize("call", ["append", "attend"])
def test_past_the_capacity_nothing_is_written_and_the_message_has_the_numbers(call: str) -> None:
    def run(cache: dict[str, Any], n: int, at: Any) -> None:
        k, v = make((len(cache["k_cache"]), 2, n, 4)), make((len(cache["k_cache"]), 2, n, 4))
        if call == "append":
            kv_cache_append_(**cache, k=k, v=v, cache_lengths=at)
        else:
            attention_with_kv_cache(k, **cache, cache_lengths=at, k=k, v=v)

    one, three = (store("contiguous", b, 8, dims=(4, 4)) for b in (1, 3))
    for cache, n, at, b in (
        (one, 3, 6, 0),
        (one, 1, 8, 0),
        (one, 3, torch.tensor(6, dtype=torch.int32), 0),
        (one, 3, torch.tensor([6]), 0),
        (one, 0, 9, 0),
        (three, 3, torch.tensor([0, 5, 6]), 2),
        (three, 3, torch.tensor([0, 2**40, 1]), 1),
    ):
        before = snapshot(cache)
        position = at if isinstance(at, int) else at.reshape(-1).tolist()[b if at.dim() else 0]
        with pytest.raises(IndexError, match=rf"sequence {b}.*{n} tokens at position {position}.*\b8\b"):
            run(cache, n, at)
        assert_unchanged(cache, before)
    for cache, at in ((one, -1), (one, torch.tensor(-1)), (three, torch.tensor([0, 0, -3]))):
        before = snapshot(cache)
        with pytest.raises(ValueError, match=r"sequence \d.*-\d"):
            run(cache, 2, at)
        assert_unchanged(cache, before)
    run(one, 0, 8)
    run(one, 2, torch.tensor(6))


def _call(**changed: Any) -> Callable[[dict[str, Any]], None]:
    """Both operators with good arguments but for some, which are values or functions of the good ones."""

    def call(cache: dict[str, Any]) -> None:
        q, k, v = stacked(tokens([4, 4]), 0, 2)
        arguments = {**cache, "q": q, "k": k, "v": v, "cache_lengths": torch.tensor([3, 1])}
        for name, change in changed.items():
            arguments[name] = change(arguments) if callable(change) else change
        attention_with_kv_cache(**arguments)

    return call


BAD: dict[str, tuple[type[Exception], str, Callable[[dict[str, Any]], None]]] = {
    "k alone": (ValueError, "k and v", _call(v=None)),
    "k of another dtype": (TypeError, "float64", _call(k=lambda a: a["k"].double())),
    "q of another dtype": (TypeError, "bfloat16", _call(q=lambda a: a["q"].bfloat16())),
    "a cache of integers": (TypeError, "int32", _call(k_cache=lambda a: a["k_cache"].to(torch.int32))),
    "two caches of two dtypes": (TypeError, "float16", _call(k_cache=lambda a: a["k_cache"].half())),
    "no tensor": (TypeError, "list", _call(k=lambda a: a["k"].tolist())),
    "k of another batch": (ValueError, r"\(1, 2, 2, 8\)", _call(k=lambda a: a["k"][:1])),
    "k of other heads": (ValueError, r"\(2, 1, 2, 8\)", _call(k=lambda a: a["k"][:, :1])),
    "k of another width": (ValueError, r"\(2, 2, 2, 7\)", _call(k=lambda a: a["k"][..., :7])),
    "v of another length": (ValueError, r"\(2, 2, 1, 6\)", _call(v=lambda a: a["v"][:, :, :1])),
    "q of another width": (ValueError, r"\(2, 4, 2, 7\)", _call(q=lambda a: a["q"][..., :7])),
    "q of another batch": (ValueError, r"\(1, 4, 2, 8\)", _call(q=lambda a: a["q"][:1])),
    "heads that are no multiple": (ValueError, "multiple", _call(q=lambda a: a["q"][:, :3])),
    "caches of two capacities": (ValueError, "v_cache", _call(v_cache=lambda a: a["v_cache"][:, :, :7])),
    "a cache of three dims": (ValueError, "k_cache", _call(k_cache=lambda a: a["k_cache"][0])),
    "lengths of a float": (TypeError, "cache_lengths", _call(cache_lengths=torch.tensor([1.0, 2.0]))),
    "lengths of a list": (TypeError, "cache_lengths", _call(cache_lengths=[1, 2])),
    "too many lengths": (ValueError, r"\(3,\)", _call(cache_lengths=torch.tensor([1, 2, 3]))),
    "a negative length": (ValueError, "-2", _call(cache_lengths=torch.tensor([1, -2]))),
    "scales without int8": (ValueError, "scales", _call(k_scales=torch.zeros(2, 2, 8))),
    "a table of int64": (TypeError, "int64", _call(block_table=torch.zeros(2, 1, dtype=torch.int64))),
    "a table of one dim": (ValueError, "block_table", _call(block_table=torch.zeros(2, dtype=torch.int32))),
    "a ring with a table": (
        ValueError,
        "ring",
        _call(ring=True, block_table=torch.tensor([[0], [1]], dtype=torch.int32)),
    ),
    "a window of a string": (ValueError, "window", _call(window="3")),
    "a negative window": (ValueError, "window", _call(window=(-1, 0))),
    "a scale of a tensor": (TypeError, "scale", _call(scale=torch.ones(()))),
    "a scale of infinity": (ValueError, "scale", _call(scale=float("inf"))),
    "a negative softcap": (ValueError, "softcap", _call(softcap=-1.0)),
    "slopes of another shape": (ValueError, "alibi_slopes", _call(alibi_slopes=torch.ones(3))),
    "slopes of another batch": (ValueError, "alibi_slopes", _call(alibi_slopes=torch.ones(3, 4))),
    "sinks of another shape": (ValueError, "sinks", _call(sinks=torch.ones(3))),
    "a causal corner": (ValueError, "causal", _call(causal="top_left")),
    "rotary tables of another dtype": (TypeError, "rotary", _call(rotary=(torch.ones(8, 4).double(),) * 2)),
    "rotary tables too wide": (ValueError, "rotary", _call(rotary=(torch.ones(8, 5),) * 2)),
    "one rotary table": (TypeError, "rotary", _call(rotary=torch.ones(8, 4))),
    "cu_seqlens with unpacked tokens": (ValueError, "packed", _call(cu_seqlens=torch.tensor([0, 1, 2]))),
    "q that needs a gradient": (ValueError, "gradient", _call(q=lambda a: a["q"].requires_grad_())),
    "k that needs a gradient": (ValueError, "gradient", _call(k=lambda a: a["k"].requires_grad_())),
    "sinks that need one": (ValueError, "gradient", _call(sinks=torch.ones(4, requires_grad=True))),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_written(case: str) -> None:
    error, message, call = BAD[case]
    cache = store("contiguous", 2, 8)
    q, k, v = stacked(tokens([3, 3], seed=7), 0, 3)
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0)
    before = snapshot(cache)
    with pytest.raises(error, match=message) as raised:
        call(cache)
    assert re.match(r"attn_ext\.(reference\.)?(attention_with_kv_cache|attention)\b", str(raised.value))
    assert_unchanged(cache, before)
    _call()(cache)


@pytest.mark.parametrize(
    "ends, message",
    [
        ([1, 2, 3], "start with 0"),
        ([0, 3, 2], "fall"),
        ([0, 1, 2], "end with"),
        ([0, 3], r"\(3,\)"),
        ([0.0, 1.0, 3.0], "int32 or int64"),
    ],
)
def test_cu_seqlens_that_do_not_fit_are_named(ends: list[Any], message: str) -> None:
    cache = store("contiguous", 2, 8)
    before = snapshot(cache)
    k, v = make((3, 2, 8)), make((3, 2, 6))
    with pytest.raises((ValueError, TypeError), match=message):
        kv_cache_append_(**cache, k=k, v=v, cache_lengths=0, cu_seqlens=torch.tensor(ends))
    assert_unchanged(cache, before)


def test_gradients_are_no_matter_under_no_grad() -> None:
    cache = store("contiguous", 2, 8)
    q, k, v = (x.clone().requires_grad_() for x in stacked(tokens([4, 4]), 0, 4))
    with torch.no_grad():
        out = attention_with_kv_cache(q, **cache, cache_lengths=0, k=k, v=v)
    assert not out.requires_grad and not cache["k_cache"].requires_grad


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", STORES)
def test_decoded_rows_have_the_bits_of_the_full_pass(isa: str, dtype: torch.dtype, kind: str) -> None:
    sequences = tokens([301, 301], dtype, dims=(24, 20))
    cache = store(kind, 2, 310, dtype, dims=(24, 20))
    q, k, v = stacked(sequences, 0, 301)
    expected = attn_ext.attention(q, k, v, causal="bottom_right")
    found, start = [], 0
    for end in (7, 8, 9, 150, 151, 290, 299, 300, 301):
        q, k, v = stacked(sequences, start, end)
        found.append(attention_with_kv_cache(q, **cache, cache_lengths=start, k=k, v=v))
        start = end
    assert_same_bits(torch.cat(found, 2), expected, kind)


# ------------------------------------------------------------------------------------------ as operators of torch


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "dtype", "extras"),
    [
        ("contiguous", torch.float32, "plain"),
        ("contiguous", torch.int8, "options"),
        ("contiguous", torch.bfloat16, "packed"),
        ("tokens first", torch.bfloat16, "options"),
        ("pages of 3", torch.float32, "options"),
        ("pages of 3", torch.int8, "packed"),
        ("ring", torch.float32, "packed"),
        ("ring", torch.int8, "plain"),
    ],
)
def test_opcheck_passes_for_the_cache_ops(kind: str, dtype: torch.dtype, extras: str) -> None:
    """Schemas name every tensor that is written and none else; fake tensors have the real shapes and strides."""
    of_tokens = torch.float32 if dtype == torch.int8 else dtype
    new = stacked(tokens([3, 3], of_tokens), 0, 3)
    cu_seqlens = None
    if extras == "packed":
        new, cu_seqlens = packed(tokens([3, 3], of_tokens), [(0, 3), (1, 2)])
    cache = store("contiguous" if kind == "ring" else kind, 2, 9, dtype)
    for name, t in cache.items():
        if name != "block_table":
            t.fill_(1)  # opcheck compares before and after, and NaN is not equal to itself
    stored = [cache[n] for n in ("k_cache", "v_cache")]
    tables = make((9, 2)) if extras == "options" else None
    places = [
        torch.tensor([4, 6]), cache.get("block_table"), cache.get("k_scales"), cache.get("v_scales"), cu_seqlens,
        tables, tables, kind == "ring", False,
    ]  # fmt: skip
    options: list[Any] = [None, None, 2, None if kind != "ring" else 5, None, None, 0.0]
    if extras == "options":
        options = [torch.tensor([0.1, 0.2, 0.3, 0.4]), make((4,), of_tokens), 2, 3, 0, 0.5, 2.0]
    ops = torch.ops.attn_ext
    torch.library.opcheck(ops.kv_cache_append_.default, (*stored, new.k, new.v, *places))
    torch.library.opcheck(ops.attention_with_kv_cache.default, (new.q, *stored, *places, *options))
    torch.library.opcheck(
        ops.attention_with_kv_cache_append_.default, (new.q, *stored, new.k, new.v, *places, *options)
    )


# --------------------------------------------------------------------------- what would write or read somewhere else


def test_a_ring_of_no_places_takes_no_tokens() -> None:
    cache = torch.zeros(1, 1, 0, 4)
    with pytest.raises(IndexError, match="1 tokens do not fit into a ring of no places"):
        kv_cache_append_(cache, cache.clone(), make((1, 1, 1, 4)), make((1, 1, 1, 4)), 3, ring=True)
    kv_cache_append_(cache, cache.clone(), make((1, 1, 0, 4)), make((1, 1, 0, 4)), 3, ring=True)


def _split(whole: Tensor, first: slice, second: slice) -> tuple[Tensor, Tensor]:
    """Two slices of the last dim of (B, L, H, width), as caches (B, H, L, …)."""
    return whole[..., first].transpose(1, 2), whole[..., second].transpose(1, 2)


@pytest.mark.parametrize("what", ["k", "v", "q", "v_cache", "part of v_cache", "rotary cos", "v_scales"])
def test_what_lies_in_the_memory_of_a_cache_is_refused(what: str) -> None:
    """An element would be read after it was written, or written twice: torch's in-place operations refuse it too."""
    k_cache, v_cache, q, k, v = (
        make((1, 2, n, 4), seed=s) for s, n in enumerate((8, 8, 2, 2, 2))
    )  # two heads of 8 places, 2 tokens
    more: dict[str, Any] = {}
    if what == "k":
        k = k_cache[:, :, 3:5]
    elif what == "v":
        v = v_cache[:, :, 3:5]
    elif what == "q":
        q = k_cache[:, :, 6:8]
    elif what == "v_cache":
        v_cache = k_cache
    elif what == "part of v_cache":
        k_cache, v_cache = _split(make((1, 8, 2, 8)), slice(0, 4), slice(3, 7))
    elif what == "rotary cos":
        more = {"rotary": (v_cache[0, 1, :, :2], make((8, 2)))}
    else:
        k_cache, v_cache = (torch.zeros(1, 2, 8, 4, dtype=torch.int8) for _ in range(2))
        scales = torch.ones(1, 2, 8)
        more = {"k_scales": scales, "v_scales": scales}
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match=re.escape(what.split()[-1]) + ".* lies in the memory of .*_"):
        attention_with_kv_cache(q, k_cache, v_cache, 1, k=k, v=v, **more)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("shape", ["layers", "heads side by side", "tokens side by side"])
def test_caches_may_lie_between_one_another(shape: str) -> None:
    """Stacked in one tensor, the memory of k and that of v alternate without meeting."""
    if shape == "layers":
        whole = torch.zeros(2, 3, 2, 8, 4)
        k_cache, v_cache = whole[:, 0], whole[:, 2]
    elif shape == "heads side by side":
        k_cache, v_cache = _split(torch.zeros(2, 8, 2, 8), slice(0, 4), slice(4, 8))
    else:
        whole = torch.zeros(2, 2, 16, 4)
        k_cache, v_cache = whole[:, :, ::2], whole[:, :, 1::2]
    kv_cache_append_(k_cache, v_cache, torch.ones(2, 2, 3, 4), 2 * torch.ones(2, 2, 3, 4), 5)
    assert k_cache.sum() == 48 and v_cache.sum() == 96


def _raw_append(**given: Any) -> None:
    """The operator itself: k_cache and v_cache (1, 1, 8, 4), one token at 3, but for what is given."""
    arguments = dict.fromkeys(
        ("block_table", "k_scales", "v_scales", "cu_seqlens", "cos", "sin")
    )  # none of them
    call: dict[str, Any] = {
        "k_cache": torch.zeros(1, 1, 8, 4), "v_cache": torch.zeros(1, 1, 8, 4), "k": make((1, 1, 1, 4)),
        "v": make((1, 1, 1, 4)), "cache_lengths": torch.tensor([3]), **arguments, "ring": False, "interleaved": False,
        **given,
    }  # fmt: skip
    torch.ops.attn_ext.kv_cache_append_(**call)


def test_lengths_of_any_number_are_not_copied_before_they_are_counted() -> None:
    for claimed in (2**33, 2**61):
        with pytest.raises(ValueError, match=f"cache_lengths must be .1,.*, not .{claimed},"):
            _raw_append(cache_lengths=torch.zeros(1, dtype=torch.int64).expand(claimed))
        with pytest.raises(ValueError, match=f"cu_seqlens must be .2,.*, not .{claimed},"):
            _raw_append(
                k=make((1, 1, 4)),
                v=make((1, 1, 4)),
                cu_seqlens=torch.zeros(1, dtype=torch.int64).expand(claimed),
            )


def test_of_rotary_tables_only_the_rows_in_use_are_read() -> None:
    """A table of 2**40 rows that claims more memory than there is, by an expanded dim, is as good as one of four."""
    table = torch.ones(1, 1).expand(2**40, 2)
    _raw_append(cos=table, sin=table)


def test_one_tensor_without_data_makes_the_call_no_silent_nothing() -> None:
    for name in ("cache_lengths", "k", "v_cache"):
        with pytest.raises(ValueError, match="one device, not on (cpu and meta|meta and cpu)"):
            _raw_append(
                **{
                    name: torch.empty(1, dtype=torch.int64, device="meta")
                    if name == "cache_lengths"
                    else torch.empty(1, 1, 8 if name == "v_cache" else 1, 4, device="meta")
                }
            )


def test_the_operator_itself_refuses_tokens_of_two_dtypes() -> None:
    """An int8 cache takes tokens of every dtype, but the rotary tables are read in that of the tokens."""
    k_cache, v_cache = (torch.zeros(1, 1, 8, 4, dtype=torch.int8) for _ in range(2))
    cache = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scales": torch.ones(1, 1, 8),
        "v_scales": torch.ones(1, 1, 8),
    }
    with pytest.raises(ValueError, match="k and v must have one dtype, not float32 and float64"):
        _raw_append(**cache, v=make((1, 1, 1, 4), torch.float64))
    rest = [
        torch.tensor([3]),
        None,
        cache["k_scales"],
        cache["v_scales"],
        None,
        make((8, 2)),
        make((8, 2)),
        False,
        False,
    ]
    with pytest.raises(ValueError, match="q, k and v must have one dtype, not float64 beside float32"):
        torch.ops.attn_ext.attention_with_kv_cache_append_(
            make((1, 1, 1, 4), torch.float64), k_cache, v_cache, make((1, 1, 1, 4)), make((1, 1, 1, 4)), *rest,
            None, None, 2, None, None, None, 0.0,
        )  # fmt: skip
    assert not k_cache.any() and not v_cache.any()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_none_where_a_tensor_belongs_is_named(name: str) -> None:
    call: dict[str, Any] = {n: make((1, 1, 8, 4)) for n in ("k_cache", "v_cache")}
    call |= {n: make((1, 1, 1, 4)) for n in ("q", "k", "v")} | {name: None}
    if name != "q":
        with pytest.raises(TypeError, match=f"kv_cache_append_: {name} must be a tensor, not NoneType"):
            kv_cache_append_(**{n: t for n, t in call.items() if n != "q"}, cache_lengths=0)
    if name not in ("k", "v"):
        with pytest.raises(
            TypeError, match=f"attention_with_kv_cache: {name} must be a tensor, not NoneType"
        ):
            attention_with_kv_cache(**call, cache_lengths=0)
