"""Transformer modules over `attn_ext.attention`: batch first, masks bool with True = may attend.

| module | forward |
|---|---|
| `ScaledDotProductAttention(d_k)` | (q, k, v, mask) → (output, weights) |
| `MultiHeadAttention(d_model, h)` | (q, k, v, mask) → (output, weights) |
| `PositionalEncoding(d_model)` | x → x + positions |
| `RotaryEmbedding(head_dim)` | (heads, positions) → turned heads; given to the modules below as `rotary=` |
| `TransformerEncoderBlock(d_model, h, d_ff)` | (x, mask) → x |
| `TransformerDecoderBlock(d_model, h, d_ff)` | (x, encoder_output, causal_mask, padding_mask) → x |
| `TransformerEncoder(num_layers, d_model, h, d_ff)` | (x, mask) → x |
| `TransformerDecoder(num_layers, d_model, h, d_ff)` | (x, encoder_output, causal_mask, padding_mask) → x |
| `GatedFeedForward(d_model, d_ff)` | x → x; SwiGLU or GEGLU |

With `cache=` attention, blocks and stacks read new tokens behind those that a `KVCache` (decoders: a `DecoderCache`)
holds, for one-token decoding and prompts in chunks.

`from_torch(module)` makes ours of nn.MultiheadAttention, nn.TransformerEncoderLayer, …Encoder, …DecoderLayer and
…Decoder, with the same weights; `to_torch` goes back.

`build_causal_mask`, `create_padding_mask` and `stable_softmax` are the helpers that tutorials define beside
such modules; more masks in `attn_ext.masks`.
"""

from attn_ext.masks import build_causal_mask, create_padding_mask
from attn_ext.nn.attention import MultiHeadAttention, ScaledDotProductAttention
from attn_ext.nn.convert import from_torch, to_torch
from attn_ext.nn.feed_forward import GatedFeedForward
from attn_ext.nn.positional import PositionalEncoding, RotaryEmbedding
from attn_ext.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from attn_ext.reference import stable_softmax

__all__ = [
    "GatedFeedForward",
    "MultiHeadAttention",
    "PositionalEncoding",
    "RotaryEmbedding",
    "ScaledDotProductAttention",
    "TransformerDecoder",
    "TransformerDecoderBlock",
    "TransformerEncoder",
    "TransformerEncoderBlock",
    "build_causal_mask",
    "create_padding_mask",
    "from_torch",
    "stable_softmax",
    "to_torch",
]
