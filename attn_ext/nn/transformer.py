"""Transformer blocks: attention and a feed-forward net, each with a residual connection and a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_ext.nn.attention import MultiHeadAttention

__all__ = ["TransformerEncoder", "TransformerEncoderBlock"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


class TransformerEncoderBlock(nn.Module):
    """Self-attention, then a feed-forward net on each token.

        norm_first=False (BERT, the original)          norm_first=True (GPT-2, ViT)
        x = norm1(x + dropout(self_attn(x)))           x = x + dropout(self_attn(norm1(x)))
        x = norm2(x + dropout(ffn(x)))                 x = x + dropout(ffn(norm2(x)))

    Args:
        d_model: width of the tokens.
        h: number of heads.
        d_ff: width inside the feed-forward net.
        dropout: probability of dropping an attention weight, and an element of what either part adds to x.
        norm_first: where the norms stand, see above.
        activation: "relu", "gelu" (exact), "gelu_tanh" (its tanh approximation) or "silu".
        norm_eps: added to the variance in the norms; BERT's weights want 1e-12.
        bias: whether linear maps and norms have a bias.
        num_kv_heads: number of key/value heads; h where not given.
        device, dtype: where and as what the parameters are made.

    Attributes:
        self_attn: MultiHeadAttention with w_q, w_k, w_v, w_o.
        ffn: Sequential of Linear(d_model, d_ff), the activation, Linear(d_ff, d_model).
        norm1, norm2: LayerNorm(d_model).

    Raises:
        ValueError: sizes that do not fit together, or an unknown activation.
    """

    def __init__(
        self,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        activation: str = "relu",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            choices = ", ".join(_ACTIVATIONS)
            raise ValueError(
                f"TransformerEncoderBlock: activation must be one of {choices}, got {activation!r}"
            )
        if d_ff < 1:
            raise ValueError(f"TransformerEncoderBlock: d_ff must be at least 1, got {d_ff}")
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(
            d_model, h, dropout, num_kv_heads=num_kv_heads, bias=bias, device=device, dtype=dtype
        )
        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype),
            _ACTIVATIONS[activation](),
            nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype),
        )
        self.norm1 = nn.LayerNorm(d_model, eps=norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (B, L, d_model) → (B, L, d_model), and the weights (B, h, L, L) as well with `need_weights`.

        Args:
            x: the tokens.
            mask, causal, key_lengths, bias: which keys a token may attend to, as in `MultiHeadAttention`.
            need_weights: also return the attention weights before dropout.

        Raises:
            TypeError: an integer mask (use mask.bool()).
            ValueError: shapes that do not fit together.
        """
        inner = self.norm1(x) if self.norm_first else x
        attended, weights = self.self_attn(
            inner,
            inner,
            inner,
            mask,
            causal=causal,
            key_lengths=key_lengths,
            bias=bias,
            need_weights=need_weights,
        )
        if self.norm_first:
            x = x + self.dropout(attended)
            x = x + self.dropout(self.ffn(self.norm2(x)))
        else:
            x = self.norm1(x + self.dropout(attended))
            x = self.norm2(x + self.dropout(self.ffn(x)))
        return (x, weights) if need_weights else x


class TransformerEncoder(nn.Module):
    """A stack of `TransformerEncoderBlock`s.

    Args:
        num_layers: how many blocks.
        d_model, h, d_ff, dropout, norm_first, activation, norm_eps, bias, num_kv_heads, device, dtype: as in
            the block, the same for all.

    Attributes:
        layers: ModuleList of the blocks.
        norm: LayerNorm(d_model) behind the last block where norm_first, Identity otherwise.

    Raises:
        ValueError: num_layers below 1, or what a block refuses.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        activation: str = "relu",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"TransformerEncoder: num_layers must be at least 1, got {num_layers}")
        self.layers = nn.ModuleList(
            TransformerEncoderBlock(
                d_model,
                h,
                d_ff,
                dropout,
                norm_first=norm_first,
                activation=activation,
                norm_eps=norm_eps,
                bias=bias,
                num_kv_heads=num_kv_heads,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        self.norm = (
            nn.LayerNorm(d_model, eps=norm_eps, bias=bias, device=device, dtype=dtype)
            if norm_first
            else nn.Identity()
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """x (B, L, d_model) → (B, L, d_model), and a list of weights (B, h, L, L) with `need_weights`.

        Args:
            x: the tokens.
            mask, causal, key_lengths, bias: which keys a token may attend to, as in `MultiHeadAttention`;
                the same for every block.
            need_weights: also return the attention weights before dropout.

        Raises:
            TypeError: an integer mask (use mask.bool()).
            ValueError: shapes that do not fit together.
        """
        options = {"causal": causal, "key_lengths": key_lengths, "bias": bias}
        if not need_weights:
            for layer in self.layers:
                x = layer(x, mask, **options)
            return self.norm(x)
        weights = []
        for layer in self.layers:
            x, layer_weights = layer(x, mask, **options, need_weights=True)
            weights.append(layer_weights)
        return self.norm(x), weights
