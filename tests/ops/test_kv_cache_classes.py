"""`KVCache`, `PagedKVCache`, `SlidingKVCache`: one interface, three ways to keep keys and values."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cache_support import Tokens, full_pass, packed, stacked, tokens
from op_support import assert_same_bits, make
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attn_ext
from attn_ext import KVCache, PagedKVCache, SlidingKVCache
from attn_ext.kv_cache import base
from attn_ext.models import CausalLM

WINDOW = 4
KINDS: dict[str, Callable[..., Any]] = {
    "contiguous": lambda batch=2, **options: KVCache(batch, 2, 8, **{"capacity": 4, **options}),
    "paged": lambda batch=2, **options: PagedKVCache(
        batch, 2, 8, **{"page_size": 3, "num_blocks": 2, **options}
    ),
    "sliding": lambda batch=2, **options: SlidingKVCache(
        batch, 2, 8, **{"window": WINDOW, "capacity": 6, **options}
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def some(lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tokens]:
    return tokens(lengths, dtype, dims=(8, 8), seed=seed)


def contents(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """k and v of each sequence as the memory holds them, (Hkv, L, D); of a ring what the next query may see."""
    found = []
    for b, length in enumerate(cache.lengths.tolist()):
        if isinstance(cache, PagedKVCache):
            blocks, rows = (
                zip(
                    *(
                        (int(cache.block_table[b, p // cache.page_size]), p % cache.page_size)
                        for p in range(length)
                    ),
                    strict=True,
                )
                if length
                else ((), ())
            )
            at = torch.tensor(blocks, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
            found.append(tuple(t[at[0], :, at[1]].transpose(0, 1) for t in (cache.k, cache.v)))
        elif isinstance(cache, SlidingKVCache):
            slots = [p % cache.capacity for p in range(max(0, length - cache.window + 1), length)]
            found.append((cache.k[b][:, slots], cache.v[b][:, slots]))
        else:
            found.append((cache.k[b, :, :length], cache.v[b, :, :length]))
    return found


def assert_holds(cache: Any, expected: list[list[float]]) -> None:
    """The first number of the keys of head 0, token by token (in a ring: the last ones)."""
    for (k, v), numbers in zip(contents(cache), expected, strict=True):
        assert torch.equal(k, v)
        numbers = numbers[max(0, len(numbers) - k.shape[1]) :]
        assert k[0, :, 0].tolist() == numbers


def numbered(rows: list[list[float]]) -> Tensor:
    """Tokens (B, 2, n, 8) that are full of one number each."""
    return torch.tensor(rows)[:, None, :, None].expand(-1, 2, -1, 8).clone()


def append_numbers(cache: Any, rows: list[list[float]]) -> None:
    cache.append(numbered(rows), numbered(rows))


def state(cache: Any) -> dict[str, Any]:
    """Everything a cache consists of, tensors as their bytes."""

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            return str(x.dtype), tuple(x.shape), x.contiguous().view(torch.uint8).numpy().tobytes()
        return tuple(plain(y) for y in x) if isinstance(x, tuple) else copy.deepcopy(x)

    return {name: plain(value) for name, value in vars(cache).items()}


def check(cache: Any, sequences: list[Tokens], chunks: list[list[tuple[int, int]]], **options: Any) -> None:
    """Feeds packed chunks and compares every row with the pass over the whole sequence."""
    expected = [
        full_pass(seq, None, **({"window": (WINDOW - 1, 0)} if isinstance(cache, SlidingKVCache) else {}))
        for seq in sequences
    ]
    for at in chunks:
        (q, k, v), cu = packed(sequences, at)
        out, lse = cache.attend(q, k, v, cu_seqlens=cu, return_lse=True, **options)
        for b, (start, end) in enumerate(at):
            rows = slice(int(cu[b]), int(cu[b + 1]))
            whole_out, whole_lse = expected[b]
            torch.testing.assert_close(out[rows].transpose(0, 1), whole_out[:, start:end], rtol=0, atol=1e-5)
            torch.testing.assert_close(lse[:, rows], whole_lse[:, start:end], rtol=0, atol=1e-5)
    assert cache.lengths.tolist() == [end for _, end in chunks[-1]]


# --------------------------------------------------------------------------------------------- what all share


def test_prompt_chunks_and_tokens_give_the_rows_of_one_pass(kind: str) -> None:
    sequences = some([40, 31])
    chunks = [[(0, 9), (0, 2)], [(9, 10), (2, 3)], [(10, 10), (3, 30)], [(10, 40), (30, 31)]]
    check(KINDS[kind](), sequences, chunks)


def test_a_batch_without_packing_does_too(kind: str) -> None:
    sequences = some([30, 30])
    cache, found = KINDS[kind](), []
    for start, end in ((0, 11), (11, 12), (12, 12), (12, 13), (13, 30)):
        found.append(cache.attend(*stacked(sequences, start, end), return_lse=True))
    window = {"window": (WINDOW - 1, 0)} if kind == "sliding" else {}
    for b, seq in enumerate(sequences):
        out, lse = full_pass(seq, None, **window)
        torch.testing.assert_close(torch.cat([o[b] for o, _ in found], 1), out, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.cat([x[b] for _, x in found], 1), lse, rtol=0, atol=1e-5)
    assert cache.lengths.tolist() == [30, 30] and cache.max_length == 30


def test_appending_and_attending_later_is_the_same(kind: str) -> None:
    one, two = KINDS[kind](), KINDS[kind]()
    for start, end in ((0, 5), (5, 6), (6, 8)):
        q, k, v = stacked(some([8, 8]), start, end)
        two.append(k, v)
        assert_same_bits(two.attend(q), one.attend(q, k, v), kind)
    assert_same_bits(two.k, one.k, kind)


def test_options_reach_the_operator(kind: str) -> None:
    embed = attn_ext.nn.RotaryEmbedding(8)
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    tables = (angle.cos().float(), angle.sin().float())
    options: dict[str, Any] = {
        "scale": 0.7,
        "softcap": 3.0,
        "sinks": torch.linspace(-1, 1, 4),
        "alibi_slopes": torch.linspace(0.1, 0.4, 4),
        "window": (2, 0),
    }
    (seq,) = some([9])
    cache = KINDS[kind](batch=1)
    q, k, v = stacked([seq], 0, 9)
    found = torch.cat(
        [
            cache.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], rotary=tables, **options)
            for a, b in ((0, 7), (7, 8), (8, 9))
        ],
        2,
    )
    turned = Tokens(embed(q)[0], embed(k)[0], seq.v)
    torch.testing.assert_close(found[0], full_pass(turned, None, **options)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_quantized_caches_stay_near_and_take_less_memory(kind: str, dtype: torch.dtype) -> None:
    sequences = some([12, 12], dtype)
    plain, small = KINDS[kind](dtype=dtype), KINDS[kind](dtype=dtype, quantized=True)
    assert small.k.dtype == torch.int8 and small.k_scales.dtype == torch.float32 and plain.k_scales is None
    for start, end in ((0, 3), (3, 4), (4, 12)):
        q, k, v = stacked(sequences, start, end)
        near = small.attend(q, k, v)
        assert near.dtype == dtype
        torch.testing.assert_close(near, plain.attend(q, k, v), rtol=0, atol=0.05)
    assert small.nbytes == small.k.nbytes + small.v.nbytes + small.k_scales.nbytes + small.v_scales.nbytes
    copies = pickle.loads(pickle.dumps(small))
    q, k, v = stacked(some([12, 12], dtype, seed=5), 0, 1)
    assert_same_bits(copies.attend(q, k, v), small.attend(q, k, v), "a copy")


def test_beams_are_reordered_without_sharing_what_is_written(kind: str) -> None:
    cache = KINDS[kind](batch=3)
    append_numbers(cache, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    cache.truncate([2, 2, 1])
    cache.reorder([2, 0, 0])
    assert_holds(cache, [[2.0], [0.0, 0.0], [0.0, 0.0]])
    cache.reorder(torch.tensor([1, 1, 2]))
    assert cache.lengths.tolist() == [2, 2, 2]
    assert_holds(cache, [[0.0, 0.0]] * 3)
    append_numbers(cache, [[5.0], [6.0], [7.0]])
    assert_holds(cache, [[0.0, 0.0, 5.0], [0.0, 0.0, 6.0], [0.0, 0.0, 7.0]])
    cache.reorder([0, 2, 2, -1, 1])
    assert cache.batch == 5
    append_numbers(cache, [[float(n)] for n in range(5)])
    assert_holds(
        cache, [[0.0, 0.0, x, n] for x, n in ((5.0, 0.0), (7.0, 1.0), (7.0, 2.0), (7.0, 3.0), (6.0, 4.0))]
    )
    cache.reorder([])
    assert cache.batch == 0 and cache.lengths.tolist() == []


def test_a_cut_cache_is_one_that_never_saw_what_was_cut(kind: str) -> None:
    sequences, others = some([16, 16]), some([16, 16], seed=50)
    # The ring of the sliding cache must not have lost what the cut makes visible again.
    cache = KINDS[kind](**({"capacity": 16} if kind != "paged" else {}))
    fresh = KINDS[kind](**({"capacity": 16} if kind != "paged" else {}))
    room = cache.capacity
    cache.append(*stacked(sequences, 0, 10)[1:])
    fresh.append(*stacked(sequences, 0, 7)[1:])
    cache.truncate(7)
    assert cache.lengths.tolist() == [7, 7]
    q, k, v = stacked(others, 7, 9)
    assert_same_bits(cache.attend(q, k, v), fresh.attend(q, k, v), "after a cut")
    for (k1, v1), (k2, v2) in zip(contents(cache), contents(fresh), strict=True):
        assert torch.equal(k1, k2) and torch.equal(v1, v2)
    if kind != "paged":
        assert cache.capacity == room
    cache.truncate(torch.tensor([9, 3]))
    assert cache.lengths.tolist() == [9, 3]
    before = state(cache)
    for lengths in (12, [9, 4], -2, [9, -1]):
        with pytest.raises(ValueError, match=r"sequence \d holds \d tokens and cannot be cut to -?\d+"):
            cache.truncate(lengths)
    for lengths in ([9], [9, 3, 3]):
        with pytest.raises(ValueError, match="2 sequences"):
            cache.truncate(lengths)
    for lengths in (1.5, "12", [1.0, 2.0], None, torch.tensor([1.0, 2.0])):
        with pytest.raises(TypeError, match="lengths"):
            cache.truncate(lengths)
    assert state(cache) == before
    cache.truncate(0)
    q, k, v = stacked(sequences, 0, 5)
    assert_same_bits(cache.attend(q, k, v), KINDS[kind]().attend(q, k, v), "after a cut to nothing")


def test_reset_forgets_everything(kind: str) -> None:
    cache = KINDS[kind]()
    q, k, v = stacked(some([16, 16]), 0, 16)
    first = cache.attend(q, k, v)
    cache.reset()
    assert cache.lengths.tolist() == [0, 0] and cache.max_length == 0
    assert_same_bits(cache.attend(q, k, v), first, "the second time")


def test_copies_and_pickles_are_independent(kind: str) -> None:
    sequences = some([20, 20])
    cache = KINDS[kind]()
    cache.append(*stacked(sequences, 0, 5)[1:])
    if kind == "paged":
        cache.share(0, 1)
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        torch.load(buffer, weights_only=False),
    ]
    before = state(cache)
    q, k, v = stacked(sequences, 5, 9)
    found = [c.attend(q, k, v) for c in copies]
    assert state(cache) == before
    expected = cache.attend(q, k, v)
    for out, c in zip(found, copies, strict=True):
        assert_same_bits(out, expected, kind)
        assert repr(c) == repr(cache)


def test_as_an_attribute_of_a_module_it_stays_out_of_the_state_dict(kind: str) -> None:
    module = nn.Linear(2, 2)
    module.cache = KINDS[kind]()
    module.cache.append(*stacked(some([5, 5]), 0, 5)[1:])
    assert set(module.state_dict()) == {"weight", "bias"}
    assert len(list(module.buffers())) == 0 and len(list(module.parameters())) == 2
    other = copy.deepcopy(module)
    other.cache.reset()
    assert module.cache.lengths.tolist() == [5, 5]


def test_it_works_in_and_out_of_inference_mode(kind: str) -> None:
    sequences = some([30, 30])
    expected, cache = KINDS[kind](), None
    for start, end, inside in ((0, 5, True), (5, 9, False), (9, 20, True), (20, 30, False)):
        q, k, v = stacked(sequences, start, end)
        with torch.inference_mode(inside):
            cache = KINDS[kind]() if cache is None else cache
            out = cache.attend(q, k, v)
            if start:  # what was made inside is used outside, before and after it has been made anew
                cache.reorder([0, 1])
        assert_same_bits(out.clone(), expected.attend(q, k, v), kind)
    cache.truncate(28)


def test_inputs_that_need_a_gradient_are_refused(kind: str) -> None:
    cache = KINDS[kind]()
    q, k, v = (x.clone().requires_grad_() for x in stacked(some([30, 30]), 0, 30))
    before = state(cache)
    with pytest.raises(ValueError, match="gradient"):
        cache.attend(q, k, v)
    with pytest.raises(ValueError, match="gradient"):
        cache.append(k, v)
    assert state(cache) == before
    with torch.no_grad():
        cache.attend(q, k, v)


BAD: dict[str, tuple[type[Exception], str, Callable[[Any, Tensor, Tensor, Tensor], Any]]] = {
    "k of another dtype": (TypeError, "float64", lambda c, q, k, v: c.append(k.double(), v)),
    "v of another dtype": (TypeError, "bfloat16", lambda c, q, k, v: c.append(k, v.bfloat16())),
    "no tensor": (TypeError, "list", lambda c, q, k, v: c.append(k.tolist(), v)),
    "another device": (ValueError, "meta", lambda c, q, k, v: c.append(k.to("meta"), v.to("meta"))),
    "k alone": (ValueError, "k and v", lambda c, q, k, v: c.attend(q, k)),
    "other heads": (ValueError, r"\(2, 3, 30, 8\)", lambda c, q, k, v: c.append(*(make((2, 3, 30, 8)),) * 2)),
    "another width": (ValueError, r"\(2, 2, 30, 7\)", lambda c, q, k, v: c.append(k[..., :7], v)),
    "another batch": (ValueError, r"\(1, 2, 30, 8\)", lambda c, q, k, v: c.append(k[:1], v[:1])),
    "other lengths": (ValueError, r"\(2, 2, 29, 8\)", lambda c, q, k, v: c.append(k, v[:, :, 1:])),
    "three dims": (ValueError, r"\(2, 30, 8\)", lambda c, q, k, v: c.append(k[0], v[0])),
    "packed without boundaries": (
        ValueError,
        r"\(3,\)",
        lambda c, q, k, v: c.append(*(make((5, 2, 8)),) * 2, cu_seqlens=torch.tensor([0, 5])),
    ),
    "boundaries that fall": (
        ValueError,
        "fall",
        lambda c, q, k, v: c.append(*(make((5, 2, 8)),) * 2, cu_seqlens=torch.tensor([0, 6, 5])),
    ),
    "boundaries of floats": (
        TypeError,
        "int32 or int64",
        lambda c, q, k, v: c.append(*(make((5, 2, 8)),) * 2, cu_seqlens=torch.tensor([0.0, 2.0, 5.0])),
    ),
    "q of another width": (ValueError, "q", lambda c, q, k, v: c.attend(q[..., :7], k, v)),
    "q of another batch": (ValueError, "q", lambda c, q, k, v: c.attend(q[:1], k, v)),
    "q of another dtype": (TypeError, "float64", lambda c, q, k, v: c.attend(q.double(), k, v)),
    "a bad softcap": (ValueError, "softcap", lambda c, q, k, v: c.attend(q, k, v, softcap=-1.0)),
    "sinks of another shape": (
        ValueError,
        "sinks",
        lambda c, q, k, v: c.attend(q, k, v, sinks=torch.ones(3)),
    ),
    "rotary tables too short": (
        IndexError,
        "rotary",
        lambda c, q, k, v: c.attend(q, k, v, rotary=(torch.ones(31, 4), torch.ones(31, 4))),
    ),
    "a sequence that is not there": (IndexError, "2 sequences", lambda c, q, k, v: c.reorder([0, 2])),
    "indices of floats": (TypeError, "integers", lambda c, q, k, v: c.reorder([0.0, 1.0])),
    "a negative room": (ValueError, "-1", lambda c, q, k, v: c.reserve(-1)),
    "q of one dim": (ValueError, "q", lambda c, q, k, v: c.attend(q[0, 0, 0])),
    "numbers as k and v": (TypeError, "k must be a tensor, not int", lambda c, q, k, v: c.attend(k, 5, 5)),
    "k of two dims": (ValueError, r"\(30, 8\)", lambda c, q, k, v: c.attend(q, k[0, 0], v[0, 0])),
    "boundaries in a list": (
        TypeError,
        "cu_seqlens must be a tensor of int32 or int64, not list",
        lambda c, q, k, v: c.attend(make((5, 4, 8)), cu_seqlens=[0, 2, 5]),
    ),
    "boundaries of two dims": (
        ValueError,
        r"cu_seqlens must .*\(1, 3\)",
        lambda c, q, k, v: c.attend(make((5, 4, 8)), cu_seqlens=torch.tensor([[0, 2, 5]])),
    ),
    "boundaries of no dim": (
        ValueError,
        r"cu_seqlens must .*\(\)",
        lambda c, q, k, v: c.attend(make((5, 4, 8)), cu_seqlens=torch.tensor(5)),
    ),
    "a room of a float": (TypeError, "1.5", lambda c, q, k, v: c.reserve(1.5)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_and_the_cache_is_as_before(kind: str, case: str) -> None:
    error, message, call = BAD[case]
    cache = KINDS[kind]()
    cache.append(*stacked(some([2, 2], seed=9), 0, 2)[1:])
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache, *stacked(some([30, 30]), 0, 30))
    assert state(cache) == before
    cache.attend(*stacked(some([30, 30]), 0, 30))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"batch": -1}, ValueError, "batch"),
        ({"batch": 1.0}, TypeError, "batch"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim"),
        ({"dtype": torch.int8}, TypeError, "dtype"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    kind: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KINDS[kind](**options)


def test_more_than_can_be_addressed_is_refused(kind: str) -> None:
    for options in ({"batch": 2**70}, {"batch": 2**61}):
        with pytest.raises(IndexError, match="more than can be addressed"):
            KINDS[kind](**options)
    if kind != "sliding":  # which needs no room
        cache = KINDS[kind]()
        append_numbers(cache, [[1.0], [2.0]])
        before = state(cache)
        for size in (2**70, 2**60):
            with pytest.raises(IndexError, match="more than can be addressed"):
                cache.reserve(size)
        assert state(cache) == before
    name = "num_blocks" if kind == "paged" else "capacity"
    with pytest.raises(IndexError, match="more than can be addressed"):
        KINDS[kind](**{name: 2**70})


def test_without_data_there_are_sizes_and_no_tokens(kind: str) -> None:
    cache = KINDS[kind](device="meta")
    assert "lengths=unknown" in repr(cache) and cache.nbytes == KINDS[kind]().nbytes
    q, k, v = (x.to("meta") for x in stacked(some([3, 3]), 0, 3))
    calls: list[Callable[[], Any]] = [
        lambda: cache.attend(q, k, v),
        lambda: cache.attend(q),
        lambda: cache.append(k, v),
        lambda: cache.truncate(0),
        lambda: cache.reset(),
        lambda: cache.reorder([0, 0]),
        lambda: cache.max_length,
    ]
    if kind != "sliding":
        calls.append(lambda: cache.reserve(100))
    if kind == "paged":
        calls.append(lambda: cache.share(0, 1))
    for call in calls:
        with pytest.raises(ValueError, match=f"{type(cache).__name__}.* this cache is on the meta device"):
            call()


def test_values_may_be_narrower_than_keys_and_the_description_says_what_is_there(kind: str) -> None:
    cache = KINDS[kind](v_head_dim=6, dtype=torch.float64)
    q, k, v = stacked(tokens([5, 5], torch.float64), 0, 5)
    assert cache.attend(q, k, v).shape == (2, 4, 5, 6)
    text = repr(cache)
    assert text.startswith(type(cache).__name__) and "lengths=[5, 5]" in text and "v_head_dim=6" in text
    assert cache.nbytes == cache.k.nbytes + cache.v.nbytes and cache.device.type == "cpu"


# ------------------------------------------------------------------------------------------------- contiguous


def test_a_full_cache_doubles_and_keeps_what_it_holds() -> None:
    cache = KVCache(1, 2, 8, capacity=4)
    for n in range(9):
        append_numbers(cache, [[float(n)]])
        assert cache.capacity == (4 if n < 4 else 8 if n < 8 else 16)
    assert_holds(cache, [[float(n) for n in range(9)]])
    cache.reserve(3)
    assert cache.capacity == 16
    cache.reserve(33)
    assert cache.capacity == 33
    assert_holds(cache, [[float(n) for n in range(9)]])


def test_no_sequence_outgrows_the_limit_and_the_others_are_left_alone() -> None:
    cache = KVCache(3, 2, 8, max_capacity=8)
    assert cache.capacity == 8
    cache = KVCache(3, 2, 8, capacity=2, max_capacity=8)
    (_, k, v), cu = packed(some([4, 6, 2]), [(0, 4), (0, 6), (0, 2)])
    cache.append(k, v, cu_seqlens=cu)
    before = state(cache)
    q, k, v = stacked(some([3, 3, 3]), 0, 3)
    message = r"sequence 1: 3 tokens at position 6 need 9 places, and max_capacity is 8"
    with pytest.raises(IndexError, match=message):
        cache.append(k, v)
    with pytest.raises(IndexError, match=message):
        cache.attend(q, k, v)
    with pytest.raises(IndexError, match="9.*8"):
        cache.reserve(9)
    assert state(cache) == before
    cache.append(k[:, :, :2], v[:, :, :2])
    assert cache.lengths.tolist() == [6, 8, 4] and cache.capacity == 8
    cache.append(k[:, :, :0], v[:, :, :0])


# ------------------------------------------------------------------------------------------------------ paged


def test_blocks_are_taken_as_tokens_come_and_given_back_as_they_go() -> None:
    cache = PagedKVCache(2, 2, 8, page_size=4, num_blocks=6, max_blocks=6)
    append_numbers(cache, [[0.0] * 5, [1.0] * 5])
    assert cache.free_blocks == 2 and (cache.block_table[:, :2] >= 0).all()
    cache.truncate([4, 0])
    assert cache.free_blocks == 5 and (cache.block_table[1] == -1).all() and cache.block_table[0, 1] == -1
    cache.reset()
    assert cache.free_blocks == 6 and (cache.block_table == -1).all()


def test_when_the_pool_is_used_up_nothing_changes_and_the_message_has_the_numbers() -> None:
    cache = PagedKVCache(2, 2, 8, page_size=4, num_blocks=2, max_blocks=5)
    append_numbers(cache, [[0.0] * 5, [1.0] * 5])
    before = state(cache)
    with pytest.raises(
        IndexError, match=r"sequence 0: 9 tokens at position 5.*4 more.*1 .*0 free.*5 allowed"
    ):
        append_numbers(cache, [[0.0] * 9, [1.0] * 9])
    with pytest.raises(IndexError, match="allowed"):
        cache.reserve(16)
    assert state(cache) == before and cache.num_blocks == 4
    append_numbers(cache, [[0.0] * 3, [1.0] * 3])
    append_numbers(cache, [[], []])
    assert cache.lengths.tolist() == [8, 8]


def test_a_pool_doubles_and_keeps_what_it_holds() -> None:
    cache = PagedKVCache(2, 2, 8, page_size=2, num_blocks=1)
    rows: list[list[float]] = [[], []]
    for n in range(11):
        append_numbers(cache, [[float(n)], [float(-n)]])
        rows[0].append(float(n))
        rows[1].append(float(-n))
    assert_holds(cache, rows)
    assert cache.num_blocks == 16 and cache.free_blocks == 4 and cache.capacity == 12


def test_a_prompt_is_shared_until_somebody_writes() -> None:
    cache = PagedKVCache(3, 2, 8, page_size=4, num_blocks=10)
    prompt = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    append_numbers(cache, [prompt, [9.0] * 6, [9.0] * 6])
    cache.share(0, [1, 2])
    assert cache.lengths.tolist() == [6, 6, 6] and cache.free_blocks == 8
    assert torch.equal(cache.block_table[0], cache.block_table[1])
    before = cache.block_table[0].clone()
    append_numbers(cache, [[10.0], [11.0], [12.0]])
    assert_holds(cache, [prompt + [x] for x in (10.0, 11.0, 12.0)])
    # The full block is still one for all; of the other there are three, and the last to write kept the old one.
    assert len(set(cache.block_table[:, 0].tolist())) == 1 and cache.free_blocks == 6
    assert len(set(cache.block_table[:, 1].tolist())) == 3 and cache.block_table[2, 1] == before[1]
    cache.share(1, 0, length=2)
    assert cache.lengths.tolist() == [2, 7, 7] and cache.free_blocks == 7
    append_numbers(cache, [[20.0], [21.0], [22.0]])
    assert_holds(cache, [[0.0, 1.0, 20.0], prompt + [11.0, 21.0], prompt + [12.0, 22.0]])
    cache.reset()
    assert cache.free_blocks == 10


def test_numpys_integers_name_sequences() -> None:
    cache = PagedKVCache(3, 2, 8, page_size=4)
    append_numbers(cache, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    cache.share(np.int64(0), np.int64(1), np.int64(1))
    assert_holds(cache, [[1.0, 2.0], [1.0], [5.0, 6.0]])


@pytest.mark.parametrize("length", [-3, 9])
def test_lengths_that_a_caller_has_changed_are_named(length: int) -> None:
    cache = PagedKVCache(2, 2, 8, page_size=4)
    append_numbers(cache, [[1.0, 2.0], [3.0, 4.0]])
    cache.lengths[1] = length
    before = state(cache)
    q, k, v = stacked(some([3, 3]), 0, 3)
    for call in (
        lambda: cache.attend(q, k, v),
        lambda: cache.append(k, v),
        lambda: cache.reserve(20),
        lambda: cache.reorder([1, 0]),
        lambda: cache.share(1, 0),
    ):
        with pytest.raises(ValueError, match=f"length of sequence 1 must be 0 to 4, .* set to {length}"):
            call()
    assert state(cache) == before


def test_a_limit_is_known_without_a_list_of_blocks() -> None:
    cache = PagedKVCache(1, 1, 4, max_blocks=4)
    started = time.perf_counter()
    with pytest.raises(IndexError, match="the call needs 62500000 more blocks of 16 tokens, and 4 are left"):
        cache.reserve(10**9)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((0, 0), ValueError, "itself"),
        ((0, [1, -3]), ValueError, "itself"),
        ((0, 3), IndexError, "3 sequences"),
        ((5, 0), IndexError, "3 sequences"),
        ((0, 1, 7), ValueError, "6 tokens, not the 7"),
        ((0, 1, -1), ValueError, "-1"),
        ((0, 1, 2.0), TypeError, "2.0"),
        ((0, 1.0), TypeError, "integers"),
    ],
)
def test_sharing_what_is_not_there_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    cache = PagedKVCache(3, 2, 8, page_size=4)
    append_numbers(cache, [[0.0] * 6] * 3)
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.share(*arguments)
    assert state(cache) == before
    cache.share(0, [])
    assert state(cache) == before


def test_reordering_moves_table_entries_and_no_tokens() -> None:
    cache = PagedKVCache(3, 2, 8, page_size=4, num_blocks=8)
    append_numbers(cache, [[0.0] * 6, [1.0] * 6, [2.0] * 6])
    table, k = cache.block_table.clone(), cache.k
    stored = k.clone()
    cache.reorder([2, 0, 0])
    assert cache.k is k and torch.equal(k, stored)
    assert torch.equal(cache.block_table, table[[2, 0, 0]]) and cache.free_blocks == 4


def test_two_who_are_cut_inside_a_shared_block_do_not_meet() -> None:
    cache = PagedKVCache(2, 2, 8, page_size=4)
    append_numbers(cache, [[0.0, 1.0, 2.0], [9.0] * 3])
    cache.share(0, 1)
    cache.truncate([1, 3])
    append_numbers(cache, [[5.0], [6.0]])
    assert_holds(cache, [[0.0, 5.0], [0.0, 1.0, 2.0, 6.0]])


def test_paged_and_contiguous_give_the_same_bits() -> None:
    sequences = some([70, 70])
    for page in (1, 3, 16):
        paged, plain = PagedKVCache(2, 2, 8, page_size=page), KVCache(2, 2, 8)
        for start, end in ((0, 33), (33, 34), (34, 70)):
            q, k, v = stacked(sequences, start, end)
            assert_same_bits(paged.attend(q, k, v), plain.attend(q, k, v), f"pages of {page}")


# ---------------------------------------------------------------------------------------------------- sliding


@pytest.mark.parametrize("window, capacity", [(1, 1), (1, 5), (4, 4), (4, 5), (4, 9), (4, None)])
def test_a_sliding_cache_is_a_window_over_everything(window: int, capacity: int | None) -> None:
    sequences = some([150, 80])
    cache = SlidingKVCache(2, 2, 8, window=window, capacity=capacity)
    bytes_before, spans = cache.nbytes, [(0, 0), (0, 0)]
    for n, m in ((3, 0), (1, 1), (0, 30), (40, 1), (1, 1), (100, 47), (5, 0)):
        spans = [(spans[0][1], spans[0][1] + n), (spans[1][1], spans[1][1] + m)]
        (q, k, v), cu = packed(sequences, spans)
        out, lse = cache.attend(q, k, v, cu_seqlens=cu, return_lse=True)
        if m:
            again = cache.attend(q[-1:], cu_seqlens=torch.tensor([0, 0, 1]))
            torch.testing.assert_close(again, out[-1:], rtol=0, atol=1e-5)
        for b, (start, end) in enumerate(spans):
            whole = full_pass(Tokens(*(x[:, :end] for x in sequences[b])), None, window=(window - 1, 0))
            rows = slice(int(cu[b]), int(cu[b + 1]))
            torch.testing.assert_close(out[rows].transpose(0, 1), whole[0][:, start:], rtol=0, atol=1e-5)
            torch.testing.assert_close(lse[:, rows], whole[1][:, start:], rtol=0, atol=1e-5)
    assert cache.nbytes == bytes_before and cache.lengths.tolist() == [150, 80]


def test_a_sliding_cache_is_cut_only_as_far_as_its_keys_are_there() -> None:
    cache = SlidingKVCache(2, 2, 8, window=3, capacity=6)
    rows = [[float(n) for n in range(12)], [float(-n) for n in range(12)]]
    append_numbers(cache, rows)
    before = state(cache)
    with pytest.raises(
        ValueError, match=r"sequence 1 of 12 tokens cut to 7.*from position 5 on.*6 slots.*from 6 on"
    ):
        cache.truncate([8, 7])
    assert state(cache) == before
    cache.truncate([12, 8])
    assert_holds(cache, [rows[0], rows[1][:8]])
    append_numbers(cache, [[50.0], [51.0]])
    assert_holds(cache, [rows[0] + [50.0], rows[1][:8] + [51.0]])
    before = state(cache)
    with pytest.raises(ValueError, match="sequence 1 of 9 tokens cut to 7"):  # they do not come back
        cache.truncate([13, 7])
    # The query of the last token sees position 6; one before it would see position 5, which was written over.
    q = make((2, 4, 2, 8))
    cache.attend(q[:, :, :1])
    cache.truncate([13, 8])
    for n, first in ((1, 5), (2, 4)):
        message = f"sequence 1: {n} queries up to position 7.*from position {first} on.*from 6 on"
        with pytest.raises(ValueError, match=message):
            cache.attend(q[:, :, :n])
    cache.truncate(0)
    append_numbers(cache, [[1.0, 2.0], [3.0, 4.0]])
    cache.truncate(1)
    assert_holds(cache, [[1.0], [3.0]])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": False}, "causal"),
        ({"window": (4, 0)}, "window"),
        ({"window": (None, 0)}, "window"),
        ({"window": None, "rotary": (torch.ones(20, 4), torch.zeros(20, 4))}, "rotary"),
        ({"rotary": torch.ones(2, 20, 4)}, "rotary"),
    ],
)
def test_a_sliding_cache_refuses_before_the_first_piece(options: dict[str, Any], message: str) -> None:
    cache = SlidingKVCache(2, 2, 8, window=4, capacity=6)
    before = state(cache)
    q, k, v = stacked(some([30, 30]), 0, 30)
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        cache.attend(q, k, v, **options)
    with pytest.raises(ValueError, match="one query for each"):
        cache.attend(q[:, :, :1], k, v)
    assert state(cache) == before


def test_a_prompt_fills_the_free_slots_of_a_ring_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, operator = [], base.attention_with_kv_cache

    def counting(q: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(q.shape[2])
        return operator(q, *args, **options)

    monkeypatch.setattr(base, "attention_with_kv_cache", counting)
    cache = SlidingKVCache(2, 2, 8, window=4, capacity=12)
    cache.attend(*stacked(some([30, 30]), 0, 2))
    cache.attend(*stacked(some([30, 30]), 2, 30))
    assert sizes == [2, 10, 9, 9]


def test_a_ring_below_its_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the window, 4, not 3"):
        SlidingKVCache(1, 2, 8, window=4, capacity=3)
    SlidingKVCache(1, 2, 8, window=4).reserve(10**9)


# ---------------------------------------------------------------------------------------------- CUDA graphs


class NothingIsRead(TorchFunctionMode):
    """What a captured graph forbids: to look at a number of a tensor, for which the host would wait."""

    FORBIDDEN = frozenset(
        {
            "tolist",
            "item",
            "numpy",
            "cpu",
            "nonzero",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "equal",
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in self.FORBIDDEN, f"{name} of a tensor"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Has the package believe that a graph is captured, and sees to it that nothing is read then."""

    @contextmanager
    def capture() -> Iterator[None]:
        with monkeypatch.context() as patch, NothingIsRead():
            patch.setattr(attn_ext._arguments, "capturing", lambda device: True)
            yield

    return capture


def test_a_step_in_a_graph_reads_nothing(kind: str, captured: Any) -> None:
    cache = KINDS[kind]()
    cache.append(*stacked(some([3, 3]), 0, 3)[1:])
    cache.reserve(30)
    expected = copy.deepcopy(cache)
    sequences = some([30, 30], seed=3)
    for n in range(20):
        q, k, v = stacked(sequences, n, n + 1)
        with captured():
            if n % 2:
                cache.append(k, v)
            else:
                out = cache.attend(q, k, v)
        if n % 2:
            expected.append(k, v)
        else:
            assert_same_bits(out, expected.attend(q, k, v), f"token {n}")
    assert_same_bits(cache.k, expected.k, "k")
    assert cache.lengths.tolist() == [23, 23]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_step_of_a_model_in_a_graph_reads_nothing(kind: str, positions: str, captured: Any) -> None:
    model = CausalLM(11, 16, 2, 32, num_layers=2, max_len=64, positions=positions).eval()
    window = {"window": 5} if kind == "sliding" else {}
    caches, expected = (model.new_cache(2, kind=kind, **window) for _ in range(2))
    for cache in caches:
        cache.reserve(64)
    ids = torch.arange(20).remainder(11).view(2, 10)
    with torch.no_grad():
        for n in range(10):
            with captured():
                logits = model(ids[:, n : n + 1], cache=caches)
            assert_same_bits(logits, model(ids[:, n : n + 1], cache=expected), f"token {n}")


# --------------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("quantized", [False, True])
def test_a_compiled_step_has_no_breaks_and_is_not_compiled_again(
    clean_compiler: None, kind: str, quantized: bool
) -> None:
    cache = KINDS[kind](quantized=quantized)
    cache.append(*stacked(some([3, 3]), 0, 3)[1:])
    cache.reserve(30)
    expected, lengths = copy.deepcopy(cache), cache.lengths

    def step(cache: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cache.attend(q, k, v, softcap=5.0)

    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    sequences = some([30, 30], seed=3)
    for n in range(20):
        q, k, v = stacked(sequences, n, n + 1)
        with torch._dynamo.config.patch(error_on_recompile=n > 1):
            out = fast(cache, q, k, v)
        assert_same_bits(out, expected.attend(q, k, v, softcap=5.0), f"token {n}")
    assert cache.lengths is lengths  # moved along in place
    assert cache.lengths.tolist() == [23, 23] and torch.equal(cache.k, expected.k)
    assert torch.equal(cache.v, expected.v)


def test_a_compiled_step_past_what_is_reserved_is_refused_and_writes_nothing(
    clean_compiler: None, kind: str
) -> None:
    if kind == "sliding":
        limit = 40  # a ring is never full
    else:
        limit = 6
    cache = KINDS[kind](**({"capacity": 6} if kind != "paged" else {}))
    cache.reserve(6)
    fast = torch.compile(lambda c, q, k, v: c.attend(q, k, v), fullgraph=True, backend="aot_eager")
    sequences = some([40, 40])
    for n in range(limit):
        fast(cache, *stacked(sequences, n, n + 1))
    if kind != "sliding":
        before = state(cache)
        with pytest.raises(IndexError, match="sequence 0"):
            fast(cache, *stacked(sequences, 6, 7))
        assert state(cache) == before
    assert cache.lengths.tolist() == [limit, limit]


def test_compiled_code_does_not_write_to_shared_blocks(clean_compiler: None) -> None:
    cache = PagedKVCache(2, 2, 8, page_size=4)
    append_numbers(cache, [[0.0, 1.0], [9.0, 9.0]])
    cache.share(0, 1)
    fast = torch.compile(lambda c, k: c.append(k, k), fullgraph=True, backend="aot_eager")
    before = state(cache)
    with pytest.raises(Exception, match=r"reserve\(\)"):
        fast(cache, numbered([[5.0], [6.0]]))
    assert state(cache) == before
    cache.reserve(3)
    fast(cache, numbered([[5.0], [6.0]]))
    assert_holds(cache, [[0.0, 1.0, 5.0], [0.0, 1.0, 6.0]])
