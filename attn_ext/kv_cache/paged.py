"""A pool of blocks that sequences take as they grow, give back, and share (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ext._arguments import index_of
from attn_ext.kv_cache.base import BaseCache, Room, Storage, selected

__all__ = ["PagedKVCache"]

_NO_BLOCK = -1  # a table entry that the operators refuse to follow


class _Plan(NamedTuple):
    """Blocks to be taken over: place (sequence, index) gets the fresh block beside it."""

    places: list[tuple[int, int]]
    fresh: list[int]
    from_free: int  # how many of the fresh ones come off the end of the free list
    spare: range  # blocks of a grown pool that stay free


class PagedKVCache(BaseCache):
    """Keys and values in blocks of `page_size` tokens out of one pool.

    A sequence takes blocks as it grows and gives them back as it is cut, so memory follows the tokens that are there,
    not the longest sequence. Sequences with the same beginning may hold the same blocks (`share`, `reorder`); a block
    that several hold is copied for whoever is about to write to it.

        cache = attn_ext.PagedKVCache(batch=4, num_kv_heads=2, head_dim=64)
        cache.append(k, v, cu_seqlens=torch.tensor([0, n, n, n, n]))   # a prompt for sequence 0 …
        cache.share(0, [1, 2, 3])                                      # … that the others continue, too

    Args:
        batch, num_kv_heads, head_dim, v_head_dim, dtype, quantized, device: as in `KVCache`.
        page_size: tokens a block holds.
        num_blocks: blocks of the pool to begin with (at most max_blocks); enough for 64 tokens of every sequence where
            not given. The pool doubles when it is used up.
        max_blocks: the pool may have no more; None is no limit.

    Attributes:
        block_table: (B, blocks per sequence) int32: position p of sequence b is row p % page_size of block
            block_table[b, p // page_size]; −1 where there is none.
        page_size, max_blocks: as given.

    Under `torch.compile` no block can be taken or copied: call `reserve` before, also after `share`, `reorder` and
    `truncate`.

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
        page_size: int = 16,
        num_blocks: int | None = None,
        max_blocks: int | None = None,
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
        self.page_size = self._size("page_size", page_size)
        self.max_blocks = None if max_blocks is None else self._size("max_blocks", max_blocks)
        if num_blocks is None:
            num_blocks = max(1, self.batch * self._pages(64))
        num_blocks = self._size("num_blocks", num_blocks)
        if self.max_blocks is not None:
            num_blocks = min(num_blocks, self.max_blocks)
        width = max(1, num_blocks // max(1, self.batch))
        pool = self._allocate(num_blocks, self.page_size)
        self._storage = pool._replace(block_table=self._empty_table(self.batch, width))
        self._blocks: list[list[int]] = [[] for _ in range(self.batch)]  # of each sequence, in order
        self._owners = [0] * num_blocks  # how many sequences hold each block
        self._free = list(reversed(range(num_blocks)))  # taken from the end
        self._writes_shared = False  # whether a block that is written to next has several owners

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def block_table(self) -> Tensor:
        """(B, blocks per sequence) int32, −1 where there is no block."""
        table = self._storage.block_table
        assert table is not None
        return table

    @property
    def capacity(self) -> int:
        """How many positions every sequence has room for before one needs another block."""
        return self.page_size * min((len(blocks) for blocks in self._blocks), default=0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, taken or free."""
        return self._storage.k.shape[0]

    @property
    def free_blocks(self) -> int:
        """Blocks of the pool that no sequence holds."""
        return len(self._free)

    # --- who holds which block ------------------------------------------------------------------------------------

    def share(self, source: int, targets: int | Sequence[int], length: int | None = None) -> None:
        """Let other sequences begin with the tokens of one, without a copy. What they held before is forgotten.

        Args:
            source: the sequence with the tokens.
            targets: the sequences that get them, one or several.
            length: how many of the tokens; all where not given.

        Raises:
            IndexError: a sequence that is not there.
            ValueError: source among the targets; a length below 0 or above what source holds.
            TypeError: numbers that are no integers.
        """
        op = self._op("share")
        self._expect_data(op)
        (giver,) = self._read_sequences(op, [source]).tolist()
        takers = self._read_sequences(op, targets if index_of(targets) is None else [targets]).tolist()
        if giver in takers:
            raise ValueError(f"attn_ext.{op}: sequence {giver} cannot share with itself")
        held = self._held(op)[giver]
        length = held if length is None else self._size("length", length, at_least=0)
        if length > held:
            raise ValueError(
                f"attn_ext.{op}: sequence {giver} holds {held} tokens, not the {length} to share"
            )
        blocks = self._blocks[giver][: self._pages(length)]
        self._hold({b: list(blocks) for b in takers})
        self.lengths[takers] = length
        self._note_sharing()

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Sequence b goes on as sequence indices[b]: table entries move, nothing is copied. See `BaseCache.reorder`.

        Blocks beyond the lengths, from `reserve`, are given back.
        """
        op = self._op("reorder")
        self._expect_data(op)
        chosen = self._read_sequences(op, indices)
        lengths = self._held(op)
        moved = [self._blocks[b][: self._pages(lengths[b])] for b in chosen.tolist()]
        table = self._empty_table(len(moved), self.block_table.shape[1])
        held_before = self._blocks
        self._blocks = [[] for _ in moved]
        self._storage = self._storage._replace(block_table=table)
        self._hold(dict(enumerate(moved)))
        self._release(block for blocks in held_before for block in blocks)
        self.lengths = selected(self.lengths, chosen)
        self._note_sharing()

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget all positions from some length on, and give back the blocks that are not needed any more.

        Also those from `reserve`. See `BaseCache.truncate`.
        """
        super().truncate(lengths)
        self._note_sharing()

    def reserve(self, capacity: int) -> None:
        """Take blocks for so many positions of every sequence, in all, and copy shared ones that will be written to.

        Raises:
            IndexError: more blocks than the pool may have, or than can be addressed.
            TypeError, ValueError: no integer, or a negative one; a cache on the meta device.
        """
        op, capacity = self._op("reserve"), self._size("capacity", capacity, at_least=0)
        self._expect_data(op)
        self._take_over(self._room_for(op, [max(0, capacity - n) for n in self._held(op)]))

    # --- for the base class ---------------------------------------------------------------------------------------

    def _room_for(self, op: str, counts: Sequence[int] | None) -> Room:
        if counts is None:
            if self._writes_shared:
                raise RuntimeError(
                    f"attn_ext.{op}: sequences share a block that is to be written to, which compiled code and CUDA "
                    "graphs cannot copy; call reserve() first"
                )
            return Room(self._storage)
        runs = self._runs(op, counts)
        if not runs:
            return Room(self._storage)
        needed = sum(run.stop - run.start for _, run in runs)
        from_free = min(needed, len(self._free))
        fresh = self._free[len(self._free) - from_free :][::-1]
        storage, spare = self._storage, range(0)
        if len(fresh) < needed:
            more = needed - len(fresh)
            storage, grown = self._grown(more)
            fresh, spare = [*fresh, *grown[:more]], grown[more:]

        places = [(b, i) for b, run in runs for i in run]  # once there is memory for so many
        copies = [
            (self._blocks[b][i], block)
            for (b, i), block in zip(places, fresh, strict=True)
            if i < len(self._blocks[b])
        ]
        if copies:  # into blocks that are nobody's
            old, new = torch.tensor(copies, device=self.device).unbind(1)
            for t in storage.data:
                t[new] = t[old]
        entries = [(b, i, block) for (b, i), block in zip(places, fresh, strict=True)]
        table = self._table_with(self.block_table, entries)
        return Room(storage._replace(block_table=table), _Plan(places, fresh, from_free, spare))

    def _runs(self, op: str, counts: Sequence[int]) -> list[tuple[int, range]]:
        """Which sequences need a fresh block, at which indices of their table rows, before `counts` more tokens are
        written. They are ranges, as there may be far more of them than there is room for.

        That is where there is none, and where a block has other owners. Of those who are about to write to the same
        block, all but the last to come get a copy.
        """
        runs: list[tuple[int, range]] = []
        needed = 0
        left: dict[int, int] = {}  # owners that a block loses by this call
        free = len(self._free)
        if self.max_blocks is not None:
            free += self.max_blocks - self.num_blocks
        short: tuple[int, int, int] | None = None  # the first sequence for which the blocks do not suffice
        for b, (n, length) in enumerate(zip(counts, self._held(op), strict=True)):
            if n == 0:
                continue
            blocks, end = self._blocks[b], self._pages(length + n)
            for i in range(length // self.page_size, min(end, len(blocks))):
                lost = left.get(blocks[i], 0)
                if self._owners[blocks[i]] - lost > 1:
                    left[blocks[i]] = lost + 1
                    runs.append((b, range(i, i + 1)))
                    needed += 1
            if end > len(blocks):
                runs.append((b, range(len(blocks), end)))
                needed += end - len(blocks)
            if self.max_blocks is not None and needed > free and short is None:
                short = (b, n, length)
        if short is not None:
            b, n, length = short
            raise IndexError(
                f"attn_ext.{op}: sequence {b}: {n} tokens at position {length}: the call needs {needed} more "
                f"blocks of {self.page_size} tokens, and {free} are left ({len(self._free)} free, {self.num_blocks} "
                f"in the pool, {self.max_blocks} allowed)"
            )
        return runs

    def _held(self, op: str) -> list[int]:
        """The lengths, once they are known to be those of the blocks: a caller can write to the tensor."""
        lengths = self.lengths.tolist()
        for b, (length, blocks) in enumerate(zip(lengths, self._blocks, strict=True)):
            if not 0 <= length <= len(blocks) * self.page_size:
                raise ValueError(
                    f"attn_ext.{op}: the length of sequence {b} must be 0 to {len(blocks) * self.page_size}, as it "
                    f"holds {len(blocks)} blocks of {self.page_size} tokens, and cache.lengths has been set to {length}"
                )
        return lengths

    def _take_over(self, room: Room) -> None:
        if room.plan is None:
            return
        places, fresh, from_free, spare = room.plan
        self._storage = room.storage
        del self._free[len(self._free) - from_free :]
        self._free.extend(reversed(spare))
        self._owners.extend([0] * (self.num_blocks - len(self._owners)))
        for (b, i), block in zip(places, fresh, strict=True):
            self._owners[block] = 1
            if i < len(self._blocks[b]):
                self._owners[self._blocks[b][i]] -= 1
                self._blocks[b][i] = block
            else:
                self._blocks[b].append(block)
        self._note_sharing()

    def _forget(self, op: str, kept: Sequence[int]) -> None:
        for b, n in enumerate(kept):
            pages = self._pages(n)
            self.block_table[b, pages:] = _NO_BLOCK
            self._release(self._blocks[b][pages:])
            del self._blocks[b][pages:]

    def _extra_repr(self) -> str:
        limit = "" if self.max_blocks is None else f", max_blocks={self.max_blocks}"
        return (
            f"page_size={self.page_size}, num_blocks={self.num_blocks}, free_blocks={self.free_blocks}{limit}"
        )

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _pages(self, length: int) -> int:
        """How many blocks so many tokens take."""
        return -(-length // self.page_size)

    def _hold(self, rows: dict[int, list[int]]) -> None:
        """Gives sequences other blocks than they had, in the lists, the counts and the table."""
        for b, blocks in rows.items():
            for block in blocks:
                self._owners[block] += 1
            self._release(
                self._blocks[b]
            )  # after the counts went up: a block that stays is never free in between
            self._blocks[b] = blocks
        entries = [(b, i, block) for b, blocks in rows.items() for i, block in enumerate(blocks)]
        table = self.block_table.clone()
        table[list(rows)] = _NO_BLOCK
        self._storage = self._storage._replace(block_table=self._table_with(table, entries))

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def _note_sharing(self) -> None:
        self._writes_shared = any(
            self._owners[block] > 1
            for blocks, length in zip(self._blocks, self.lengths.tolist(), strict=True)
            for block in blocks[length // self.page_size :]
        )

    def _grown(self, more: int) -> tuple[Storage, range]:
        """A larger pool with the blocks of this one and at least `more` others, and the numbers of those."""
        old = self.num_blocks
        size = max(old + more, 2 * old)
        if self.max_blocks is not None:
            size = min(size, self.max_blocks)
        storage = self._allocate(size, self.page_size)
        for new, t in zip(storage.data, self._storage.data, strict=True):
            new[:old] = t
        return storage, range(old, size)

    def _empty_table(self, rows: int, width: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.full((rows, width), _NO_BLOCK, dtype=torch.int32, device=self.device)

    def _table_with(self, table: Tensor, entries: Sequence[tuple[int, int, int]]) -> Tensor:
        """A copy of the table, wider where that is needed, with some (sequence, index, block) entered."""
        rows, width = table.shape
        needed = max((i + 1 for _, i, _ in entries), default=0)
        result = self._empty_table(rows, width if needed <= width else max(needed, 2 * width))
        result[:, :width] = table
        if entries:
            b, i, block = torch.tensor(entries, dtype=torch.int32, device=self.device).unbind(1)
            result[b, i] = block
        return result
