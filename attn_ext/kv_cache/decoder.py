"""What a decoder block keeps: the target written so far, and the source, which is read once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attn_ext.kv_cache.base import BaseCache
from attn_ext.kv_cache.paged import PagedKVCache

__all__ = ["DecoderCache"]


class DecoderCache:
    """The two caches of a `nn.TransformerDecoderBlock`.

    The keys and values of the encoder's output do not change while the target is written. The block's first call
    stores them in `source`, in one block a sequence, so that beams of one source share them.

        cache = attn_ext.DecoderCache(attn_ext.KVCache(batch=2, num_kv_heads=4, head_dim=16))
        y = block(start, encoder_output, cache=cache)
        y = block(token, None, cache=cache)

    A plain object like the caches it holds: it stays out of the state dict, and can be copied and pickled.

    Args:
        target: an empty cache for the self-attention. The source is kept in its dtype, quantized where it is.

    Attributes:
        target: as given.
        source: the source's keys and values; None before the first call.

    Raises:
        TypeError: target is no cache.
    """

    def __init__(self, target: BaseCache) -> None:
        if not isinstance(target, BaseCache):
            raise TypeError(
                f"attn_ext.DecoderCache: target must be a KVCache, PagedKVCache or SlidingKVCache, "
                f"not {type(target).__name__}"
            )
        self.target = target
        self.source: BaseCache | None = None

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, how many tokens of the target each sequence holds."""
        return self.target.lengths

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.target.batch

    @property
    def max_length(self) -> int:
        """Tokens of the longest target."""
        return self.target.max_length

    @property
    def nbytes(self) -> int:
        """Bytes of both caches, used or not."""
        return self.target.nbytes + (0 if self.source is None else self.source.nbytes)

    def for_source(self, length: int) -> BaseCache:
        """An empty cache for sources of at most `length` tokens. It is not put in `source`."""
        target = self.target
        return PagedKVCache(
            target.batch,
            target.num_kv_heads,
            target.head_dim,
            v_head_dim=target.v_head_dim,
            page_size=max(1, length),
            num_blocks=max(1, target.batch),
            dtype=target.dtype,
            quantized=target.quantized,
            device=target.device,
        )

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget tokens of the target; see `BaseCache.truncate`. The source stays."""
        self.target.truncate(lengths)

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Sequence b goes on as sequence indices[b], source included; see `BaseCache.reorder`."""
        self.target.reorder(indices)
        if self.source is not None:
            self.source.reorder(indices)

    def reserve(self, capacity: int) -> None:
        """Make room for so many positions of the target; see `BaseCache.reserve`."""
        self.target.reserve(capacity)

    def reset(self) -> None:
        """Forget everything, the source too."""
        self.target.reset()
        self.source = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(target={self.target!r}, source={self.source!r})"
