"""Keys and values of earlier tokens, kept for the next ones: three caches with one interface."""

from __future__ import annotations

from attn_ext.kv_cache.base import BaseCache
from attn_ext.kv_cache.contiguous import KVCache

__all__ = ["BaseCache", "KVCache"]
