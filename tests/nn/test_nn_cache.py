"""Attention modules, blocks and stacks with a KV cache: chunks equal one pass, and what a cache excludes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ext import DecoderCache, KVCache, PagedKVCache, SlidingKVCache, masks
from attn_ext.nn import (
    MultiHeadAttention,
    PositionalEncoding,
    RotaryEmbedding,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from attn_ext.nn.positional import next_positions

pytestmark = pytest.mark.usefixtures("one_thread", "without_gradients")

D_MODEL, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
KINDS: dict[str, Callable[..., Any]] = {
    "contiguous": KVCache,
    "paged": lambda *a, **k: PagedKVCache(*a, page_size=3, **k),
    "sliding": lambda *a, **k: SlidingKVCache(*a, window=80, **k),  # wider than any text here
}
ROTARY: dict[str, Callable[[], RotaryEmbedding | None]] = {
    "no rotary": lambda: None,
    "half": lambda: RotaryEmbedding(HEAD_DIM, 100.0),
    "interleaved, partly": lambda: RotaryEmbedding(HEAD_DIM, rotary_dim=4, interleaved=True),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_rotary = pytest.mark.parametrize("rotary", ROTARY)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attention(rotary: str = "half", dtype: torch.dtype = torch.float32, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(
        D_MODEL, HEADS, num_kv_heads=KV_HEADS, rotary=ROTARY[rotary](), dtype=dtype, **options
    ).eval()


def new_cache(kind: str = "contiguous", batch: int = 2, **options: Any) -> Any:
    return KINDS[kind](batch, KV_HEADS, HEAD_DIM, **options)


def blocks(*, decoder: bool = False, layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(1)
    make = TransformerDecoder if decoder else TransformerEncoder
    options = {"num_kv_heads": KV_HEADS, "rotary": ROTARY["half"](), **options}
    return make(layers, D_MODEL, HEADS, 48, **options).eval()


def in_chunks(step: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Every row, of x (B, L, d_model) fed in pieces."""
    assert sum(sizes) == x.shape[1]
    return torch.cat([step(part) for part in x.split(list(sizes), dim=1)], dim=1)


def packed(x: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Some tokens of each sequence of x (B, L, d_model), one after the other, and their cu_seqlens."""
    parts = [row[start:end] for row, (start, end) in zip(x, spans, strict=True)]
    return torch.cat(parts), torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)


def snapshot(cache: Any) -> tuple[list[int], list[int]]:
    return cache.lengths.tolist(), cache.k.view(torch.uint8).flatten().tolist()


# ---------------------------------------------------------------------- chunks equal one pass


@each_kind
@each_rotary
@pytest.mark.parametrize("sizes", [(7, 9), (1, 15), (5, 5, 6), (1,) * 16, (16,)], ids=str)
def test_any_chunks_equal_one_causal_pass(kind: str, rotary: str, sizes: tuple[int, ...]) -> None:
    attend, cache, x = attention(rotary), new_cache(kind), torch.randn(2, 16, D_MODEL)
    expected, _ = attend(x, x, x, causal=True)
    found = in_chunks(lambda part: attend(part, part, part, causal=True, cache=cache)[0], x, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert cache.lengths.tolist() == [16, 16]


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_every_dtype_keeps_its_precision(dtype: torch.dtype, atol: float) -> None:
    attend, x = attention(dtype=dtype), torch.randn(2, 69, D_MODEL, dtype=dtype)
    cache = new_cache(dtype=dtype)
    expected, _ = attend(x, x, x, causal=True)
    found = in_chunks(lambda part: attend(part, part, part, causal=True, cache=cache)[0], x, (64, 5))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_attention_itself_has_the_same_bits_in_any_chunks() -> None:
    """The linear maps may round otherwise for another number of rows, so here each row goes through them alone."""
    attend, x = attention("half"), torch.randn(1, 12, D_MODEL)
    whole, steps = new_cache(batch=1), new_cache(batch=1)
    heads = [
        torch.cat([w(x[:, i : i + 1]) for i in range(12)], 1) for w in (attend.w_q, attend.w_k, attend.w_v)
    ]
    q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in heads)
    rotary = {"rotary": attend.rotary.tables(12)}
    expected = whole.attend(q, k, v, **rotary).transpose(1, 2).flatten(-2)
    for i in range(12):
        token = x[:, i : i + 1]
        found, _ = attend(token, token, token, causal=True, cache=steps)
        assert torch.equal(found, attend.w_o(expected[:, i : i + 1])), i


def test_a_chunk_sees_the_cache_and_of_itself_what_came_before() -> None:
    attend = MultiHeadAttention(1, 1, bias=False).eval()
    for linear, weight in zip(
        (attend.w_q, attend.w_k, attend.w_v, attend.w_o), (0.0, 1.0, 1.0, 1.0), strict=True
    ):
        linear.weight.fill_(weight)
    cache = KVCache(1, 1, 1)
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    attend(x[:, :4], x[:, :4], x[:, :4], causal=True, cache=cache)
    found, weights = attend(x[:, 4:], x[:, 4:], x[:, 4:], causal=True, cache=cache)
    assert found.flatten().tolist() == [3.0, 3.5] and weights is None


@pytest.mark.parametrize("capacity", [1, 32])
def test_one_token_steps_keep_the_past_and_read_no_free_slot(capacity: int) -> None:
    attend, cache, x = attention(), new_cache(capacity=capacity), torch.randn(2, 13, D_MODEL)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    expected, _ = attend(x, x, x, causal=True)
    sizes = (5, *[1] * 8)
    found = in_chunks(lambda part: attend(part, part, part, causal="bottom_right", cache=cache)[0], x, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_without_causal_a_chunk_sees_all_that_is_stored() -> None:
    attend, cache, x = attention("no rotary"), new_cache(), torch.randn(2, 9, D_MODEL)
    attend(x[:, :4], x[:, :4], x[:, :4], cache=cache)
    found, _ = attend(x[:, 4:], x[:, 4:], x[:, 4:], cache=cache)
    torch.testing.assert_close(found, attend(x[:, 4:], x, x)[0], rtol=0, atol=1e-5)


def test_a_sliding_cache_hides_what_is_outside_its_window() -> None:
    attend, x = attention(), torch.randn(2, 30, D_MODEL)
    cache = SlidingKVCache(2, KV_HEADS, HEAD_DIM, window=6, capacity=8)
    expected, _ = attend(x, x, x, masks.sliding_window(30, left=5, right=0))
    found = in_chunks(lambda part: attend(part, part, part, causal=True, cache=cache)[0], x, (11, *[1] * 19))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@each_kind
def test_sequences_of_different_lengths_travel_packed(kind: str) -> None:
    attend, cache, x = attention(), new_cache(kind, batch=3), torch.randn(3, 12, D_MODEL)
    expected, _ = attend(x, x, x, causal=True)
    done = [0, 0, 0]
    for counts in ([5, 1, 3], [1, 1, 1], [0, 4, 1], [0, 0, 2]):
        spans = [(a, a + n) for a, n in zip(done, counts, strict=True)]
        tokens, cu_seqlens = packed(x, spans)
        found, _ = attend(tokens, tokens, tokens, causal=True, cache=cache, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(found, packed(expected, spans)[0], rtol=0, atol=1e-5)
        done = [end for _, end in spans]
    assert cache.lengths.tolist() == done


@pytest.mark.parametrize("norm_first", [False, True])
@each_kind
def test_a_stack_in_chunks_equals_one_pass(kind: str, norm_first: bool) -> None:
    stack, x = blocks(norm_first=norm_first), torch.randn(2, 16, D_MODEL)
    caches = [new_cache(kind) for _ in range(2)]
    expected = stack(x, causal=True)
    found = in_chunks(lambda part: stack(part, causal=True, cache=caches), x, (5, 9, 1, 1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    tokens, cu_seqlens = packed(x, [(0, 16), (0, 3)])
    for cache in caches:
        cache.reset()
    found = stack(tokens, causal=True, cache=tuple(caches), cu_seqlens=cu_seqlens)
    torch.testing.assert_close(found[:16], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[16:], expected[1, :3], rtol=0, atol=1e-5)


def test_an_int8_cache_is_near() -> None:
    attend, x = attention(), torch.randn(2, 16, D_MODEL)
    cache = new_cache(quantized=True)
    found = in_chunks(lambda part: attend(part, part, part, causal=True, cache=cache)[0], x, (15, 1))
    difference = (found - attend(x, x, x, causal=True)[0]).abs().max().item()
    assert 0 < difference < 1e-2 and cache.k.dtype == torch.int8


# ---------------------------------------------------------------------- the decoder and its source


def decoder_caches(layers: int = 2, batch: int = 3, kind: str = "contiguous") -> list[DecoderCache]:
    return [DecoderCache(new_cache(kind, batch)) for _ in range(layers)]


HOLES = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "hidden", ["nothing", "lengths", "mask with holes", "both", "one mask for all", "3-D mask"]
)
def test_a_decoder_in_steps_equals_one_pass(hidden: str, norm_first: bool) -> None:
    decoder = blocks(decoder=True, norm_first=norm_first)
    x, memory = torch.randn(3, 9, D_MODEL), torch.randn(3, 7, D_MODEL)
    mask = HOLES[:, None, None] if "mask with" in hidden or hidden == "both" else None
    mask = HOLES[1].view(1, 7) if hidden == "one mask for all" else mask
    mask = HOLES[:, None] if hidden == "3-D mask" else mask
    lengths = torch.tensor([7, 4, 0]) if hidden in ("lengths", "both") else None
    expected = decoder(x, memory, None, mask, encoder_lengths=lengths)
    if hidden != "nothing":
        assert (expected - decoder(x, memory)).abs().max() > 1e-3

    caches, source = decoder_caches(), [memory, mask, lengths]

    def step(part: Tensor) -> Tensor:
        encoder_output, padding_mask, encoder_lengths = source
        source[:] = [None] * 3
        return decoder(
            part, encoder_output, None, padding_mask, encoder_lengths=encoder_lengths, cache=caches
        )

    found = in_chunks(step, x, (2, 1, 5, 1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_source_is_projected_once_and_its_padding_not_at_all() -> None:
    decoder = blocks(decoder=True, layers=1)
    cross, seen = decoder.layers[0].cross_attn, []
    for linear in (cross.w_k, cross.w_v):
        linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:-1].numel()))
    caches, memory = decoder_caches(1), torch.randn(3, 7, D_MODEL)
    memory[~HOLES] = torch.nan  # never read
    decoder(torch.randn(3, 1, D_MODEL), memory, None, HOLES[:, None, None], cache=caches)
    for _ in range(3):
        assert decoder(torch.randn(3, 1, D_MODEL), None, cache=caches).isfinite().all()
    assert seen == [10, 10]
    assert caches[0].source.lengths.tolist() == [7, 3, 0] and caches[0].lengths.tolist() == [4, 4, 4]


def test_targets_of_different_lengths_travel_packed() -> None:
    decoder = blocks(decoder=True)
    x, memory = torch.randn(3, 6, D_MODEL), torch.randn(3, 7, D_MODEL)
    expected = decoder(x, memory)
    caches = decoder_caches()
    for source, spans in ((memory, [(0, 4), (0, 1), (0, 2)]), (None, [(4, 6), (1, 1), (2, 3)])):
        tokens, cu_seqlens = packed(x, spans)
        found = decoder(tokens, source, cache=caches, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(found, packed(expected, spans)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_reordered_decoder_caches_follow_their_sources_and_share_no_future(kind: str) -> None:
    decoder = blocks(decoder=True)
    x, memory = torch.randn(3, 4, D_MODEL), torch.randn(3, 7, D_MODEL)
    lengths, more = torch.tensor([7, 2, 5]), torch.randn(3, 2, D_MODEL)
    caches = decoder_caches(kind=kind)
    decoder(x, memory, encoder_lengths=lengths, cache=caches)
    order = torch.tensor([2, 0, 0])
    for cache in caches:
        cache.reorder(order)
    found = in_chunks(lambda part: decoder(part, None, cache=caches), more, (1, 1))
    whole = torch.cat([x[order], more], dim=1)
    expected = decoder(whole, memory[order], encoder_lengths=lengths[order])[:, 4:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_beams_of_one_source_share_its_memory() -> None:
    decoder, cache = blocks(decoder=True, layers=1), decoder_caches(1, batch=1)
    decoder(torch.randn(1, 1, D_MODEL), torch.randn(1, 64, D_MODEL), cache=cache)
    before = cache[0].source.nbytes
    cache[0].reorder([0] * 8)
    assert cache[0].batch == 8 and cache[0].source.batch == 8 and cache[0].source.nbytes == before
    assert cache[0].nbytes == cache[0].target.nbytes + before


def test_truncate_keeps_the_source_and_reset_forgets_it() -> None:
    decoder, cache = blocks(decoder=True, layers=1), decoder_caches(1)
    x, memory = torch.randn(3, 5, D_MODEL), torch.randn(3, 7, D_MODEL)
    first = decoder(x, memory, cache=cache)
    cache[0].truncate(2)
    assert cache[0].max_length == 2
    again = decoder(x[:, 2:], None, cache=cache)
    torch.testing.assert_close(again, first[:, 2:], rtol=0, atol=1e-5)
    cache[0].reserve(99)
    assert cache[0].target.capacity == 99
    cache[0].reset()
    assert cache[0].source is None and cache[0].max_length == 0
    torch.testing.assert_close(decoder(x, -memory, cache=cache), decoder(x, -memory), rtol=0, atol=1e-5)


def test_a_decoder_refuses_another_source_and_a_missing_one() -> None:
    decoder, cache = blocks(decoder=True, layers=1), decoder_caches(1)
    x, memory = torch.randn(3, 1, D_MODEL), torch.randn(3, 7, D_MODEL)
    with pytest.raises(ValueError, match="a first call with a cache needs encoder_output"):
        decoder(x, None, cache=cache)
    with pytest.raises(ValueError, match=r"expected encoder_output \(3, Lsource, 32\).* got \(2, 7, 32\)"):
        decoder(x, memory[:2], cache=cache)
    for name, arguments in (
        ("encoder_output", {"encoder_output": [1]}),
        ("padding_mask", {"padding_mask": [True]}),
        ("encoder_lengths", {"encoder_lengths": [7, 7, 7]}),
    ):
        with pytest.raises(TypeError, match=f"{name} must be .* got list"):
            decoder(x, **{"encoder_output": memory, **arguments}, cache=cache)
    with pytest.raises(TypeError, match="padding_mask must be bool, got torch.float32"):
        decoder(x, memory, None, torch.zeros(3, 1, 1, 7), cache=cache)
    for shape in ((3, 1, 1, 6), (3, 4, 1, 7), (3, 1, 2, 7), (2, 1, 1, 7), (4, 7), (2, 1, 7)):
        with pytest.raises(ValueError, match=r"padding_mask must be .* \(3, 1, 1, 7\), got"):
            decoder(x, memory, None, torch.ones(shape, dtype=torch.bool), cache=cache)
    with pytest.raises(ValueError, match=r"encoder_lengths must be \(3,\) integers, got \(2,\)"):
        decoder(x, memory, encoder_lengths=torch.tensor([1, 2]), cache=cache)
    with pytest.raises(ValueError, match=r"encoder_lengths must be 0 to 7, got \[1, 8, 2\]"):
        decoder(x, memory, encoder_lengths=torch.tensor([1, 8, 2]), cache=cache)
    with pytest.raises(ValueError, match="mask cannot be given with a cache"):
        decoder(x, memory, torch.ones(1, 1, dtype=torch.bool), cache=cache)
    assert cache[0].source is None and cache[0].max_length == 0  # nothing of all that left a trace

    decoder(x, memory, cache=cache)
    for given in ((memory, None), (None, HOLES[:, None, None])):
        with pytest.raises(ValueError, match="holds the encoder's keys and values already"):
            decoder(x, given[0], None, given[1], cache=cache)
    with pytest.raises(TypeError, match="target must be a KVCache, PagedKVCache or SlidingKVCache, not list"):
        DecoderCache([])  # type: ignore[arg-type]
    assert cache[0].lengths.tolist() == [1, 1, 1]


# ---------------------------------------------------------------------- what a cache excludes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.ones(1, 1, dtype=torch.bool)}, "mask cannot be given with a cache"),
        ({"bias": torch.zeros(1, 1)}, "bias cannot be given with a cache"),
        ({"key_lengths": torch.tensor([1, 1])}, "key_lengths cannot be given with a cache"),
        ({"positions": torch.tensor([0])}, "positions cannot be given with a cache"),
        ({"need_weights": True}, "there are no weights with a cache"),
        ({"causal": "top_left"}, "causal must be False, True or 'bottom_right', got 'top_left'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_that_a_cache_excludes_are_named(options: dict[str, Any], message: str) -> None:
    attend, cache, x = attention(), new_cache(), torch.randn(2, 1, D_MODEL)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        attend(x, x, x, **options, cache=cache)
    assert snapshot(cache) == before


def test_training_is_refused() -> None:
    cache, x = new_cache(), torch.randn(2, 1, D_MODEL)
    attend = attention(dropout=0.1).train()
    with pytest.raises(ValueError, match=r"drops weights \(dropout=0.1\); call eval\(\) first"):
        attend(x, x, x, cache=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match="needs a gradient"):
        attend.eval()(x, x, x, cache=cache)
    assert cache.max_length == 0
    attention(dropout=0.0).train()(x, x, x, cache=cache)  # nothing is dropped
    assert cache.max_length == 1


def test_shapes_that_do_not_fit_are_named() -> None:
    attend, cache, x = attention(), new_cache(), torch.randn(2, 3, D_MODEL)
    cu_seqlens = torch.tensor([0, 1, 3])
    with pytest.raises(
        ValueError, match=r"expected \(B, L, 32\), \(B, L, 32\), \(B, L, 32\), got \(2, 3, 31\)"
    ):
        attend(x[..., 1:], x, x, cache=cache)
    with pytest.raises(ValueError, match=r"expected \(total, 32\), .* got \(2, 3, 32\)"):
        attend(x, x, x, cache=cache, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="k and v must be given together"):
        attend(x, x, None, cache=cache)
    with pytest.raises(ValueError, match="cu_seqlens is for calls with a cache"):
        attend(x[0], x[0], x[0], cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="can be None only where a cache holds keys and values"):
        attend(x, None, None)
    with pytest.raises(TypeError, match="cache's dtype torch.float64"):
        attend(x, x, x, cache=new_cache(dtype=torch.float64))
    with pytest.raises(ValueError, match="KVCache.attend"):
        attend(x, x, x, cache=new_cache(batch=3))
    with pytest.raises(ValueError, match=r"expected \(B, L, 32\), \(B, L, 32\), got \(3, 32\)"):
        attend.store(x[0], x, cache)
    assert cache.max_length == 0


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (torch.tensor([0, 10**8]), ValueError, "must end with the 3 rows of k, not with 100000000"),
        (torch.tensor([0, -1]), ValueError, "must not fall"),
        (torch.tensor([[0, 3]]), ValueError, r"must be \(2,\), .* not \(1, 2\)"),
        (torch.tensor(3), ValueError, r"must be \(2,\), .* not \(\)"),
        (torch.tensor([0.0, 3.0]), TypeError, "must be a tensor of int32 or int64, not torch.float32"),
        ([0, 3], TypeError, "must be a tensor of int32 or int64, not list"),
    ],
    ids=str,
)
@each_kind
def test_boundaries_are_checked_before_rotary_tables_are_made(
    kind: str, cu_seqlens: Any, error: type[Exception], message: str
) -> None:
    attend, cache, x = attention(), new_cache(kind, batch=1), torch.randn(3, D_MODEL)
    before = snapshot(cache)
    with pytest.raises(error, match=f"attend: cu_seqlens {message}"):
        attend(x, x, x, causal=True, cache=cache, cu_seqlens=cu_seqlens)
    with pytest.raises(error, match=f"append: cu_seqlens {message}"):
        attend.store(x, x, cache, cu_seqlens=cu_seqlens)
    assert snapshot(cache) == before


def test_what_is_no_cache_is_named() -> None:
    x, memory = torch.randn(2, 1, D_MODEL), torch.randn(2, 7, D_MODEL)
    for cache, name in (
        ("x", "str"),
        ([new_cache()], "list"),
        (DecoderCache(new_cache()), "DecoderCache"),
    ):
        with pytest.raises(TypeError, match=f"MultiHeadAttention: cache must be a KVCache, .* got {name}"):
            attention()(x, x, x, cache=cache)
        with pytest.raises(TypeError, match=f"MultiHeadAttention: cache must be a KVCache, .* got {name}"):
            attention().store(x, x, cache)
    block = blocks(decoder=True, layers=1).layers[0]
    with pytest.raises(TypeError, match="TransformerDecoderBlock: cache must be a DecoderCache, got KVCache"):
        block(x, memory, cache=new_cache())
    with pytest.raises(TypeError, match="block 1 must be a DecoderCache, got KVCache"):
        blocks(decoder=True)(x, memory, cache=[*decoder_caches(1), new_cache()])
    with pytest.raises(TypeError, match="block 0 must be a KVCache, .* got DecoderCache"):
        blocks()(x, cache=decoder_caches(2))


def test_one_cache_for_two_blocks_is_refused() -> None:
    x, memory = torch.randn(2, 1, D_MODEL), torch.randn(2, 7, D_MODEL)
    cache, target = new_cache(), new_cache()
    with pytest.raises(ValueError, match="TransformerEncoder: .* blocks 0 and 2 got the same one"):
        blocks(layers=3)(x, cache=[cache, new_cache(), cache])
    with pytest.raises(ValueError, match="TransformerDecoder: .* blocks 0 and 1 got the same one"):
        blocks(decoder=True)(x, memory, cache=[DecoderCache(target), DecoderCache(target)])
    assert cache.max_length == target.max_length == 0


def test_a_decoder_can_be_called_again_after_a_later_block_refused() -> None:
    decoder, x, memory = blocks(decoder=True), torch.randn(2, 3, D_MODEL), torch.randn(2, 7, D_MODEL)
    cache = [DecoderCache(new_cache()), DecoderCache(new_cache(max_capacity=2))]
    with pytest.raises(IndexError, match="max_capacity is 2"):
        decoder(x, memory, cache=cache)
    assert [c.source for c in cache] == [None, None]
    cache[0].truncate(0)
    step = decoder(x[:, :2], memory, cache=cache)
    assert torch.equal(step, decoder(x[:, :2], memory, cache=[DecoderCache(new_cache()) for _ in range(2)]))
    sources = [c.source for c in cache]
    with pytest.raises(IndexError, match="max_capacity is 2"):
        decoder(x[:, 2:], None, cache=cache)
    assert [c.source for c in cache] == sources  # those of earlier calls stay


def test_more_tokens_than_there_may_be_room_for_change_nothing() -> None:
    attend, cache, x = attention(), new_cache(max_capacity=4), torch.randn(2, 6, D_MODEL)
    attend(x[:, :3], x[:, :3], x[:, :3], cache=cache)
    before = snapshot(cache)
    with pytest.raises(IndexError, match="2 tokens at position 3 need 5 places"):
        attend(x[:, 3:5], x[:, 3:5], x[:, 3:5], cache=cache)
    assert snapshot(cache) == before
    assert attend(x[:, :0], x[:, :0], x[:, :0], cache=cache)[0].shape == (2, 0, D_MODEL)


@pytest.mark.parametrize("cache", [lambda: new_cache(), lambda: [new_cache()], lambda: [new_cache()] * 3])
def test_a_stack_wants_one_cache_a_block(cache: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match="TransformerEncoder: cache must be a list with one cache for each of 2"
    ):
        blocks()(torch.randn(2, 3, D_MODEL), cache=cache())
    with pytest.raises(
        ValueError, match="TransformerDecoder: cache must be a list with one cache for each of 2"
    ):
        blocks(decoder=True)(torch.randn(2, 3, D_MODEL), None, cache=cache())


def test_weights_still_come_by_default_without_a_cache() -> None:
    attend, x = attention(), torch.randn(2, 3, D_MODEL)
    assert attend(x, x, x)[1].shape == (2, HEADS, 3, 3)
    assert attend(x, x, x, need_weights=False)[1] is None
    assert attend(x, x, x, need_weights=False, cache=new_cache())[1] is None


# ---------------------------------------------------------------------- store


def test_stored_keys_are_attended_to_by_later_queries() -> None:
    attend = attention("no rotary")
    q, source = torch.randn(2, 3, D_MODEL), torch.randn(2, 7, D_MODEL)
    cache = new_cache()
    tokens, cu_seqlens = packed(source, [(0, 7), (0, 2)])
    attend.store(tokens, tokens, cache, cu_seqlens=cu_seqlens)
    found, _ = attend(q, None, None, cache=cache)
    expected, _ = attend(q, source, source, key_lengths=torch.tensor([7, 2]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert cache.lengths.tolist() == [7, 2]


def test_stored_keys_are_turned_by_their_positions() -> None:
    attend, x = attention("half"), torch.randn(2, 7, D_MODEL)
    cache = new_cache()
    attend.store(x[:, :4], x[:, :4], cache)
    attend.store(x[:, 4:], x[:, 4:], cache)
    found, _ = attend(
        x[:, -2:], None, None, causal=True, cache=cache
    )  # the last queries stand at the last positions
    torch.testing.assert_close(found, attend(x, x, x, causal=True)[0][:, -2:], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- rotary tables and positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_are_what_forward_turns_by(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(8, 50.0, rotary_dim=6)
    cos, sin = rotary.tables(70, dtype=dtype)
    assert cos.shape == sin.shape and cos.shape[0] >= 70 and cos.shape[1] == 3 and cos.dtype == dtype
    ones = torch.zeros(1, 1, 70, 8, dtype=dtype)
    ones[..., :3] = 1.0  # the first half of each pair
    turned = rotary(ones)[0, 0]
    assert torch.equal(turned[:, :3], cos[:70]) and torch.equal(turned[:, 3:6], sin[:70])


def test_tables_are_kept_and_grow_by_doubling() -> None:
    rotary = RotaryEmbedding(8)
    first = rotary.tables(3)
    assert rotary.tables(first[0].shape[0])[0] is first[0] and rotary.tables(0)[0] is first[0]
    rows = first[0].shape[0]
    second = rotary.tables(rows + 1)
    assert second[0].shape[0] == 2 * rows and torch.equal(second[0][:rows], first[0])
    assert rotary.tables(1, dtype=torch.float64)[0].dtype == torch.float64
    assert rotary.tables(1)[0] is second[0]
    for length, dtype in ((-1, torch.float32), (3, torch.bfloat16)):
        with pytest.raises(ValueError, match="expected a length of at least 0 and float32 or float64"):
            rotary.tables(length, dtype=dtype)


def test_tables_stay_out_of_the_state_dict_of_copies_and_of_files() -> None:
    attend, cache, x = attention(), new_cache(), torch.randn(2, 5, D_MODEL)
    names = list(attend.state_dict())
    size = len(pickle.dumps(attend))
    attend(x, x, x, causal=True, cache=cache)
    assert attend.rotary._tables and list(attend.state_dict()) == names and len(pickle.dumps(attend)) == size
    file = io.BytesIO()
    torch.save(attend, file)
    file.seek(0)
    copies = (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend)), torch.load(file, weights_only=False))
    expected, _ = attend(x, x, x, causal=True)
    for twin in copies:
        assert not twin.rotary._tables
        torch.testing.assert_close(
            twin(x, x, x, causal=True, cache=new_cache())[0], expected, rtol=0, atol=1e-5
        )


def test_tables_made_in_inference_mode_or_without_data_harm_nobody() -> None:
    rotary = RotaryEmbedding(8)
    with torch._subclasses.FakeTensorMode():
        rotary.tables(4)
    assert not rotary._tables
    with torch.inference_mode():
        rotary.tables(4)
    with torch.enable_grad():
        x = torch.randn(4, 4, requires_grad=True)
        (x * rotary.tables(4)[0][:4]).sum().backward()
    assert torch.equal(x.grad, rotary.tables(4)[0][:4])


def test_next_positions_follow_what_is_there() -> None:
    lengths = torch.tensor([3, 0, 7])
    assert next_positions(lengths, torch.zeros(3, 2)).tolist() == [[3, 4], [0, 1], [7, 8]]
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    assert next_positions(lengths, torch.zeros(5), cu_seqlens).tolist() == [3, 4, 7, 8, 9]


def test_positional_encoding_at_given_positions() -> None:
    encode, x = PositionalEncoding(6, max_len=10), torch.randn(2, 4, 6)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 9]])
    found = encode(x, positions)
    torch.testing.assert_close(found[0], encode(x)[0])
    torch.testing.assert_close(found[1] - x[1], encode.pe[0, [5, 6, 7, 9]])
    assert torch.equal(encode(x[1], positions[1]), found[1])  # packed
    with pytest.raises(ValueError, match=r"got \(2, 4, 6\) and \(4,\)"):
        encode(x, positions[0])


# ---------------------------------------------------------------------- copies


def test_copies_of_a_live_decoder_cache_are_independent() -> None:
    decoder, cache = blocks(decoder=True, layers=1), decoder_caches(1)
    x, memory = torch.randn(3, 3, D_MODEL), torch.randn(3, 7, D_MODEL)
    decoder(x[:, :2], memory, cache=cache)
    copies = (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)))
    expected = decoder(x[:, 2:], None, cache=cache)
    for twin in copies:
        assert twin[0].lengths.tolist() == [2, 2, 2] and "DecoderCache(target=KVCache(" in repr(twin[0])
        assert torch.equal(decoder(x[:, 2:], None, cache=twin), expected)


def test_a_cache_in_a_module_stays_out_of_its_state_dict() -> None:
    block = TransformerEncoderBlock(D_MODEL, HEADS, 48, num_kv_heads=KV_HEADS).eval()
    names = list(block.state_dict())
    block.cache = new_cache()
    block(torch.randn(2, 3, D_MODEL), causal=True, cache=block.cache)
    assert list(block.state_dict()) == names
    assert copy.deepcopy(block).cache.lengths.tolist() == [3, 3]


# ---------------------------------------------------------------------- compiled


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_of_a_stack_is_not_compiled_again(clean_compiler: None, kind: str) -> None:
    stack, x = blocks(norm="rms", activation="swiglu"), torch.randn(2, 20, D_MODEL)
    caches = [new_cache(kind) for _ in range(2)]
    for cache in caches:
        cache.reserve(40)
    expected = stack(x, causal=True)
    stack(x[:, :3], causal=True, cache=caches)
    step = torch.compile(
        lambda x, caches: stack(x, causal=True, cache=caches), fullgraph=True, backend="aot_eager"
    )
    for n in range(3, 20):
        with torch._dynamo.config.patch(error_on_recompile=n > 4):
            found = step(x[:, n : n + 1], caches)
        torch.testing.assert_close(found, expected[:, n : n + 1], rtol=0, atol=1e-5)
    assert caches[1].lengths.tolist() == [20, 20]


def test_a_compiled_step_of_a_decoder_is_not_compiled_again(clean_compiler: None) -> None:
    decoder, cache = blocks(decoder=True, layers=1), decoder_caches(1)
    x, memory = torch.randn(3, 12, D_MODEL), torch.randn(3, 7, D_MODEL)
    cache[0].reserve(20)
    lengths = torch.tensor([7, 3, 1])
    expected = decoder(x, memory, encoder_lengths=lengths)
    decoder(x[:, :2], memory, encoder_lengths=lengths, cache=cache)
    step = torch.compile(lambda x, cache: decoder(x, None, cache=cache), fullgraph=True, backend="aot_eager")
    for n in range(2, 12):
        with torch._dynamo.config.patch(error_on_recompile=n > 3):
            found = step(x[:, n : n + 1], cache)
        torch.testing.assert_close(found, expected[:, n : n + 1], rtol=0, atol=1e-5)


def test_the_decoder_block_alone_takes_a_cache() -> None:
    torch.manual_seed(1)
    block = TransformerDecoderBlock(D_MODEL, HEADS, 48, num_kv_heads=KV_HEADS, causal=False).eval()
    cache = decoder_caches(1, batch=2)[0]
    x, memory = torch.randn(2, 4, D_MODEL), torch.randn(2, 5, D_MODEL)
    found = block(x, memory, cache=cache)  # causal=False: a chunk sees all of itself
    torch.testing.assert_close(found, block(x, memory), rtol=0, atol=1e-5)
