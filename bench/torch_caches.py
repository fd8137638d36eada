"""KV caches as one writes them in plain torch, for a model of attn_ext: the rivals of its own caches.

Only what greedy writing needs: all sequences equally long, the prompt in one piece, then a token at a time.
"""

from __future__ import annotations

import abc

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_ext.models import CausalLM


class TorchCache(abc.ABC):
    """What both have in common: new keys are turned by their positions and stored, then SDPA attends."""

    def __init__(self, batch: int, dtype: torch.dtype) -> None:
        self.batch = batch
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.max_length = 0  # tokens stored
        self.capacity = 0

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each sequence."""
        return torch.full((self.batch,), self.max_length)

    def reserve(self, capacity: int) -> None:
        """Make room for so many tokens."""
        self.capacity = capacity

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: None = None,
        causal: bool = True,
        rotary: tuple[Tensor, Tensor] | None = None,
        rotary_interleaved: bool = False,
    ) -> Tensor:
        """Stores k and v (B, Hkv, n, D) and attends from q (B, Hq, n, D): as `attn_ext.KVCache.attend`."""
        n = k.shape[2]
        if rotary is not None:
            cos, sin = (table[self.max_length : self.max_length + n] for table in rotary)
            q, k = (_turned(x, cos, sin) for x in (q, k))
        keys, values = self._store(k, v)
        self.max_length += n
        return F.scaled_dot_product_attention(
            q, keys, values, is_causal=n > 1, enable_gqa=q.shape[1] != k.shape[1]
        )

    @abc.abstractmethod
    def _store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new tokens; returns all keys and values."""


class SliceCache(TorchCache):
    """Room for all tokens from the start; attention to a slice of it."""

    def __init__(self, batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(batch, dtype)
        self._size = (num_kv_heads, head_dim)
        self.reserve(0)

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        heads, width = self._size
        self._k, self._v = (torch.zeros(self.batch, heads, capacity, width, dtype=self.dtype) for _ in "kv")

    def _store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.max_length + k.shape[2]
        self._k[:, :, self.max_length : end] = k
        self._v[:, :, self.max_length : end] = v
        return self._k[:, :, :end], self._v[:, :, :end]


class CatCache(TorchCache):
    """Grows by torch.cat, which copies what is there."""

    def __init__(self, batch: int, dtype: torch.dtype) -> None:
        super().__init__(batch, dtype)
        self._held: tuple[Tensor, Tensor] | None = None

    def _store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._held is not None:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(self._held, (k, v), strict=True))
        self._held = k, v
        return self._held


def slice_caches(model: CausalLM, batch: int) -> list[TorchCache]:
    """One SliceCache for each block."""
    attention = model.blocks.layers[0].self_attn
    dtype = attention.w_k.weight.dtype
    return [SliceCache(batch, attention.num_kv_heads, attention.d_k, dtype) for _ in model.blocks.layers]


def cat_caches(model: CausalLM, batch: int) -> list[TorchCache]:
    """One CatCache for each block."""
    dtype = model.blocks.layers[0].self_attn.w_k.weight.dtype
    return [CatCache(batch, dtype) for _ in model.blocks.layers]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of whole heads, feature n paired with n + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
