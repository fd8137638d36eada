"""Where a token stands: added to what it is, or turned into its queries and keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from attn_ext._arguments import out_of_reach

__all__ = ["PositionalEncoding", "RotaryEmbedding", "next_positions"]

_LEAST_ROWS = 64  # of the tables that a RotaryEmbedding keeps


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

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (B, L, d_model) → x + pe, in the dtype of x.

        Args:
            x: the tokens; with positions also packed, (total, d_model).
            positions: where they stand, integers below max_len, one for each token: (B, L) or (total,);
                0 … L − 1 where not given.

        Raises:
            ValueError: another width, a sequence longer than max_len, or positions of another shape.
        """
        _, max_len, d_model = self.pe.shape
        if positions is not None:
            if x.dim() not in (2, 3) or x.shape[-1] != d_model or positions.shape != x.shape[:-1]:
                raise ValueError(
                    f"PositionalEncoding: expected x (B, L, {d_model}) with positions (B, L), or x (total, {d_model}) "
                    f"with positions (total,), got {tuple(x.shape)} and {tuple(positions.shape)}"
                )
            return x + self.pe[0][positions].to(x.dtype)
        if x.dim() != 3 or x.shape[1] > max_len or x.shape[2] != d_model:
            raise ValueError(
                f"PositionalEncoding: expected x (B, at most {max_len}, {d_model}), got {tuple(x.shape)}"
            )
        return x + self.pe[:, : x.shape[1]].to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Turns pairs of features of queries and keys by angles that grow with the position (Su et al. 2021,
    arXiv:2104.09864, equation 34): the score of two tokens then depends on their distance alone.

        angle of pair n at position p = p · base^(−2n / rotary_dim)

    There are no parameters and no buffers: angles are computed in float64, so that a cast of the model to bf16
    cannot spoil them and no longest sequence has to be named.

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
        # What `tables` has computed. No buffers: they can be computed again, and stay out of the state dict.
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

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

    def tables(
        self, length: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of the positions 0, 1, …, as the KV caches take them (`rotary=`).

        They are kept, and grow by doubling, so that decoding does not compute them again. Compiled code takes
        those that are there if they suffice: call this before, as `CausalLM.new_cache` does.

        Args:
            length: for how many positions at least.
            dtype: float64 for tensors of float64, float32 for all others.
            device: where.

        Returns:
            (cos, sin), (at least `length`, rotary_dim / 2) each. Not to be written to.

        Raises:
            ValueError: a negative length, or another dtype.
        """
        if length < 0 or dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"RotaryEmbedding: expected a length of at least 0 and float32 or float64, got {length} and {dtype}"
            )
        key = (dtype, torch.device(device))
        kept = self._tables.get(key)
        rows = 0 if kept is None else kept[0].shape[0]
        if kept is not None and length <= rows:
            return kept
        if out_of_reach(key[1]):  # tables of a graph are its own: written anew with each replay
            return self._new_tables(length, *key)
        with torch.inference_mode(False):  # a tensor of inference mode could not be used everywhere
            kept = self._new_tables(max(_LEAST_ROWS, length, 2 * rows), *key)
        if type(kept[0]) is Tensor:  # one without data (a fake tensor) lives no longer than its mode
            self._tables[key] = kept
        return kept

    def _new_tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        angle = self._angles(torch.arange(length, device=device))
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out the tables."""
        return {**self.__dict__, "_tables": {}}

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
        angle = self._angles(positions)
        if angle.dim() == 3:
            angle = angle.unsqueeze(1)  # the same for all heads
        dtype = table_dtype(x.dtype)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _angles(self, positions: Tensor) -> Tensor:
        """positions (…) → (…, rotary_dim / 2), float64."""
        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=positions.device)
        return positions[..., None] * self.base ** (-pair / self.rotary_dim)

    def extra_repr(self) -> str:
        part = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"head_dim={self.head_dim}, base={self.base}{part}, interleaved={self.interleaved}"


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what queries and keys of `dtype` are turned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_positions(lengths: Tensor, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Where new tokens stand behind those that a cache holds.

    Args:
        lengths: (B,) how many tokens each sequence has already.
        tokens: the new ones, (B, n); or packed (total,), by cu_seqlens (B + 1,).

    Returns:
        int64, shaped as tokens.
    """
    if cu_seqlens is None:
        return lengths[:, None] + torch.arange(tokens.shape[1], device=lengths.device)
    total = tokens.shape[0]
    before = (lengths - cu_seqlens[:-1]).repeat_interleave(cu_seqlens.diff(), output_size=total)
    return before + torch.arange(total, device=lengths.device)
