"""Transformer modules over `attn_ext.attention`: batch first, masks bool with True = may attend.

| module | forward |
|---|---|
| `ScaledDotProductAttention(d_k)` | (q, k, v, mask) → (output, weights) |
| `MultiHeadAttention(d_model, h)` | (q, k, v, mask) → (output, weights) |
| `PositionalEncoding(d_model)` | x → x + positions |
| `TransformerEncoderBlock(d_model, h, d_ff)` | (x, mask) → x |
| `TransformerEncoder(num_layers, d_model, h, d_ff)` | (x, mask) → x |

`build_causal_mask`, `create_padding_mask` and `stable_softmax` are the helpers that tutorials define beside
such modules; more masks in `attn_ext.masks`.
"""

from attn_ext.masks import build_causal_mask, create_padding_mask
from attn_ext.nn.attention import MultiHeadAttention, ScaledDotProductAttention
from attn_ext.nn.positional import PositionalEncoding
from attn_ext.nn.transformer import TransformerEncoder, TransformerEncoderBlock
from attn_ext.reference import stable_softmax

__all__ = [
    "MultiHeadAttention",
    "PositionalEncoding",
    "ScaledDotProductAttention",
    "TransformerEncoder",
    "TransformerEncoderBlock",
    "build_causal_mask",
    "create_padding_mask",
    "stable_softmax",
]
