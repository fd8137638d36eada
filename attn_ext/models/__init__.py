"""Whole models built on `attn_ext.nn`, so that the blocks are seen doing real work."""

from __future__ import annotations

from .causal_lm import CausalLM
from .minilm import MiniLM, MiniLMConfig, WeightsError, load_tokenizer, packaged_weights
from .seq2seq import Seq2SeqTransformer

__all__ = [
    "CausalLM",
    "MiniLM",
    "MiniLMConfig",
    "Seq2SeqTransformer",
    "WeightsError",
    "load_tokenizer",
    "packaged_weights",
]
