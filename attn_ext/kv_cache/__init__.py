"""Keys and values of earlier tokens, kept for the next ones: three caches with one interface, and a pair of them."""

from __future__ import annotations

from attn_ext.kv_cache.base import BaseCache
from attn_ext.kv_cache.contiguous import KVCache
from attn_ext.kv_cache.decoder import DecoderCache
from attn_ext.kv_cache.paged import PagedKVCache
from attn_ext.kv_cache.sliding import SlidingKVCache

__all__ = ["BaseCache", "DecoderCache", "KVCache", "PagedKVCache", "SlidingKVCache"]
