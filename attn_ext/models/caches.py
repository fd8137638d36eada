"""The caches of a whole model, one a layer: made by kind, and checked before anything is written with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import compiling
from ..kv_cache import BaseCache, DecoderCache, KVCache, PagedKVCache, SlidingKVCache
from ..nn.transformer import one_a_layer

__all__ = [
    "KINDS",
    "cache_dtype",
    "expect_fresh",
    "expect_positions",
    "expect_tokens",
    "given_or_new",
    "new_caches",
    "reserve",
]

KINDS = ("contiguous", "paged", "sliding")


def new_caches(
    who: str,
    num_layers: int,
    batch: int,
    capacity: int | None,
    *,
    kind: str,
    max_len: int,
    window: int | None,
    **options: Any,
) -> list[BaseCache]:
    """One empty cache for each layer.

    Args:
        who: the function that was called, for messages.
        num_layers: how many.
        batch: sequences.
        capacity: for so many positions of each sequence there is room to begin with; of a sliding cache, its slots.
        kind: one of `KINDS`.
        max_len: a contiguous cache grows no further.
        window: keys that a query sees, for a sliding cache.
        options: num_kv_heads, head_dim, dtype, quantized, device; page_size for a paged cache.

    Raises:
        ValueError: another kind, a capacity above max_len, no window where one is needed or one where none is.
    """
    if kind not in KINDS:
        raise ValueError(f"{who}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
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


def expect_fresh(who: str, caches: Sequence[BaseCache | DecoderCache], batch: int) -> None:
    """Raises ValueError unless the caches are empty and of `batch` sequences."""
    for layer, cache in enumerate(caches):
        if cache.batch != batch or cache.max_length:
            raise ValueError(
                f"{who}: expected empty caches of {batch} sequences, and that of layer {layer} has {cache.batch} with "
                f"{cache.max_length} tokens in the longest; reset() empties it"
            )


def given_or_new(
    who: str,
    given: Sequence[Any] | str | None,
    num_layers: int,
    batch: int,
    num_beams: int,
    make: Callable[[str], Sequence[Any]],
) -> Sequence[Any]:
    """The caches that a call of generate works with: those given, once they are known to fit, or made of a kind."""
    if given is None or isinstance(given, str):
        return make(_kind_for(num_beams, given))
    one_a_layer(who, given, num_layers)
    expect_fresh(who, given, batch)
    return given


def reserve(who: str, caches: Sequence[BaseCache | DecoderCache], lengths: Sequence[int]) -> None:
    """Makes room for what the sequences will become, so that nothing is refused halfway.

    A pool of blocks grows by itself; only its limit is checked, as if no block were shared.

    Raises:
        IndexError: the caches may not become so large.
    """
    longest = max(lengths, default=0)
    for cache in caches:
        held = cache.target if isinstance(cache, DecoderCache) else cache
        if not isinstance(held, PagedKVCache):
            held.reserve(longest)
        elif held.max_blocks is not None:
            blocks = sum(-(-n // held.page_size) for n in lengths)
            if blocks > held.max_blocks:
                raise IndexError(
                    f"{who}: {len(lengths)} sequences of up to {longest} tokens need {blocks} blocks of "
                    f"{held.page_size}, and the cache may have {held.max_blocks}"
                )


def expect_tokens(
    who: str, tokens: Tensor, cu_seqlens: Tensor | None, cache: BaseCache | DecoderCache
) -> None:
    """Raises ValueError unless tokens are (B, n), or (total,) with cu_seqlens, for the sequences of the cache."""
    batch = cache.batch
    if cu_seqlens is None:
        fits, expected = tokens.dim() == 2 and tokens.shape[0] == batch, f"({batch}, n)"
        found = f"{tuple(tokens.shape)}"
    else:
        fits = tokens.dim() == 1 and tuple(cu_seqlens.shape) == (batch + 1,)
        expected = f"(total,) with cu_seqlens ({batch + 1},)"
        found = f"{tuple(tokens.shape)} with {tuple(cu_seqlens.shape)}"
    if not fits:
        raise ValueError(f"{who}: expected tokens {expected} for caches of {batch} sequences, got {found}")


def expect_positions(
    who: str, tokens: Tensor, cu_seqlens: Tensor | None, cache: BaseCache | DecoderCache, max_len: int
) -> None:
    """Raises ValueError where a sequence would become longer than the model can read (unseen by compiled code)."""
    if compiling() or not cache.batch:
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
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
