"""A small Transformer that reads tokens and names a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn import PositionalEncoding, TransformerEncoder
from .saving import Saveable

__all__ = ["TextClassifier", "TinyTextClassifier"]


class TextClassifier(Saveable):
    """Token embedding, sinusoidal positions, encoder blocks, and a linear map on the first token.

        tokens (B, L) → embedding + position → encoder → (B, L, d_model) → [:, 0] → classify → (B, num_classes)

    The first token has no meaning of its own here: whatever decides the class has to reach it through attention.

    Args:
        vocab_size: token ids run from 0 to vocab_size − 1.
        d_model: width of the tokens.
        h: number of heads.
        d_ff: width inside the feed-forward nets.
        num_layers: how many encoder blocks.
        num_classes: how many logits.
        max_len: the longest sequence that will come.
        dropout: in the blocks, while training.
        norm_first, activation: as in `TransformerEncoderBlock`.

    Attributes:
        config: these arguments by name; `attn_ext.models.save` stores them beside the weights.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> model = TextClassifier(vocab_size=20, d_model=16, h=4, d_ff=32)
        >>> logits = model(torch.randint(1, 20, (3, 8)))  # (3, 2)
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        h: int,
        d_ff: int,
        num_layers: int = 2,
        num_classes: int = 2,
        max_len: int = 32,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if vocab_size < 1 or num_classes < 1:
            raise ValueError(
                "TextClassifier: vocab_size and num_classes must be at least 1, "
                f"got {vocab_size} and {num_classes}"
            )
        self.config = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "h": h,
            "d_ff": d_ff,
            "num_layers": num_layers,
            "num_classes": num_classes,
            "max_len": max_len,
            "dropout": dropout,
            "norm_first": norm_first,
            "activation": activation,
        }
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.position = PositionalEncoding(d_model, max_len)
        self.encoder = TransformerEncoder(
            num_layers, d_model, h, d_ff, dropout, norm_first=norm_first, activation=activation
        )
        self.classify = nn.Linear(d_model, num_classes)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Logits (B, num_classes); with `need_weights` also each block's weights (B, h, L, L), before dropout.

        Args:
            tokens: (B, L) integer ids, L from 1 to max_len.
            mask: which keys a token may attend to, as in `MultiHeadAttention`. A padding mask (B, 1, 1, L), as
                `create_padding_mask(tokens)` makes it, also says where each sequence begins: positions are
                counted from its first real token, and that token is the one classified. So padding on either
                side, however long, leaves the logits as they are (up to rounding). A sequence of padding
                alone gets finite logits that mean nothing.
            need_weights: also return the attention weights.

        Raises:
            TypeError: tokens or mask of a wrong dtype.
            ValueError: shapes that do not fit, or a sequence that is empty or longer than max_len.
        """
        max_len = self.config["max_len"]
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"TextClassifier: tokens must be integer ids, got {tokens.dtype}")
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= max_len:
            raise ValueError(
                f"TextClassifier: expected tokens (B, L) with L from 1 to max_len = {max_len}, "
                f"got {tuple(tokens.shape)}"
            )
        B, L = tokens.shape
        x = self.embedding(tokens)  # (B, L, d_model)
        if mask is not None and mask.dtype == torch.bool and mask.shape == (B, 1, 1, L):
            first = mask[:, 0, 0].int().argmax(dim=1)  # (B,), 0 where nothing is real
            place = (torch.arange(L, device=tokens.device) - first[:, None]).clamp(min=0)  # (B, L)
            x = x + self.position.pe[0, place].to(x.dtype)
        else:
            first = torch.zeros(B, dtype=torch.int64, device=tokens.device)
            x = self.position(x)
        encoded = self.encoder(x, mask, need_weights=need_weights)
        x, weights = encoded if need_weights else (encoded, None)
        logits = self.classify(x[torch.arange(B, device=x.device), first])
        return (logits, weights) if need_weights else logits


TinyTextClassifier = TextClassifier
"""The name that tutorials give to this model."""
