"""A cache for a sliding window: a ring, in which new tokens take the places of those that no query sees any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ext._arguments import expect_tensor, out_of_reach, read_window
from attn_ext.kv_cache.base import BaseCache, Room, packed_counts, selected

__all__ = ["SlidingKVCache"]

_SLACK = 64


class SlidingKVCache(BaseCache):
    """Keys and values of the last tokens of each sequence, for layers whose queries see `window` keys.

    Position p stands in slot p % capacity, so memory stays what it is however long the sequences become. Lengths and
    positions go on counting. A chunk that would push out keys which its own first queries see is fed in pieces.

    Args:
        batch, num_kv_heads, head_dim, v_head_dim, dtype, quantized, device: as in `KVCache`.
        window: how many keys a query sees, itself included: what is (window − 1, 0) in `attn_ext.attention`.
        capacity: slots a sequence, at least `window`; window + 64 where not given. Of a full ring capacity − window + 1
            tokens make one piece, and as many can be taken back by `truncate`.

    Attributes:
        window: as given.

    Raises:
        TypeError: sizes that are no integers, another dtype.
        ValueError: sizes below 1 (batch: below 0), a capacity below the window.
        IndexError: sizes that together are more than can be addressed.
    """

    _ring = True

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        capacity: int | None = None,
        v_head_dim: int | None = None,
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
        self.window = self._size("window", window)
        capacity = self.window + _SLACK if capacity is None else self._size("capacity", capacity)
        if capacity < self.window:
            raise ValueError(
                f"attn_ext.{type(self).__name__}: capacity must be at least the window, {self.window}, not {capacity}"
            )
        self._storage = self._allocate(self.batch, capacity)
        with torch.inference_mode(False):
            # The first position of each sequence that nothing has been written over.
            self._first_held = torch.zeros_like(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots of each sequence."""
        return self._storage.k.shape[2]

    def attend(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Store k and v where given, then attend to the window of each query.

        Args:
            q, k, v, cu_seqlens, rotary, return_lse: as in `BaseCache.attend`.
            causal: True; a window that ends at the query itself has no other form.
            window: a narrower one than the cache's, (left, right) with left < window; its own where not given.
            **options: scale, softcap, alibi_slopes, sinks, rotary_interleaved, as there.

        Returns:
            As `BaseCache.attend`.

        Raises:
            IndexError, ValueError, TypeError: as `BaseCache.attend`; ValueError also where a query would see a key that
            is not there any more. The cache is then as it was before.
        """
        op = self._op("attend")
        self._expect_data(op)
        if causal is not True:
            raise ValueError(f"attn_ext.{op}: a sliding window is causal, so causal cannot be {causal!r}")
        left, right = (self.window - 1, 0) if window is None else read_window(op, window)
        if left is None or left >= self.window:
            raise ValueError(
                f"attn_ext.{op}: queries see {self.window} keys at most, so window must be (left, right) with left "
                f"below {self.window}, not {window}"
            )
        rest = {"window": (left, right), "return_lse": return_lse, "rotary": rotary, **options}
        sizes = self._piece_sizes(op, k, v, cu_seqlens, left)
        if k is None or v is None or len(sizes) <= 1:
            self._expect_held(op, q, k, cu_seqlens, left)
            return super().attend(q, k, v, cu_seqlens=cu_seqlens, **rest)

        tokens = 0 if cu_seqlens is not None else -2  # the dim of q, k, v and out that is cut
        expect_tensor(op, "q", q)
        if q.dim() != k.dim() or q.shape[tokens] != k.shape[tokens]:
            raise ValueError(
                f"attn_ext.{op}: a chunk that is fed in pieces needs one query for each new token, "
                f"not q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        if rotary is not None and not out_of_reach(self.device):
            self._expect_rotary_rows(op, self._count(op, k, v, cu_seqlens) or [], rotary)
        found, order = [], []
        for rows, cu in _pieces(sizes, cu_seqlens, q.device):
            piece = (x.index_select(tokens, rows) for x in (q, k, v))
            result = super().attend(*piece, cu_seqlens=cu, **rest)
            found.append(result if return_lse else (result,))
            order.append(rows)
        where = torch.cat(order)
        whole = [
            torch.cat(parts, dim).index_select(dim, where.argsort())
            for parts, dim in zip(zip(*found, strict=True), (tokens, -1), strict=False)
        ]
        return tuple(whole) if return_lse else whole[0]

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """As `BaseCache.reorder`; copies share no memory."""
        op = self._op("reorder")
        self._expect_data(op)
        chosen = self._read_sequences(op, indices)
        super().reorder(chosen)
        self._first_held = selected(self._first_held, chosen)

    def reserve(self, capacity: int) -> None:
        """Nothing has to be reserved: a ring has room for any number of tokens.

        Raises:
            TypeError, ValueError: no integer, or a negative one.
        """
        self._size("capacity", capacity, at_least=0)

    # --- a chunk in pieces ----------------------------------------------------------------------------------------

    def _piece_sizes(self, op: str, k: Any, v: Any, cu_seqlens: Tensor | None, left: int) -> list[int]:
        """How many tokens of each sequence go into each piece: first what fills free slots, then left + n = capacity.

        Where no number can be read (compiled code, CUDA graphs) packed sequences make one piece, which the operator
        refuses if it is too long.
        """
        if v is None or not isinstance(k, Tensor) or k.dim() < 3:
            return []  # nothing, or what will be refused
        most, at_once = k.shape[-2 if cu_seqlens is None else 0], self.capacity - left
        if most <= at_once or (out_of_reach(self.device) and cu_seqlens is not None):
            return [most]
        sizes = []
        counts = self._count(op, k, v, cu_seqlens)
        if counts is not None:
            most, filling = max(counts, default=0), self.capacity - self.max_length
            sizes = [min(filling, most)] if filling > at_once else []
        while sum(sizes) < most:
            sizes.append(min(at_once, most - sum(sizes)))
        return sizes

    def _expect_rotary_rows(self, op: str, counts: Sequence[int], rotary: Any) -> None:
        """Raises IndexError where the tables would not suffice for the last piece: no piece is to be stored then."""
        if not (isinstance(rotary, (tuple, list)) and all(isinstance(t, Tensor) and t.dim() for t in rotary)):
            return  # the operator says what is wrong before the first piece is stored
        rows = min(t.shape[0] for t in rotary)
        for b, (n, length) in enumerate(zip(counts, self.lengths.tolist(), strict=True)):
            if n and length + n > rows:
                raise IndexError(
                    f"attn_ext.{op}: sequence {b}: {n} tokens at position {length} need {length + n} rows in the "
                    f"rotary tables, which have {rows}"
                )

    # --- what is still there --------------------------------------------------------------------------------------

    def _expect_held(
        self, op: str, q: Tensor, k: Tensor | None, cu_seqlens: Tensor | None, left: int
    ) -> None:
        """Raises ValueError where a query of an earlier token would see a key that was written over before a cut.

        Queries of new tokens cannot: `truncate` sees to that. What a ring never holds, the operator refuses.
        """
        expect_tensor(op, "q", q)
        rank = 4 if cu_seqlens is None else 3
        if q.dim() != rank or (k is not None and not (isinstance(k, Tensor) and k.dim() == rank)):
            return  # what is not right will be refused with the other arguments
        if k is not None and (cu_seqlens is not None or q.shape[2] <= k.shape[2]):
            return
        if out_of_reach(self.device):
            raise ValueError(
                f"attn_ext.{op}: compiled code and CUDA graphs cannot know what a query of an earlier token would "
                f"still find; give k and v with q, as many tokens of each"
            )
        n = 0 if k is None else k.shape[2]
        if cu_seqlens is None:
            queries = [q.shape[2]] * self.batch
        else:
            queries = packed_counts(op, cu_seqlens, self.batch, "q", q.shape[0])
        state = zip(queries, self.lengths.tolist(), self._first_held.tolist(), strict=False)
        for b, (Lq, length, held) in enumerate(state):
            first = max(0, length + n - Lq - left)
            if Lq and first < held:
                raise ValueError(
                    f"attn_ext.{op}: sequence {b}: {Lq} queries up to position {length + n - 1} see keys from position "
                    f"{first} on, and the {self.capacity} slots hold them from {held} on"
                )

    def _forget(self, op: str, kept: Sequence[int]) -> None:
        held, lengths = self._first_held.tolist(), self.lengths.tolist()
        for b, n in enumerate(kept):
            first = max(0, n - self.window + 1)  # of the keys that the next query will see
            if n < lengths[b] and first < min(held[b], n):
                raise ValueError(
                    f"attn_ext.{op}: sequence {b} of {lengths[b]} tokens cut to {n}: the query at position {n} sees "
                    f"keys from position {first} on, and the {self.capacity} slots hold them from {held[b]} on"
                )
        self._first_held.clamp_(max=torch.tensor(kept, dtype=torch.int64, device=self.device))

    def _advance(self, k: Tensor, cu_seqlens: Tensor | None) -> None:
        super()._advance(k, cu_seqlens)
        self._first_held.copy_(torch.maximum(self._first_held, self.lengths - self.capacity))

    def _room_for(self, op: str, counts: Sequence[int] | None) -> Room:
        return Room(self._storage)

    def _extra_repr(self) -> str:
        return f"window={self.window}, capacity={self.capacity}"


def _pieces(
    sizes: Sequence[int], cu_seqlens: Tensor | None, device: torch.device
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For each piece the numbers of its tokens, and where they are packed its own cu_seqlens."""
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    start = 0
    for size in sizes:
        if ends is None:
            yield torch.arange(start, start + size, device=device), None
        else:
            spans = [
                (min(first + start, last), min(first + start + size, last))
                for first, last in zip(ends, ends[1:], strict=False)
            ]
            rows = torch.cat([torch.arange(*span, device=device) for span in spans])
            yield rows, torch.tensor([0, *(b - a for a, b in spans)], device=device).cumsum(0)
        start += size
