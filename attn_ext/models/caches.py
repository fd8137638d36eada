"""The caches of a whole model, one a layer: made by kind, and checked before anything is written with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import check_boundaries, integer_tensor, out_of_reach
from ..kv_cache import BaseCache, DecoderCache, KVCache, PagedKVCache, SlidingKVCache
from ..nn import MultiHeadAttention
from ..nn.transformer import one_a_layer

__all__ = [
    "KINDS",
    "cache_dtype",
    "expect_caches",
    "expect_fresh",
    "expect_positions",
    "given_or_new",
    "new_caches",
    "reserve",
]

KINDS = ("contiguous", "paged", "sliding")
_WITHOUT_WINDOW = KINDS[:2]  # what generate makes by name: it takes no window


def new_caches(
    who: str,
    num_layers: int,
    batch: int,
    capacity: int | None,
    *,
    kind: str,
    kinds: Sequence[str] = KINDS,
    max_len: int,
    window: int | None = None,
    **options: Any,
) -> list[BaseCache]:
    """One empty cache for each layer.

    Args:
        who: the function that was called, for messages.
        num_layers: how many.
        batch: sequences.
        capacity: for so many positions of each sequence there is room to begin with; of a sliding cache, its slots.
        kind: one of `kinds`.
        kinds: those that the model has.
        max_len: a contiguous cache grows no further.
        window: keys that a query sees, for a sliding cache.
        options: num_kv_heads, head_dim, dtype, quantized, device; page_size for a paged cache.

    Raises:
        ValueError: another kind, a capacity above max_len, no window where one is needed or one where none is.
    """
    if kind not in kinds:
        raise ValueError(f"{who}: kind must be one of {', '.join(kinds)}, got {kind!r}")
    if (window is not None) != (kind == "sliding"):
        raise ValueError(
            f"{who}: a sliding cache needs a window, and no other has one; got kind={kind!r}, window={window}"
        )
    if capacity is not None and kind != "sliding" and capacity > max_len:
        raise ValueError(f"{who}: capacity must be at most max_len = {max_len}, got {capacity}")
    page_size = options.pop("page_size")
    if kind == "contiguous":
        options |= {"capacity": min(64, max_len) if capacity is None else capacity, "max_capacity": max_len}
        return [KVCache(batch, **options) for _ in range(num_layers)]
    if kind == "sliding":
        return [SlidingKVCache(batch, **options, window=window, capacity=capacity) for _ in range(num_layers)]
    blocks = None if capacity is None else max(1, batch * -(-capacity // page_size))
    return [PagedKVCache(batch, **options, page_size=page_size, num_blocks=blocks) for _ in range(num_layers)]


def _kind_for(num_beams: int, kind: str | None) -> str:
    """The kind that was asked for; otherwise beams get blocks, which they share instead of copying."""
    return kind or ("paged" if num_beams > 1 else "contiguous")


def expect_fresh(
    who: str,
    caches: Sequence[BaseCache | DecoderCache],
    batch: int,
    attentions: Sequence[MultiHeadAttention],
) -> None:
    """Looks at all caches before a layer writes to the first one.

    Raises:
        ValueError: caches that are not empty, not of `batch` sequences, or not made for the heads or the device of
            their layer.
        TypeError: caches of another dtype than the layer's keys and values.
    """
    for layer, (cache, attention) in enumerate(zip(caches, attentions, strict=True)):
        held = cache.target if isinstance(cache, DecoderCache) else cache
        read = isinstance(cache, DecoderCache) and cache.source is not None
        if held.batch != batch or held.max_length or read:
            source = " and a source" if read else ""
            raise ValueError(
                f"{who}: expected empty caches of {batch} sequences, and that of layer {layer} has {held.batch} with "
                f"{held.max_length} tokens in the longest{source}; reset() empties it"
            )
        if not isinstance(held, BaseCache):
            continue  # one with the same interface, which knows itself what it takes
        weight = attention.w_k.weight
        expected = (attention.num_kv_heads, attention.d_k, attention.d_k)
        found = (held.num_kv_heads, held.head_dim, held.v_head_dim)
        if found != expected:
            raise ValueError(
                f"{who}: the cache of layer {layer} must have num_kv_heads, head_dim and v_head_dim {expected}, "
                f"got {found}"
            )
        if held.device != weight.device:
            raise ValueError(
                f"{who}: the cache of layer {layer} must be on {weight.device}, where the layer is, got {held.device}"
            )
        if held.dtype != cache_dtype(weight):
            raise TypeError(
                f"{who}: the cache of layer {layer} must have the dtype {cache_dtype(weight)}, got {held.dtype}"
            )


def given_or_new(
    who: str,
    given: Sequence[Any] | str | None,
    attentions: Sequence[MultiHeadAttention],
    batch: int,
    num_beams: int,
    make: Callable[[str], Sequence[Any]],
    of: type[BaseCache] | type[DecoderCache],
) -> Sequence[Any]:
    """The caches that a call of generate works with: those given, once they are known to fit, or made of a kind."""
    if given is not None and not isinstance(given, str):
        one_a_layer(who, given, len(attentions), of)
        expect_fresh(who, given, batch, attentions)
        return given
    if given not in (None, *_WITHOUT_WINDOW):
        raise ValueError(
            f"{who}: cache must be one of {', '.join(_WITHOUT_WINDOW)}, or the caches that new_cache makes, "
            f"got {given!r}"
        )
    return make(_kind_for(num_beams, given))


def reserve(
    who: str,
    caches: Sequence[BaseCache | DecoderCache],
    lengths: Sequence[int],
    prompts: Sequence[int],
    num_beams: int,
) -> None:
    """Makes room for what the sequences will become, so that nothing is refused halfway.

    A pool of blocks grows by itself; only its limit is checked: the beams of a sequence share the blocks that its
    prompt fills, and may have all others for themselves.

    Args:
        lengths: what each sequence may become.
        prompts: tokens that each begins with.

    Raises:
        IndexError: the caches may not become so large.
    """
    longest = max(lengths, default=0)
    for cache in caches:
        held = cache.target if isinstance(cache, DecoderCache) else cache
        if isinstance(held, PagedKVCache) and held.max_blocks is not None:
            page, blocks = held.page_size, 0
            for n, prompt in zip(lengths, prompts, strict=True):
                blocks += prompt // page + num_beams * (-(-n // page) - prompt // page)
            if blocks > held.max_blocks:
                raise IndexError(
                    f"{who}: {len(lengths) * num_beams} sequences of up to {longest} tokens need {blocks} blocks of "
                    f"{page}, and the cache may have {held.max_blocks}"
                )
    for cache in caches:
        held = cache.target if isinstance(cache, DecoderCache) else cache
        if not isinstance(held, PagedKVCache):
            held.reserve(longest)


def expect_caches(
    who: str,
    caches: Any,
    num_layers: int,
    of: type[BaseCache] | type[DecoderCache],
    tokens: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Looks at what comes with a step, before a layer writes to its cache.

    Raises:
        TypeError: caches of another kind than `of`, cu_seqlens that are no tensor of integers.
        ValueError: not one cache a layer, or layers that stand at different positions; tokens that are not (B, n), or
            (total,) with cu_seqlens, for the sequences of the caches.
    """
    one_a_layer(who, caches, num_layers, of)
    _expect_tokens(who, tokens, cu_seqlens, caches[0].batch)
    _expect_one_length(who, caches)


def _expect_tokens(who: str, tokens: Tensor, cu_seqlens: Tensor | None, batch: int) -> None:
    if cu_seqlens is not None:
        integer_tensor(who, "cu_seqlens", cu_seqlens)
    if cu_seqlens is None:
        fits, expected = tokens.dim() == 2 and tokens.shape[0] == batch, f"({batch}, n)"
        found = f"{tuple(tokens.shape)}"
    else:
        fits = tokens.dim() == 1 and tuple(cu_seqlens.shape) == (batch + 1,)
        expected = f"(total,) with cu_seqlens ({batch + 1},)"
        found = f"{tuple(tokens.shape)} with {tuple(cu_seqlens.shape)}"
    if not fits:
        raise ValueError(f"{who}: expected tokens {expected} for caches of {batch} sequences, got {found}")
    if cu_seqlens is not None and not out_of_reach(cu_seqlens.device):
        check_boundaries(who, "cu_seqlens", cu_seqlens.tolist(), "tokens", tokens.shape[0])


def _expect_one_length(who: str, caches: Sequence[BaseCache | DecoderCache]) -> None:
    """All layers must stand at the same positions (unseen by compiled code and CUDA graphs)."""
    if out_of_reach(caches[0].lengths.device):
        return
    first = caches[0].lengths
    if first.is_meta:
        raise ValueError(f"{who}: the caches are on the meta device, where there are sizes and no data")
    for layer, cache in enumerate(caches):
        lengths = cache.lengths
        if lengths is not first and not torch.equal(lengths, first):
            raise ValueError(
                f"{who}: the caches of all layers must hold as many tokens, and that of layer 0 has "
                f"{first.tolist()}, that of layer {layer} {lengths.tolist()}"
            )


def expect_positions(
    who: str, tokens: Tensor, cu_seqlens: Tensor | None, cache: BaseCache | DecoderCache, max_len: int
) -> None:
    """Raises ValueError where a sequence would become longer than the model can read (unseen where nothing is read)."""
    if out_of_reach(cache.lengths.device) or not cache.batch:
        return
    after = cache.lengths + (tokens.shape[1] if cu_seqlens is None else cu_seqlens.diff())
    if int(after.max()) > max_len:
        row = int(after.argmax())
        held, needed = int(cache.lengths[row]), int(after[row])
        raise ValueError(
            f"{who}: sequence {row}: {needed - held} tokens at position {held} need {needed} positions, "
            f"and max_len is {max_len}"
        )


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Of the keys and values that a model with such weights makes: autocast's where it is on."""
    kind = weight.device.type
    casts = kind != "meta" and weight.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else weight.dtype
