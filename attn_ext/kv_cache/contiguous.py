"""The plain cache: one row of memory a sequence, which doubles when it is full."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from attn_ext.kv_cache.base import BaseCache, Room, Storage

__all__ = ["KVCache"]


class KVCache(BaseCache):
    """Keys and values of a batch of sequences, each in one row of memory.

        cache = attn_ext.KVCache(batch=1, num_kv_heads=2, head_dim=64)
        out = cache.attend(q, k, v)      # the prompt: q (1, Hq, n, 64), k and v (1, 2, n, 64)
        out = cache.attend(q1, k1, v1)   # each further token: q1 (1, Hq, 1, 64), …

    A token costs its own size; memory doubles when a sequence outgrows it, up to `max_capacity`.

    Args:
        batch: B, number of sequences. They may have different lengths.
        num_kv_heads: Hkv.
        head_dim: D of the keys.
        v_head_dim: Dv of the values, D where not given.
        capacity: room for so many positions to begin with (at most max_capacity).
        max_capacity: no sequence may become longer; None is no limit.
        dtype: float32, bfloat16, float16 or float64, of q, k and v.
        quantized: store int8 with one float32 scale a token and head: a quarter of float32, at about 0.4 % of the
            largest number of each token as error.
        device: where; the CPU where not given.

    Raises:
        TypeError: sizes that are no integers, another dtype.
        ValueError: sizes below 1 (batch: below 0).
        IndexError: sizes that together are more than can be addressed.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        capacity: int = 64,
        max_capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        quantized: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            batch,
            num_kv_heads,
            head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            quantized=quantized,
            device=device,
        )
        capacity = self._size("capacity", capacity)
        self.max_capacity = None if max_capacity is None else self._size("max_capacity", max_capacity)
        if self.max_capacity is not None:
            capacity = min(capacity, self.max_capacity)
        self._storage = self._allocate(self.batch, capacity)

    @property
    def capacity(self) -> int:
        """How many positions every sequence has room for before memory has to grow."""
        return self._storage.k.shape[2]

    def reserve(self, capacity: int) -> None:
        """Make room for so many positions in every sequence, in all. What is there already stays.

        Raises:
            IndexError: more than max_capacity, or than can be addressed.
            TypeError, ValueError: no integer, or a negative one; a cache on the meta device.
        """
        self._expect_data(self._op("reserve"))
        capacity = self._size("capacity", capacity, at_least=0)
        if self.max_capacity is not None and capacity > self.max_capacity:
            raise IndexError(
                f"attn_ext.{self._op('reserve')}: {capacity} places are more than max_capacity, {self.max_capacity}"
            )
        if capacity > self.capacity:
            self._storage = self._grown(capacity)

    def _room_for(self, op: str, counts: Sequence[int] | None) -> Room:
        if counts is None or not any(counts):
            return Room(self._storage)
        lengths = self.lengths.tolist()
        needed = max(map(operator.add, lengths, counts))
        if needed <= self.capacity:
            return Room(self._storage)
        for b, (n, length) in enumerate(zip(counts, lengths, strict=True)):
            if self.max_capacity is not None and length + n > self.max_capacity:
                raise IndexError(
                    f"attn_ext.{op}: sequence {b}: {n} tokens at position {length} need {length + n} places, "
                    f"and max_capacity is {self.max_capacity}"
                )
        grown = max(needed, 2 * self.capacity)
        return Room(self._grown(grown if self.max_capacity is None else min(grown, self.max_capacity)))

    def _grown(self, capacity: int) -> Storage:
        storage, filled = self._allocate(self.batch, capacity), self.max_length
        for new, old in zip(storage.data, self._storage.data, strict=True):
            new[:, :, :filled] = old[:, :, :filled]
        return storage

    def _extra_repr(self) -> str:
        limit = "" if self.max_capacity is None else f", max_capacity={self.max_capacity}"
        return f"capacity={self.capacity}{limit}"
