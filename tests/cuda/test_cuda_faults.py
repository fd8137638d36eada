"""Lengths, boundaries and tables that are wrong, on a device that the host does not wait for.

The sequence takes no part, the others are right, nothing else is written, and `backend.check_cuda` tells. (Whatever a
kernel touches outside the tensors of its call ends a simulated run.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cache_support import STORES, assert_unchanged, packed, snapshot, stacked, store, tokens
from cuda_support import attention, attention_varlen, attention_with_kv_cache, kv_cache_append_, raw_weights
from op_support import Shape, assert_same_bits, make
from torch import Tensor

from attn_ext.backend import check_cuda

HUGE = 2**40


@pytest.fixture(autouse=True)
def nothing_is_left_to_tell() -> Iterator[None]:
    check_cuda()
    yield
    check_cuda()


def expect_fault(kind: type[Exception], words: str, sequence: int) -> None:
    """One fault is told, once."""
    with pytest.raises(kind, match=words) as error:
        check_cuda()
    assert f" {sequence} of a call on " in str(error.value)
    check_cuda()


@pytest.mark.parametrize(
    ("wrong", "integer"),
    [
        *((n, torch.int32) for n in (-1, 38, 2**31 - 1, -(2**31))),
        *((n, torch.int64) for n in (-1, 38, HUGE, -HUGE, 2**31, -(2**63))),
    ],
)
def test_key_lengths(wrong: int, integer: torch.dtype) -> None:
    s = Shape(4, 2, 1, 5, 37, 4)
    q, k, v = (t.requires_grad_(True) for t in s.qkv())
    holder = torch.full((4, 3), 7, dtype=integer)
    holder[:, 1] = torch.tensor([37, wrong, 0, 12])
    grads, outputs = [], []
    for lengths in (holder[:, 1], torch.tensor([37, 0, 0, 12])):
        out, lse = attention(q, k, v, key_lengths=lengths, return_lse=True)
        outputs.append((out, lse))
        grads.append(torch.autograd.grad(out.square().sum(), [q, k, v]))
        if lengths.data_ptr() == holder[:, 1].data_ptr():
            expect_fault(ValueError, "key_lengths", 1)
    for a, b in zip((*outputs[0], *grads[0]), (*outputs[1], *grads[1]), strict=True):
        assert_same_bits(a, b, "the sequence as one without keys")


@pytest.mark.parametrize(
    ("cu", "sequence", "right"),
    [
        ([0, 5, 3, 10], 1, 5),  # falls
        ([0, 4, 7, 9], 2, 9),  # ends before the last row
        ([0, 4, 12, 10], 1, 4),  # past the rows
        ([0, 4, 7, HUGE], 2, 7),
        ([0, 4, -HUGE, 10], 1, 4),
        ([1, 4, 7, 10], 0, 0),  # from another row
        ([-3, 4, 7, 10], 0, 0),
    ],
)
@pytest.mark.parametrize("of", ["q", "k", "both"])
def test_boundaries(cu: list[int], sequence: int, right: int, of: str) -> None:
    """Sequences before the wrong boundary are right; rows behind it are rows without keys."""
    q, k, v = (make((10, heads, 4), seed=heads).requires_grad_(True) for heads in (2, 1, 1))
    wrong, good = torch.tensor(cu), torch.tensor([0, 4, 7, 10])
    cu_q, cu_k = (wrong if of in (which, "both") else good for which in "qk")
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    expect_fault(ValueError, "cu_seqlens", sequence)
    grads = torch.autograd.grad(out.square().sum(), [q, k, v])
    expect_fault(ValueError, "cu_seqlens", sequence)
    # The same with the boundaries that are left.
    kept = [n for n in cu[: sequence + 1] if 0 <= n <= 10] if right else [0]
    kept = kept + [right] * (4 - len(kept))
    left_q, left_k = (kept if of in (which, "both") else [0, 4, 7, 10] for which in "qk")
    whole = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for b in range(3):
        rows, keys = slice(left_q[b], left_q[b + 1]), slice(left_k[b], left_k[b + 1])
        alone = attention(
            q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1), return_lse=True
        )
        whole[0][rows], whole[1][:, rows] = alone[0].transpose(0, 1), alone[1]
    assert_same_bits(out, whole[0], "output")
    assert_same_bits(lse, whole[1], "lse")
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][left_q[-1] :].any() and not grads[1][left_k[-1] :].any()


@pytest.fixture
def memory_is_nan() -> Iterator[None]:
    """New memory holds NaN: what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize(
    ("cu_q", "cu_k", "right", "sequence"),
    [
        ([0, 4, 7, 9], [0, 30, 31, 40], [0, 4, 7, 9, 100], 2),  # ends before the last row
        ([1, 4, 7, 100], [0, 30, 31, 40], [0, 0, 0, 0, 100], 0),  # from another row
        ([0], [0], [0, 100], 0),  # no sequence
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_no_sequence_has(
    dtype: torch.dtype, cu_q: list[int], cu_k: list[int], right: list[int], sequence: int, sinks: bool
) -> None:
    """They are those of one more sequence, which has no keys."""
    given = [make((100, 4, 4), dtype, seed=1), *(make((cu_k[-1], 2, 4), dtype, seed=n) for n in (2, 3))]
    if sinks:
        given.append(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    found = []
    for boundaries in ((cu_q, cu_k), (right, [*cu_k, cu_k[-1]])):
        q, k, v, *more = (t.detach().requires_grad_(True) for t in given)
        options = {"sinks": more[0] if sinks else None, "return_lse": True}
        out, lse = attention_varlen(q, k, v, *map(torch.tensor, boundaries), **options)
        loss = out.square().sum() + lse[lse > -math.inf].sum()
        grads = torch.autograd.grad(loss, [q, k, v, *more])
        if boundaries[0] is cu_q:
            expect_fault(ValueError, "cu_seqlens", sequence)
        found.append((out, lse, *grads))
    for n, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"result {n}")
    assert not found[0][0][right[-2] :].any()


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize("rotates", [False, True])
def test_new_tokens_that_no_sequence_has(dtype: torch.dtype, rotates: bool) -> None:
    cache, call = filled("contiguous", True, dtype)
    if rotates:
        angle = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1])
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        call["rotary"] = angle.cos().to(exact), angle.sin().to(exact)
    total = call["q"].shape[0]
    call["cu_seqlens"] = torch.tensor([0, 2, 3, total - 1])
    out, lse = attention_with_kv_cache(**cache, **call, return_lse=True)
    expect_fault(ValueError, "cu_seqlens", 2)
    assert out[: total - 1].isfinite().all() and out[: total - 1].any()
    assert not out[total - 1 :].any() and (lse[:, total - 1 :] == -math.inf).all()
    for name in ("k_cache", "v_cache"):
        assert cache[name][2, :, 3:5].any() and not cache[name][2, :, 5:].any()


def test_row_positions() -> None:
    q, k, _ = Shape(1, 1, 1, 3, 9, 4).qkv()
    for wrong in (-1, 9, HUGE):
        raw_weights(q, k, row_positions=torch.tensor([8, wrong, 4]), num_queries=9, causal=1)
        expect_fault(ValueError, "row_positions", 1)


# --------------------------------------------------------------------------------------------------------- caches


def attempt(
    cache: dict[str, Tensor],
    call: dict[str, Any],
    bad: int,
    fault: tuple[type[Exception], str],
    repair: Callable[[dict[str, Tensor], dict[str, Any]], None],
) -> None:
    """Makes a call that is wrong for sequence `bad`, and one without the fault: the others are the same in both."""
    good_cache, good_call = snapshot(cache), dict(call)
    repair(good_cache, good_call)
    before = snapshot(cache)
    table = cache.get("block_table")
    out, lse = attention_with_kv_cache(**cache, **call, return_lse=True)
    expect_fault(*fault, bad)
    want, want_lse = attention_with_kv_cache(**good_cache, **good_call, return_lse=True)
    others = [b for b in range(3) if b != bad]
    if "cu_seqlens" in call:
        cu = call["cu_seqlens"].tolist()
        rows = [r for b in others for r in range(cu[b], cu[b + 1])]
        own = list(range(cu[bad], cu[bad + 1]))
        assert_same_bits(out[rows], want[rows], "the other sequences")
        assert not out[own].any() and (lse[:, own] == -math.inf).all()
    else:
        assert_same_bits(out[others], want[others], "the other sequences")
        assert not out[bad].any() and (lse[bad] == -math.inf).all()
    for name in ("k_cache", "v_cache"):
        if table is None:
            assert torch.equal(cache[name][bad].nan_to_num(), before[name][bad].nan_to_num()), "written to"
            assert torch.equal(cache[name][others].nan_to_num(), good_cache[name][others].nan_to_num())
        else:
            mine = good_cache["block_table"][bad].long()
            rest = torch.ones(len(cache[name]), dtype=torch.bool)
            rest[mine] = False
            assert torch.equal(cache[name][mine].nan_to_num(), before[name][mine].nan_to_num()), "written to"
            assert torch.equal(cache[name][rest].nan_to_num(), good_cache[name][rest].nan_to_num())
    # Appending alone finds the same.
    alone = {
        n: t for n, t in call.items() if n in ("k", "v", "cache_lengths", "cu_seqlens", "ring", "rotary")
    }
    again = {**before, **({} if table is None else {"block_table": table})}
    after = snapshot(again)
    kv_cache_append_(**after, **alone)
    if fault[1] not in ("ring has overwritten", "before position 0"):
        expect_fault(*fault, bad)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(after[name].nan_to_num(), cache[name].nan_to_num())


def filled(
    kind: str, packs: bool, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A cache of three sequences with 5, 8 and 3 tokens of at most 12, and a call that brings more."""
    sequences = tokens([12, 12, 12], dtype)
    cache = store(kind, 3, 12, dtype)
    for t in cache.values():
        if t.is_floating_point():
            t.zero_()
    (_, k, v), cu = packed(sequences, [(0, 5), (0, 8), (0, 3)])
    kv_cache_append_(**cache, k=k, v=v, cache_lengths=0, cu_seqlens=cu)
    spans = [(5, 7), (8, 11), (3, 4)] if packs else [(5, 7), (8, 10), (3, 5)]
    (q, k, v), cu = packed(sequences, spans)
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "cache_lengths": torch.tensor([5, 8, 3])}
    if packs:
        call["cu_seqlens"] = cu
    else:
        call.update({name: call[name].view(3, 2, -1, call[name].shape[-1]).transpose(1, 2) for name in "qkv"})
    return cache, call


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("wrong", [-1, 17, HUGE, 2**62, -(2**63)])
@pytest.mark.parametrize("kind", STORES)
def test_cache_lengths(kind: str, wrong: int, packs: bool) -> None:
    cache, call = filled(kind, packs)
    right, call["cache_lengths"] = call["cache_lengths"], torch.tensor([5, wrong, 3])
    fault = (IndexError, "capacity") if 0 <= wrong <= HUGE else (ValueError, "cache_lengths")
    attempt(cache, call, 1, fault, lambda cache, call: call.update(cache_lengths=right))


@pytest.mark.parametrize("packs", [False, True])
def test_tokens_that_do_not_fit(packs: bool) -> None:
    cache, call = filled("contiguous", packs)
    right, call["cache_lengths"] = call["cache_lengths"], torch.tensor([11, 8, 3], dtype=torch.int32)
    attempt(cache, call, 0, (IndexError, "capacity"), lambda cache, call: call.update(cache_lengths=right))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("wrong", [-1, -(2**31), 14, 2**31 - 1])
@pytest.mark.parametrize("entry", [0, 2, 3])
def test_block_tables(entry: int, wrong: int, packs: bool) -> None:
    """Sequence 1 has 8 tokens in pages of 3 and gets more: entries 0 to 3 are needed, as far as they come."""
    cache, call = filled("pages of 3", packs)
    cache = {**cache, "block_table": cache["block_table"].repeat_interleave(2, 1)[:, ::2]}  # strides
    right = cache["block_table"][1, entry].item()
    cache["block_table"][1, entry] = wrong

    def repair(cache: dict[str, Tensor], call: dict[str, Any]) -> None:
        cache["block_table"][1, entry] = right

    if entry == 0:  # an append does not look at it
        out = attention_with_kv_cache(**cache, **call)
        expect_fault(IndexError, "block_table", 1)
        assert not (out[2:5] if packs else out[1]).any()
    else:
        attempt(cache, call, 1, (IndexError, "block_table"), repair)


def test_entries_that_are_not_needed_may_be_anything() -> None:
    cache, call = filled("pages of 3", False)
    call["window"] = (1, 0)
    good = {name: t.clone() for name, t in cache.items()}
    cache["block_table"][:, 0] = 2**31 - 1  # before all windows but that of sequence 2
    cache["block_table"][2, 0], cache["block_table"][:2, 3], cache["block_table"][2, 2:] = (
        good["block_table"][2, 0], good["block_table"][:2, 3], -7,
    )  # fmt: skip
    out = attention_with_kv_cache(**cache, **call)
    check_cuda()
    assert_same_bits(out, attention_with_kv_cache(**good, **call), "out")


def test_boundaries_of_tokens_that_come() -> None:
    cache, call = filled("contiguous", True)
    before = snapshot(cache)
    call["cu_seqlens"] = torch.tensor([0, 2, 1, 6])
    out = attention_with_kv_cache(**cache, **call)
    expect_fault(ValueError, "cu_seqlens", 1)
    assert out[:2].any() and not out[2:].any()
    for name in ("k_cache", "v_cache"):
        assert torch.equal(cache[name][1:], before[name][1:])
        assert not torch.equal(cache[name][0], before[name][0])


def test_keys_that_a_ring_has_overwritten() -> None:
    cache, call = filled("contiguous", False)
    call.update(ring=True, window=(11, 0), cache_lengths=torch.tensor([5, 20, 3]))
    right = torch.tensor([5, 8, 3])
    attempt(
        cache, call, 1, (ValueError, "ring has overwritten"),
        lambda cache, call: call.update(cache_lengths=right),
    )  # fmt: skip


def test_a_ring_without_places() -> None:
    cache, (q, k, v) = store("contiguous", 2, 0), stacked(tokens([3, 3]), 0, 1)
    out = attention_with_kv_cache(q, **cache, cache_lengths=0, k=k, v=v, ring=True, window=(0, 0))
    expect_fault(IndexError, "capacity", 0)
    assert not out.any()


def test_rotary_tables_that_end_before_the_tokens() -> None:
    cache, call = filled("contiguous", False)
    call["rotary"] = (torch.ones(9, 4), torch.zeros(9, 4))
    before = snapshot(cache)
    attention_with_kv_cache(**cache, **call)
    expect_fault(IndexError, "rotary tables", 1)
    assert torch.equal(cache["k_cache"][1], before["k_cache"][1])
    del call["k"], call["v"]
    call["cache_lengths"] = torch.tensor([5, 8, 1])  # two queries
    out = attention_with_kv_cache(**cache, **call)
    expect_fault(IndexError, "before position 0", 2)
    assert out[:2].any() and not out[2].any()


def test_the_lowest_sequence_of_several_faults_is_told() -> None:
    q, k, v = Shape(5, 1, 1, 2, 6, 4).qkv()
    attention(q, k, v, key_lengths=torch.tensor([1, 2, -3, 4, -5]))
    attention(q, k, v, key_lengths=torch.tensor([1, 2, 3, 9, 9]))
    expect_fault(ValueError, "key_lengths", 2)


def test_right_calls_tell_nothing_and_leave_their_inputs_alone() -> None:
    cache, call = filled("pages of 3", True)
    lengths, table, cu = (
        call["cache_lengths"].clone(),
        cache["block_table"].clone(),
        call["cu_seqlens"].clone(),
    )
    attention_with_kv_cache(**cache, **call)
    check_cuda()
    assert torch.equal(lengths, call["cache_lengths"]) and torch.equal(cu, call["cu_seqlens"])
    assert_unchanged({"block_table": cache["block_table"]}, {"block_table": table})
