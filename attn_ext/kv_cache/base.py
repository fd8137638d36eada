"""What the caches share: storing, attending, and who holds how many tokens.

A cache never changes before everything about a call is right. What a call needs beyond what is there (more room, other
blocks) is made aside first, the operator runs on that, and only when it has succeeded does the cache take it over.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ext._arguments import (
    FLOATS,
    check_boundaries,
    expect_tensor,
    index_of,
    integer_tensor,
    out_of_reach,
    read_indices,
    whole_numbers,
)
from attn_ext.cache_ops import attention_with_kv_cache, kv_cache_append_

__all__ = ["BaseCache"]

_LARGEST = 2**63 - 1  # bytes that torch can count


class Storage(NamedTuple):
    """The tensors of a cache, as the operators take them. `first` is B, or the blocks of a pool."""

    k: Tensor  # (first, Hkv, rows, D)
    v: Tensor  # (first, Hkv, rows, Dv)
    k_scales: Tensor | None  # (first, Hkv, rows) float32, where k and v are int8
    v_scales: Tensor | None
    block_table: Tensor | None = None  # (B, blocks per sequence) int32

    @property
    def options(self) -> dict[str, Tensor | None]:
        """The operators' options that say how the cache is laid out."""
        return {"block_table": self.block_table, "k_scales": self.k_scales, "v_scales": self.v_scales}

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Keys, values and scales."""
        return tuple(t for t in self[:4] if t is not None)


class Room(NamedTuple):
    """Storage in which the new tokens of a call have a place, and what the cache has to note if it takes it over."""

    storage: Storage
    plan: Any = None


class BaseCache(abc.ABC):
    """Interface and common part of `KVCache`, `PagedKVCache` and `SlidingKVCache`.

    A plain object, no module: as an attribute of a module it stays out of the state dict. `copy.deepcopy` and `pickle`
    make independent copies. For inference: inputs that need a gradient are refused.

    Under `torch.compile`, and while a CUDA graph is captured, no value of a tensor is read, so nothing can grow: call
    `reserve` before. A step past what is reserved is refused by the operator (on a GPU by the device:
    `backend.check_cuda`). A replayed graph goes on from where `lengths` are then. On the meta device a cache tells its
    sizes, and takes no tokens.

    Attributes:
        lengths: (B,) int64, how many tokens each sequence holds. The cache moves them along in place; use `truncate` to
            make them smaller.
        num_kv_heads, head_dim, v_head_dim: Hkv, D, Dv.
        dtype: of the q, k, v that come; also of what is stored, unless `quantized`.
        quantized: stored as int8, with one scale a token and head.
    """

    _ring = False

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None,
        dtype: torch.dtype,
        quantized: bool,
        device: torch.device | str | None,
    ) -> None:
        batch = self._size("batch", batch, at_least=0)
        self.num_kv_heads = self._size("num_kv_heads", num_kv_heads)
        self.head_dim = self._size("head_dim", head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else self._size("v_head_dim", v_head_dim)
        if dtype not in FLOATS:
            raise TypeError(
                f"attn_ext.{type(self).__name__}: dtype must be float32, bfloat16, float16 or float64, not {dtype}"
            )
        self.dtype = dtype
        self.quantized = bool(quantized)
        self._expect_addressable(batch, 1)
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._storage: Storage

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def k(self) -> Tensor:
        """The stored keys, (B, Hkv, capacity, D), or (blocks, Hkv, page, D) in a paged cache."""
        return self._storage.k

    @property
    def v(self) -> Tensor:
        """The stored values, likewise with Dv."""
        return self._storage.v

    @property
    def k_scales(self) -> Tensor | None:
        """float32 (B, Hkv, capacity) or (blocks, Hkv, page) where the cache is quantized."""
        return self._storage.k_scales

    @property
    def v_scales(self) -> Tensor | None:
        """As `k_scales`."""
        return self._storage.v_scales

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        self._expect_data(self._op("max_length"))
        return max(self.lengths.tolist(), default=0)

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """How many positions every sequence has room for as it stands."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys, values and scales, used or not."""
        return sum(t.nbytes for t in self._storage.data)

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.lengths.device

    def __repr__(self) -> str:
        stored = "int8 for " if self.quantized else ""
        width = "" if self.v_head_dim == self.head_dim else f", v_head_dim={self.v_head_dim}"
        lengths = "unknown" if self.lengths.is_meta else self.lengths.tolist()
        return (
            f"{type(self).__name__}(batch={self.batch}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
            f"{width}, {self._extra_repr()}, dtype={stored}{self.dtype}, lengths={lengths})"
        )

    # --- tokens come ----------------------------------------------------------------------------------------------

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        """Store new tokens behind those that are there.

        Args:
            k: (B, Hkv, n, D) with n ≥ 0, or packed with cu_seqlens: (total, Hkv, D).
            v: likewise, with Dv.
            cu_seqlens, rotary, rotary_interleaved: as in `attn_ext.kv_cache_append_`.

        Raises:
            IndexError: more tokens than there may ever be room for.
            ValueError, TypeError: shapes, devices, dtypes that do not fit the cache; inputs that need a gradient; a
                cache on the meta device.
            RuntimeError: in compiled code, for a paged cache: sequences share a block that is to be written to, which
                `reserve` would have copied.
            The cache is then as it was before. (On a GPU a compiled step cannot know what the device finds wrong: the
            lengths move along although nothing of that sequence was written, and `backend.check_cuda` tells.)
        """
        op = self._op("append")
        self._expect_data(op)
        room = self._room_for(op, self._count(op, k, v, cu_seqlens))
        storage = room.storage
        kv_cache_append_(
            storage.k,
            storage.v,
            k,
            v,
            self.lengths,
            **storage.options,
            ring=self._ring,
            cu_seqlens=cu_seqlens,
            rotary=rotary,
            rotary_interleaved=rotary_interleaved,
        )
        self._take_over(room)
        self._advance(k, cu_seqlens)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        rotary_interleaved: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """Store k and v where given, then attend to all that is stored: a prompt, a chunk or one token.

        Args:
            q: (B, Hq, Lq, D), or packed with cu_seqlens: (total, Hq, D). The last query stands at the last position.
            k, v: new tokens, as in `append`; both or neither.
            cu_seqlens, causal, window, scale, softcap, alibi_slopes, sinks, rotary, rotary_interleaved, return_lse: as
                in `attn_ext.attention_with_kv_cache`.

        Returns:
            out (B, Hq, Lq, Dv) or (total, Hq, Dv); with return_lse also the lse (B, Hq, Lq) or (Hq, total).

        Raises:
            IndexError, ValueError, TypeError, RuntimeError: as `append`, and as `attn_ext.attention_with_kv_cache`. The
            cache is then as it was before.
        """
        op = self._op("attend")
        self._expect_data(op)
        if (k is None) != (v is None):
            raise ValueError(f"attn_ext.{op}: k and v must be given together")
        room = Room(self._storage)
        if k is not None and v is not None:
            room = self._room_for(op, self._count(op, k, v, cu_seqlens))
        storage = room.storage
        result = attention_with_kv_cache(
            q,
            storage.k,
            storage.v,
            self.lengths,
            k=k,
            v=v,
            **storage.options,
            ring=self._ring,
            cu_seqlens=cu_seqlens,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            rotary=rotary,
            rotary_interleaved=rotary_interleaved,
            return_lse=return_lse,
        )
        if k is not None:
            self._take_over(room)
            self._advance(k, cu_seqlens)
        return result

    # --- tokens go ------------------------------------------------------------------------------------------------

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget all positions from some length on. The room stays (a paged cache gets whole blocks back).

        Args:
            lengths: how many tokens stay: an integer for all sequences, or one an entry.

        Raises:
            ValueError: a negative length, or one above what a sequence holds; not one an entry.
            TypeError: lengths that are no integers.
            The cache is then as it was before.
        """
        op = self._op("truncate")
        self._expect_data(op)
        held = self.lengths.tolist()
        kept = self._read_lengths(op, lengths)
        for b, (n, length) in enumerate(zip(kept, held, strict=True)):
            if not 0 <= n <= length:
                raise ValueError(
                    f"attn_ext.{op}: sequence {b} holds {length} tokens and cannot be cut to {n} of them"
                )
        self._forget(op, kept)
        self.lengths.copy_(torch.tensor(kept, dtype=torch.int64))

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Sequence b goes on as a copy of what sequence indices[b] is now; as many sequences as indices.

        For beams, and for picking, repeating or dropping sequences of a batch. What is written to one later does not
        show in another.

        Args:
            indices: integers below the number of sequences, negative ones counted from the end.

        Raises:
            IndexError: a sequence that is not there.
            TypeError: neither a sequence of integers nor a one-dimensional tensor of them.
            ValueError: a cache on the meta device.
        """
        op = self._op("reorder")
        self._expect_data(op)
        chosen = self._read_sequences(op, indices)
        rows = self._storage.k.shape[2]
        filled = min(self.max_length, rows)
        storage = self._allocate(len(chosen), rows)
        for new, old in zip(storage.data, self._storage.data, strict=True):
            new[:, :, :filled] = old[:, :, :filled].index_select(0, chosen)
        self.lengths = selected(self.lengths, chosen)
        self._storage = storage

    def reset(self) -> None:
        """Forget everything; the room stays."""
        self.truncate(0)

    @abc.abstractmethod
    def reserve(self, capacity: int) -> None:
        """Make room for so many positions in every sequence, in all, so that nothing has to grow up to there.

        Raises:
            IndexError: more than there may ever be room for.
            TypeError, ValueError: no integer, or a negative one; a cache on the meta device.
        """

    # --- for the classes ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _room_for(self, op: str, counts: Sequence[int] | None) -> Room:
        """Room for so many more tokens of each sequence, made without a change to the cache.

        counts is None where no length can be read: then it is what is there.
        """

    def _take_over(self, room: Room) -> None:
        """Makes the room the cache's own, now that the operator has succeeded."""
        if room.storage is not self._storage:
            self._storage = room.storage

    def _forget(self, op: str, kept: Sequence[int]) -> None:  # noqa: B027  some caches have nothing to do here
        """Checks and does what truncating to `kept` tokens takes beside changing the lengths."""

    @abc.abstractmethod
    def _extra_repr(self) -> str:
        """What is special about this kind of cache."""

    def _allocate(self, first: int, rows: int) -> Storage:
        """Zeros, not what was in memory before: a cache may be pickled."""
        self._expect_addressable(first, rows)
        dtype = torch.int8 if self.quantized else self.dtype
        leading, device = (first, self.num_kv_heads, rows), self.device
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            scales = [
                torch.zeros(leading, dtype=torch.float32, device=device) if self.quantized else None
                for _ in range(2)
            ]
            return Storage(
                torch.zeros(*leading, self.head_dim, dtype=dtype, device=device),
                torch.zeros(*leading, self.v_head_dim, dtype=dtype, device=device),
                *scales,
            )

    def _count(self, op: str, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[int] | None:
        """How many tokens come for each sequence, once they are known to fit; None where no number can be read."""
        if out_of_reach(self.device):
            return None
        if (
            cu_seqlens is None
            and isinstance(k, Tensor)
            and isinstance(v, Tensor)
            and k.dtype == v.dtype == self.dtype
            and k.device == v.device == self.lengths.device
            and k.dim() == v.dim() == 4
            and k.shape[:3] == v.shape[:3] == (len(self.lengths), self.num_kv_heads, k.shape[2])
            and k.shape[3] == self.head_dim
            and v.shape[3] == self.v_head_dim
        ):  # the common call, without the words for what might be wrong
            return [k.shape[2]] * len(self.lengths)
        for name, t in (("k", k), ("v", v)):
            expect_tensor(op, name, t)
            if t.dtype != self.dtype:
                raise TypeError(
                    f"attn_ext.{op}: {name} must have the cache's dtype {self.dtype}, not {t.dtype}"
                )
            if t.device != self.device:
                raise ValueError(
                    f"attn_ext.{op}: {name} must be on the cache's device {self.device}, not on {t.device}"
                )
        packed = cu_seqlens is not None
        n = k.shape[0 if packed else -2] if k.dim() == (3 if packed else 4) else 0
        for name, t, width in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            expected = (n, self.num_kv_heads, width) if packed else (self.batch, self.num_kv_heads, n, width)
            if tuple(t.shape) != expected:
                shape = f"(total, {self.num_kv_heads}, {width})"
                if not packed:
                    shape = f"({self.batch}, {self.num_kv_heads}, n, {width})"
                raise ValueError(
                    f"attn_ext.{op}: k and v must have as many tokens, and {name} must be {shape}, "
                    f"not {tuple(t.shape)}"
                )
        if cu_seqlens is None:
            return [n] * self.batch
        return packed_counts(op, cu_seqlens, self.batch, "k", n)

    def _advance(self, k: Tensor, cu_seqlens: Tensor | None) -> None:
        # In place: whoever holds this tensor, a compiled step or a captured graph, sees it move along.
        self.lengths.add_(k.shape[-2] if cu_seqlens is None else cu_seqlens.diff())

    def _read_lengths(self, op: str, lengths: Any) -> list[int]:
        if isinstance(lengths, Tensor):
            integer_tensor(op, "lengths", lengths)
            lengths = lengths.tolist()
        one = index_of(lengths)
        if one is not None:
            return [one] * self.batch
        chosen = whole_numbers(op, "lengths", lengths)
        if len(chosen) != self.batch:
            raise ValueError(
                f"attn_ext.{op}: lengths must be one for each of the {self.batch} sequences, not {len(chosen)}"
            )
        return chosen

    def _read_sequences(self, op: str, indices: Any) -> Tensor:
        """(n,) int64 on the cache's device."""
        if isinstance(indices, Tensor):
            indices = indices.to(self.device)
        return read_indices(op, "sequences", indices, self.batch, self.device)

    def _expect_data(self, op: str) -> None:
        """Raises ValueError for a cache without data, whose lengths nobody knows."""
        if self.lengths.is_meta:
            raise ValueError(
                f"attn_ext.{op}: this cache is on the meta device, where there are sizes and no data; "
                f"make it on the device of the model to store tokens"
            )

    def _expect_addressable(self, first: int, rows: int) -> None:
        """Raises IndexError for more places than memory can ever have, before torch or a list is asked for them."""
        element = 1 if self.quantized else self.dtype.itemsize
        size = first * self.num_kv_heads * rows * max(self.head_dim, self.v_head_dim) * element
        if max(size, first) > _LARGEST:
            raise IndexError(
                f"attn_ext.{type(self).__name__}: {first} times {rows} places for {self.num_kv_heads} heads of "
                f"{max(self.head_dim, self.v_head_dim)} numbers are more than can be addressed, 2**63 bytes"
            )

    def _op(self, method: str) -> str:
        return f"{type(self).__name__}.{method}"

    def _size(self, name: str, size: Any, *, at_least: int = 1) -> int:
        found = index_of(size)
        if found is None:
            raise TypeError(f"attn_ext.{type(self).__name__}: {name} must be an integer, not {size!r}")
        if found < at_least:
            raise ValueError(
                f"attn_ext.{type(self).__name__}: {name} must be at least {at_least}, not {found}"
            )
        return found


def packed_counts(op: str, cu_seqlens: Any, batch: int, of: str, total: int) -> list[int]:
    """How many of the `total` packed rows of `of` are each sequence's.

    Raises:
        TypeError: cu_seqlens that are no tensor of integers.
        ValueError: not (batch + 1,), or not from 0 to total without a fall.
    """
    integer_tensor(op, "cu_seqlens", cu_seqlens)
    if tuple(cu_seqlens.shape) != (batch + 1,):
        raise ValueError(
            f"attn_ext.{op}: cu_seqlens must be ({batch + 1},), one more than there are sequences, "
            f"not {tuple(cu_seqlens.shape)}"
        )
    ends = cu_seqlens.tolist()
    check_boundaries(op, "cu_seqlens", ends, of, total)
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def selected(numbers: Tensor, chosen: Tensor) -> Tensor:
    """numbers[chosen], as a tensor that can be written to outside of inference mode too."""
    with torch.inference_mode(False):
        result = torch.empty(chosen.shape, dtype=numbers.dtype, device=numbers.device)
    return result.copy_(numbers.index_select(0, chosen))
