"""The caches of a whole model, one a layer: made by kind, and checked before anything is written with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kv_cache import BaseCache, DecoderCache, KVCache, PagedKVCache, SlidingKVCache

__all__ = ["KINDS", "expect_fresh", "new_caches", "reserve"]

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


def expect_fresh(who: str, caches: Sequence[BaseCache | DecoderCache], batch: int) -> None:
    """Raises ValueError unless the caches are empty and of `batch` sequences."""
    for layer, cache in enumerate(caches):
        if cache.batch != batch or cache.max_length:
            raise ValueError(
                f"{who}: expected empty caches of {batch} sequences, and that of layer {layer} has {cache.batch} with "
                f"{cache.max_length} tokens in the longest; reset() empties it"
            )


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


def cache_dtype(weight: torch.Tensor) -> torch.dtype:
    """Of the keys and values that a model with such weights makes: autocast's where it is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
