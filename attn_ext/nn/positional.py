"""Where a token stands, added to what it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["PositionalEncoding"]


class PositionalEncoding(nn.Module):
    """Adds sinusoids with wavelengths from 2π to 10000·2π tokens to a sequence (Vaswani et al. 2017).

        pe[position, 2i]     = sin(position / 10000^(2i / d_model))
        pe[position, 2i + 1] = cos(position / 10000^(2i / d_model))

    Args:
        d_model: width of the tokens, even or odd.
        max_len: the longest sequence that will come.

    Attributes:
        pe: buffer (1, max_len, d_model), fp32, part of the state dict.
    """

    pe: Tensor

    def __init__(self, d_model: int, max_len: int = 512) -> None:
        super().__init__()
        if d_model < 1 or max_len < 1:
            raise ValueError(
                f"PositionalEncoding: d_model and max_len must be at least 1, got {d_model} and {max_len}"
            )
        position = torch.arange(max_len)[:, None]  # (max_len, 1)
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))  # (⌈d_model / 2⌉,)
        waves = torch.stack((torch.sin(position * rate), torch.cos(position * rate)), dim=-1)
        # sin and cos take turns; an odd width has no room for the last cos
        self.register_buffer("pe", waves.flatten(1)[None, :, :d_model].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, d_model) → x + pe, in the dtype of x.

        Raises:
            ValueError: another width, or a sequence longer than max_len.
        """
        _, max_len, d_model = self.pe.shape
        if x.dim() != 3 or x.shape[1] > max_len or x.shape[2] != d_model:
            raise ValueError(
                f"PositionalEncoding: expected x (B, at most {max_len}, {d_model}), got {tuple(x.shape)}"
            )
        return x + self.pe[:, : x.shape[1]].to(x.dtype)
