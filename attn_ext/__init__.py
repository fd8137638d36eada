"""Attention for PyTorch, written from scratch in C++ under plain Python modules.

    import attn_ext
    out = attn_ext.attention(q, k, v, causal=True)       # q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D)

In every mask of this package True means attend.
"""

from __future__ import annotations

from attn_ext import _interrupt  # noqa: F401  # first: the command's Ctrl-C while torch is imported

from attn_ext import _load  # isort: skip  # it says in one sentence what keeps the compiled part from loading

from attn_ext import backend, masks, nn, reference  # isort: skip
from attn_ext.cache_ops import attention_with_kv_cache, kv_cache_append_  # isort: skip
from attn_ext.explain import explain  # isort: skip
from attn_ext.kv_cache import DecoderCache, KVCache, PagedKVCache, SlidingKVCache  # isort: skip
from attn_ext.ops import attention, attention_varlen, attention_weights, scaled_dot_product_attention  # isort: skip

__version__: str = _load._C.build_info()["version"]

__all__ = [
    "DecoderCache",
    "KVCache",
    "PagedKVCache",
    "SlidingKVCache",
    "attention",
    "attention_varlen",
    "attention_weights",
    "attention_with_kv_cache",
    "backend",
    "explain",
    "kv_cache_append_",
    "masks",
    "nn",
    "reference",
    "scaled_dot_product_attention",
]
