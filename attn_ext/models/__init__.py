"""Whole models built on `attn_ext.nn`, so that the blocks are seen doing real work."""

from __future__ import annotations

from .minilm import MiniLM, MiniLMConfig, WeightsError, load_tokenizer, packaged_weights

__all__ = ["MiniLM", "MiniLMConfig", "WeightsError", "load_tokenizer", "packaged_weights"]
