"""Whole models built on `attn_ext.nn`, so that the blocks are seen doing real work.

`save(model, path)` and `load(path)` keep any of our own models in one file.
"""

from __future__ import annotations

from .causal_lm import CausalLM
from .errors import LogitsError, WeightsError
from .minilm import MiniLM, MiniLMConfig, load_tokenizer, packaged_weights
from .saving import Saveable, load, save
from .seq2seq import Seq2SeqTransformer
from .text_classifier import TextClassifier, TinyTextClassifier

__all__ = [
    "CausalLM",
    "LogitsError",
    "MiniLM",
    "MiniLMConfig",
    "Saveable",
    "Seq2SeqTransformer",
    "TextClassifier",
    "TinyTextClassifier",
    "WeightsError",
    "load",
    "load_tokenizer",
    "packaged_weights",
    "save",
]
