"""Attention by hand, in NumPy and float64, one named array after the other; then the same from the C++ kernels.

    walk = walk_through()
    walk.plain.weights     # (7, 7)
    walk.differences       # largest difference of the kernel's numbers from these

Letters: L = 7 tokens, d = 4 features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops import attention

__all__ = ["D_MODEL", "HEADS", "LENGTH", "PADDING", "Difference", "Steps", "Walk", "attend", "walk_through"]

LENGTH = 7
D_MODEL = 4
HEADS = 2
PADDING = 2  # tokens at the end of the padded example

# What the kernel's float64 and float32 may differ from NumPy's float64.
BOUNDS = {"float64": 1e-12, "float32": 1e-4}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """The arrays of one attention, in the order in which they are computed; a leading dim where there are heads."""

    Q: Array  # (L, d)
    K: Array  # (L, d)
    V: Array  # (L, d)
    scores: Array  # (L, L)
    scaled: Array  # (L, L); −inf where the mask hides
    weights: Array  # (L, L)
    output: Array  # (L, d)


@dataclass(frozen=True)
class Difference:
    """How far the kernel's numbers are from NumPy's, at most."""

    example: str  # "plain", "heads", "causal" or "padding"
    dtype: str
    output: float
    weights: float

    @property
    def fine(self) -> bool:
        """Whether both are within rounding (NaN is not)."""
        return self.output <= BOUNDS[self.dtype] and self.weights <= BOUNDS[self.dtype]


@dataclass(frozen=True)
class Walk:
    """Everything that `walk_through` computed."""

    seed: int
    X: Array  # (L, d)
    W_Q: Array  # (d, d)
    W_K: Array
    W_V: Array
    plain: Steps
    heads: Steps  # Q, K, V (HEADS, L, d / HEADS)
    merged: Array  # (L, d): the heads' outputs side by side
    causal_mask: NDArray[np.bool_]  # (L, L), True = may look
    causal: Steps
    padding_mask: NDArray[np.bool_]  # (1, L)
    padding: Steps
    differences: list[Difference]

    @property
    def ok(self) -> bool:
        """Whether the kernel gave the same numbers throughout."""
        return all(difference.fine for difference in self.differences)


def attend(Q: Array, K: Array, V: Array, mask: NDArray[np.bool_] | None = None) -> Steps:
    """softmax(Q·Kᵀ/√d)·V, step by step.

    Args:
        Q, K, V: (L, d), or (heads, L, d).
        mask: True = may look; broadcasts to the scores. Every row has to see something.
    """
    scores = Q @ K.swapaxes(-1, -2)
    scaled = scores / np.sqrt(Q.shape[-1])
    if mask is not None:
        scaled = np.where(mask, scaled, -np.inf)
    raised = np.exp(scaled - scaled.max(axis=-1, keepdims=True))  # no exponent above 0: nothing overflows
    weights = raised / raised.sum(axis=-1, keepdims=True)
    return Steps(Q, K, V, scores, scaled, weights, weights @ V)


def walk_through(seed: int = 42) -> Walk:
    """Draw X, W_Q, W_K and W_V (in this order, from NumPy's legacy generator) and attend in four ways."""
    draw = np.random.RandomState(seed).randn  # what np.random.seed(seed) and np.random.randn give
    X = draw(LENGTH, D_MODEL)
    W_Q, W_K, W_V = (draw(D_MODEL, D_MODEL) for _ in range(3))
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    causal_mask = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    padding_mask = np.arange(LENGTH)[None, :] < LENGTH - PADDING
    examples = {
        "plain": (attend(Q, K, V), None),
        "heads": (attend(_split(Q), _split(K), _split(V)), None),
        "causal": (attend(Q, K, V, causal_mask), causal_mask),
        "padding": (attend(Q, K, V, padding_mask), padding_mask),
    }
    return Walk(
        seed=seed,
        X=X,
        W_Q=W_Q,
        W_K=W_K,
        W_V=W_V,
        plain=examples["plain"][0],
        heads=examples["heads"][0],
        merged=examples["heads"][0].output.swapaxes(0, 1).reshape(LENGTH, D_MODEL),
        causal_mask=causal_mask,
        causal=examples["causal"][0],
        padding_mask=padding_mask,
        padding=examples["padding"][0],
        differences=[
            _compare(name, steps, mask, dtype)
            for name, (steps, mask) in examples.items()
            for dtype in (torch.float64, torch.float32)
        ],
    )


def _split(x: Array) -> Array:
    """(L, d) → (L, HEADS, d / HEADS) → (HEADS, L, d / HEADS)."""
    return x.reshape(LENGTH, HEADS, D_MODEL // HEADS).swapaxes(0, 1)


def _compare(name: str, steps: Steps, mask: NDArray[np.bool_] | None, dtype: torch.dtype) -> Difference:
    """Run the kernel on the same Q, K, V (a head dim is added where there is none) and compare."""
    q, k, v = (
        torch.from_numpy(np.ascontiguousarray(x if x.ndim == 3 else x[None])).to(dtype)
        for x in (steps.Q, steps.K, steps.V)
    )
    output, weights = attention(
        q, k, v, mask=None if mask is None else torch.from_numpy(mask), return_weights=True
    )
    return Difference(
        name,
        str(dtype).removeprefix("torch."),
        float(np.abs(output.double().numpy() - steps.output).max()),
        float(np.abs(weights.double().numpy() - steps.weights).max()),
    )
