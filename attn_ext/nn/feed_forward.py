"""The feed-forward half of a Transformer block: two linear maps around an activation, or three with a gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GatedFeedForward", "feed_forward"]

_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu}


def feed_forward(
    d_model: int,
    d_ff: int,
    activation: str = "relu",
    *,
    dropout: float = 0.0,
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The net that a block applies to each token: (…, d_model) → (…, d_model).

    Args:
        d_model: width of the tokens.
        d_ff: width inside.
        activation: "relu", "gelu" (exact), "gelu_tanh" (its tanh approximation) or "silu" give a Sequential of
            Linear, activation, Linear; "swiglu" and "geglu" a `GatedFeedForward`.
        dropout: probability of dropping an inner feature while training.
        bias: whether the linear maps have a bias.
        device, dtype: where and as what the parameters are made.

    Raises:
        ValueError: an unknown activation, d_ff below 1.
    """
    if activation not in _PLAIN and activation not in _GATES:
        choices = ", ".join([*_PLAIN, *_GATES])
        raise ValueError(f"feed_forward: activation must be one of {choices}, got {activation!r}")
    if d_ff < 1:
        raise ValueError(f"feed_forward: d_ff must be at least 1, got {d_ff}")
    if activation in _GATES:
        return GatedFeedForward(
            d_model, d_ff, activation, dropout=dropout, bias=bias, device=device, dtype=dtype
        )
    act = _PLAIN[activation]()
    return nn.Sequential(
        nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype),
        # Inside one entry, so that the second linear map is entry 2 with and without dropout.
        nn.Sequential(act, nn.Dropout(dropout)) if dropout else act,
        nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype),
    )


class GatedFeedForward(nn.Module):
    """w_down(gate(w_gate(x)) ∘ w_up(x)): SwiGLU and GEGLU (Shazeer 2020, arXiv:2002.05202).

    Args:
        d_model, d_ff, dropout, bias, device, dtype: as in `feed_forward`.
        activation: "swiglu" (SiLU gate) or "geglu" (exact GELU gate).

    Attributes:
        w_gate, w_up: Linear(d_model, d_ff).
        w_down: Linear(d_ff, d_model).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "swiglu",
        *,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATES:
            raise ValueError(
                f"GatedFeedForward: activation must be one of {', '.join(_GATES)}, got {activation!r}"
            )
        self.activation = activation
        self.w_gate = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.w_up = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.w_down = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, d_model) → (…, d_model)."""
        return self.w_down(self.dropout(_GATES[self.activation](self.w_gate(x)) * self.w_up(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
