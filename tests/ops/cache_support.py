"""What the KV-cache tests share: tokens of several sequences, and stores of every kind that start full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from op_support import make
from torch import Tensor

import attn_ext

NAN = float("nan")
STORES = ("contiguous", "one layer of a stack", "tokens first", "pages of 1", "pages of 3", "pages of 16")


class Tokens(NamedTuple):
    """q, k, v of one sequence, (H, L, D) each."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.k.shape[1]


def tokens(
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 6),
    seed: int = 0,
) -> list[Tokens]:
    """Random tokens of some sequences."""
    return [
        Tokens(
            make((heads[0], n, dims[0]), dtype, seed=seed + 10 * b + 1),
            make((heads[1], n, dims[0]), dtype, seed=seed + 10 * b + 2),
            make((heads[1], n, dims[1]), dtype, seed=seed + 10 * b + 3),
        )
        for b, n in enumerate(lengths)
    ]


def stacked(sequences: Sequence[Tokens], start: int, end: int) -> Tokens:
    """The tokens start … end − 1 of every sequence as one batch, (B, H, n, D)."""
    return Tokens(*(torch.stack(x)[:, :, start:end] for x in zip(*sequences, strict=True)))


def packed(sequences: Sequence[Tokens], spans: Sequence[tuple[int, int]]) -> tuple[Tokens, Tensor]:
    """Some tokens of each sequence behind one another, (total, H, D), and their cu_seqlens."""
    chosen = Tokens(
        *(
            torch.cat([x[:, start:end].transpose(0, 1) for x, (start, end) in zip(each, spans, strict=True)])
            for each in zip(*sequences, strict=True)
        )
    )
    return chosen, torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).to(torch.int32)


def store(
    kind: str,
    sequences: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    dims: tuple[int, int] = (8, 6),
) -> dict[str, Any]:
    """k_cache, v_cache and what belongs to them, every slot NaN (int8: 77 with a scale of NaN)."""
    filler = 77 if dtype == torch.int8 else NAN
    page = int(kind.split()[-1]) if kind.startswith("pages") else 0
    result: dict[str, Any] = {}
    if page:
        width = -(-capacity // page)
        first, rows = sequences * width + 2, page
        order = torch.randperm(first, generator=torch.Generator().manual_seed(page))
        result["block_table"] = order[: sequences * width].view(sequences, width).to(torch.int32)
    else:
        first, rows = sequences, capacity
    for name, d in zip(("k", "v"), dims, strict=True):
        if kind == "one layer of a stack":
            whole = torch.full((first, 3, heads, rows, d), filler, dtype=dtype)
            result[f"{name}_cache"] = whole[:, 1]
        elif kind == "tokens first":
            result[f"{name}_cache"] = torch.full((first, rows, heads, d), filler, dtype=dtype).transpose(1, 2)
        else:
            result[f"{name}_cache"] = torch.full((first, heads, rows, d), filler, dtype=dtype)
        if dtype == torch.int8:
            result[f"{name}_scales"] = torch.full((first, heads, rows), NAN)
    return result


def snapshot(cache: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of every tensor of a store."""
    return {name: t.clone() for name, t in cache.items() if isinstance(t, Tensor)}


def assert_unchanged(cache: dict[str, Any], before: dict[str, Tensor]) -> None:
    """Bit for bit, NaN included."""
    for name, t in before.items():
        same = torch.equal(cache[name].contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))
        assert same, f"{name} has changed"


def full_pass(seq: Tokens, dtype: torch.dtype | None, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a whole sequence without a cache, causal unless the options say otherwise."""
    options = {"causal": "bottom_right", **options}
    return attn_ext.reference.attention(*seq, **options, return_lse=True, dtype=dtype)
