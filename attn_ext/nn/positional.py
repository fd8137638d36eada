"""Where a token stands: added to what it is, or turned into its queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["PositionalEncoding", "RotaryEmbedding"]


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


class RotaryEmbedding(nn.Module):
    """Turns pairs of features of queries and keys by angles that grow with the position (Su et al. 2021,
    arXiv:2104.09864, equation 34): the score of two tokens then depends on their distance alone.

        angle of pair n at position p = p · base^(−2n / rotary_dim)

    There are no parameters and no buffers: angles are computed in float64 for each call, so that a cast of the
    model to bf16 cannot spoil them and no longest sequence has to be named.

    Args:
        head_dim: D, width of a head.
        base: the longest wavelength is about 2π·base tokens; Llama 3 has 500000.
        rotary_dim: how many of the D features are turned, the first ones; D where not given.
        interleaved: False pairs feature n with n + rotary_dim / 2 (Llama, GPT-NeoX), True pairs 2n with 2n + 1
            (the paper, GPT-J).

    Raises:
        ValueError: rotary_dim odd, below 2 or above head_dim; base not above 0.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not (2 <= rotary_dim <= head_dim and rotary_dim % 2 == 0):
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even and 2 to head_dim = {head_dim}, got {rotary_dim}"
            )
        if not 0 < base < math.inf:
            raise ValueError(f"RotaryEmbedding: base must be above 0, got {base}")
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        self.base = base
        self.interleaved = interleaved

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turn queries or keys.

        Args:
            x: (B, H, L, D), fp32, bf16, fp16 or fp64; turned in fp32 (fp64) and rounded once.
            positions: integers (L,) or (B, L); 0 … L − 1 where not given.

        Returns:
            (B, H, L, D), dtype of x.

        Raises:
            ValueError: x of another width, or positions of another shape.
            TypeError: positions that are no integers.
        """
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(f"RotaryEmbedding: expected x (B, H, L, {self.head_dim}), got {tuple(x.shape)}")
        cos, sin = self._waves(x, positions)  # (L, rotary_dim / 2) or (B, 1, L, rotary_dim / 2)
        exact = x[..., : self.rotary_dim].to(cos.dtype)
        if self.interleaved:
            first, second = exact.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = exact.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        if self.interleaved:
            whole = torch.stack(turned, dim=-1).flatten(-2)
        else:
            whole = torch.cat(turned, dim=-1)
        if self.rotary_dim == self.head_dim:
            return whole.to(x.dtype)
        return torch.cat((whole.to(x.dtype), x[..., self.rotary_dim :]), dim=-1)

    def _waves(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, _, length, _ = x.shape
        if positions is None:
            positions = torch.arange(length, device=x.device)
        elif positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"RotaryEmbedding: positions must be integers, got {positions.dtype}")
        elif tuple(positions.shape) not in ((length,), (batch, length)):
            raise ValueError(
                f"RotaryEmbedding: expected positions ({length},) or ({batch}, {length}), "
                f"got {tuple(positions.shape)}"
            )
        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=x.device)
        angle = positions[..., None] * self.base ** (-pair / self.rotary_dim)
        if angle.dim() == 3:
            angle = angle.unsqueeze(1)  # the same for all heads
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        part = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"head_dim={self.head_dim}, base={self.base}{part}, interleaved={self.interleaved}"
