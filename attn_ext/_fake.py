"""Outputs without data, as the compiled operators would make them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def empty_in_order_of(like: Tensor, width: Any) -> Tensor:
    """As csrc/tensors.cpp does it: dense, the dims in memory in the order of like's, the last one `width` wide."""
    rank = like.dim()
    key: list[Any] = [0] * rank
    for d in reversed(range(rank)):
        tells = like.shape[d] > 1 and like.stride(d) != 0
        key[d] = like.stride(d) if tells else (key[d + 1] if d + 1 < rank else 0)
    order = sorted(range(rank), key=lambda d: key[d], reverse=True)  # stable
    sizes = [*like.shape[:-1], width]
    strides: list[Any] = [0] * rank
    stride: Any = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(sizes[d], 1)
    return like.new_empty_strided(sizes, strides)
