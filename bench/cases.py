"""The rows of the attention benchmark: shapes, options, how many flops they are, and their inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_ext import masks, reference
from bench.common import DTYPES

PASSES = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One row: (B, Hq/Hkv, Lq × Lk, D/Dv), a dtype, a pass and options."""

    dtype: str  # fp32, bf16, fp16, fp64
    direction: str  # one of PASSES
    B: int
    Hq: int
    Lq: int
    D: int
    Hkv: int = 0  # 0: as Hq
    Lk: int = 0  # 0: as Lq
    Dv: int = 0  # 0: as D
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    key_lengths: tuple[int, ...] | None = None
    mask: str = ""  # "padding" (B, 1, 1, Lk), "documents" (Lq, Lk): four of them, of unequal length
    bias: str = ""  # "fixed" or "learned" (with a gradient): (1, Hq, Lq, Lk)
    alibi: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    layout: str = (
        "heads"  # "heads": (B, H, L, D) in memory; "tokens": (B, L, H, D), as a module's projections lie
    )
    quick: bool = False  # also part of --quick

    def __post_init__(self) -> None:
        for name, other in (("Hkv", self.Hq), ("Lk", self.Lq), ("Dv", self.D)):
            if not getattr(self, name):
                object.__setattr__(self, name, other)

    @property
    def shape(self) -> str:
        """B,H,L,D, with Hq/Hkv, LqxLk and D/Dv where they differ."""
        heads = f"{self.Hq}" if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}"
        lengths = f"{self.Lq}" if self.Lq == self.Lk else f"{self.Lq}x{self.Lk}"
        width = f"{self.D}" if self.D == self.Dv else f"{self.D}/{self.Dv}"
        return f"{self.B},{heads},{lengths},{width}"

    @property
    def options(self) -> str:
        """What is special about the row, in words."""
        words = []
        if self.causal:
            words.append("causal" if self.causal is True else f"causal {self.causal}")
        if self.window:
            words.append("window " + ",".join("∞" if side is None else str(side) for side in self.window))
        if self.key_lengths:
            words.append("key lengths")
        if self.mask:
            words.append(f"{self.mask} mask")
        if self.bias:
            words.append(f"{self.bias} bias")
        words += [word for word, on in (("ALiBi", self.alibi), ("sinks", self.sinks)) if on]
        if self.softcap:
            words.append(f"softcap {self.softcap:g}")
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p:g}")
        if self.layout == "tokens":
            words.append("(B,L,H,D) layout")
        return " ".join(words)

    @property
    def name(self) -> str:
        """Shape and options: the row's name in tables."""
        return f"{self.shape} {self.options}".rstrip()

    @property
    def id(self) -> str:
        """The row's name across files: dtype, pass, shape, options."""
        return f"{self.dtype} {self.direction} {self.name}"


# --- flops --------------------------------------------------------------------------------------------------------


def flops(case: Case) -> float:
    """Floating point operations of a row: two products of 2 flops a multiply-add over the scores that are visible.

    forward = 2·D flops for q·k and 2·Dv for weight·v, for each of B·Hq·(visible scores) = 4·B·Hq·Lq·Lk·(D + Dv)/2
    where all are; a square causal mask shows half of them. backward = 2.5 × forward: it recomputes q·k and has four
    more products (dv, dp, dq, dk). Softmax, masks and dropout count as nothing.
    """
    forward = 4.0 * case.Hq * visible_scores(case) * (case.D + case.Dv) / 2
    return forward * {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[case.direction]


def visible_scores(case: Case) -> float:
    """Pairs of query and key that see each other, over the batch, for one head. Square causal: half of all."""
    plain_causal = case.causal and case.Lq == case.Lk and not (case.window or case.mask or case.key_lengths)
    if plain_causal:
        return case.B * case.Lq * case.Lk / 2
    seen = visible(case)
    if seen is None:
        return float(case.B * case.Lq * case.Lk)
    seen = seen[:, 0] if seen.dim() == 4 else seen[None]  # (B or 1, Lq or 1, Lk)
    return float(seen.sum()) * (case.B // seen.shape[0]) * (case.Lq // seen.shape[1])


def visible(case: Case) -> Tensor | None:
    """Which query sees which key: bool (Lq, Lk) or (B or 1, 1, Lq or 1, Lk); None where all see all."""
    lengths = None if case.key_lengths is None else torch.tensor(case.key_lengths)
    return combined_mask(case, mask_of(case), lengths)


def combined_mask(
    case: Case, mask: Tensor | None, key_lengths: Tensor | None, device: torch.device | None = None
) -> Tensor | None:
    """The same for a mask and lengths at hand (on `device`), which may be those of a part of the batch."""
    by_position = reference.visible(
        *(case.Lq, case.Lk), causal=case.causal, window=case.window, key_lengths=key_lengths, device=device
    )
    rules = [rule for rule in (by_position, mask) if rule is not None]
    return masks.combine(*rules) if rules else None


def mask_of(case: Case) -> Tensor | None:
    """The bool mask of the row, True = attend: (B, 1, 1, Lk) or (Lq, Lk)."""
    if case.mask == "padding":
        return masks.padding([case.Lk - (b * case.Lk) // (2 * case.B) for b in range(case.B)], case.Lk)
    if case.mask == "documents":
        ends = torch.tensor([0.4, 0.65, 0.85]) * case.Lq
        return masks.documents(torch.bucketize(torch.arange(case.Lq), ends.long(), right=True))
    return None


def alibi_bias(case: Case, slopes: Tensor) -> Tensor:
    """−slope·|distance| as a bias (1, Hq, Lq, Lk), the last query at the last key."""
    queries = torch.arange(case.Lq, device=slopes.device)[:, None] + (case.Lk - case.Lq)
    keys = torch.arange(case.Lk, device=slopes.device)
    return -slopes[None, :, None, None] * (keys - queries).abs()


# --- inputs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """All tensors of a row, made outside what is timed."""

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    grad_out: Tensor | None  # (B, Hq, Lq, Dv), None in a forward row
    options: dict[str, Any]  # keyword arguments of attn_ext.attention

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are asked for: q, k, v and a learned bias."""
        bias = self.options.get("bias")
        learned = [bias] if bias is not None and bias.requires_grad else []
        return [self.q, self.k, self.v, *learned]


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Random normal q, k, v and options, the same ones every time for the same row."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
    needs_grad = case.direction != "forward"

    def normal(*shape: int, dtype: torch.dtype = DTYPES[case.dtype]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def heads(H: int, L: int, width: int) -> Tensor:
        if case.layout == "tokens":
            return normal(case.B, L, H, width).transpose(1, 2)
        return normal(case.B, H, L, width)

    q, k, v = (
        heads(case.Hq, case.Lq, case.D),
        heads(case.Hkv, case.Lk, case.D),
        heads(case.Hkv, case.Lk, case.Dv),
    )
    options: dict[str, Any] = {}
    if case.causal:
        options["causal"] = case.causal
    if case.window:
        options["window"] = case.window
    if case.key_lengths:
        options["key_lengths"] = torch.tensor(case.key_lengths, device=device)
    mask = mask_of(case)
    if mask is not None:
        options["mask"] = mask.to(device)
    if case.bias:
        bias = normal(
            1, case.Hq, case.Lq, case.Lk, dtype=torch.float64 if case.dtype == "fp64" else torch.float32
        )
        options["bias"] = bias.requires_grad_(case.bias == "learned" and needs_grad)
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** (-8.0 * (torch.arange(case.Hq) + 1) / case.Hq)).to(device)
    if case.sinks:
        options["sinks"] = normal(case.Hq, dtype=torch.float32)
    if case.softcap:
        options["softcap"] = case.softcap
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
    grad_out = None
    if needs_grad:
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        grad_out = heads(case.Hq, case.Lq, case.Dv)
    return Inputs(q, k, v, grad_out, options)


# --- the rows -----------------------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """Every row, in the order of the table."""
    forward = (
        Case("fp32", "forward", 1, 1, 4, 8, quick=True),  # what a call costs
        Case("fp32", "forward", 200, 4, 8, 4),
        Case("fp32", "forward", 4, 12, 128, 64, quick=True),
        Case("fp32", "forward", 4, 12, 128, 64, layout="tokens"),
        Case("fp32", "forward", 8, 12, 197, 64),
        Case("fp32", "forward", 1, 8, 512, 64, quick=True),
        Case("fp32", "forward", 1, 8, 512, 64, causal=True, quick=True),
        Case("fp32", "forward", 1, 8, 4096, 64),
        Case("fp32", "forward", 1, 8, 4096, 64, causal=True),
        Case("fp32", "forward", 1, 8, 2048, 128),
    )
    fp32 = [
        *forward,
        Case("fp32", "forward", 1, 32, 1024, 128, Hkv=8, causal=True),
        Case("fp32", "forward", 2, 8, 512, 80),
        Case("fp32", "forward", 2, 8, 512, 33, quick=True),
        Case("fp32", "forward", 1, 8, 1024, 64, Dv=128),
        Case("fp32", "forward", 2, 8, 64, 64, Lk=1500),
        Case("fp32", "forward", 1, 8, 256, 64, Lk=2048, causal="bottom_right"),
        Case("fp32", "forward", 8, 12, 512, 64, key_lengths=(512, 448, 384, 320, 256, 192, 128, 64)),
        Case("fp32", "forward", 8, 12, 256, 64, mask="padding"),
        Case("fp32", "forward", 1, 8, 2048, 64, mask="documents", causal=True),
        Case("fp32", "forward", 1, 8, 4096, 64, causal=True, window=(256, 0)),
        Case("fp32", "forward", 1, 12, 512, 64, bias="fixed", quick=True),
        Case("fp32", "forward", 1, 16, 1024, 64, causal=True, alibi=True),
        Case("fp32", "forward", 1, 8, 1024, 256, Hkv=4, causal=True, softcap=50.0),
        Case("fp32", "forward", 1, 64, 512, 64, Hkv=8, causal=True, window=(128, 0), sinks=True),
        Case("fp32", "backward", 4, 12, 128, 64, quick=True),
        Case("fp32", "backward", 8, 12, 197, 64),
        Case("fp32", "backward", 1, 8, 512, 64, causal=True),
        Case("fp32", "backward", 1, 8, 4096, 64),
        Case("fp32", "backward", 1, 8, 4096, 64, causal=True),
        Case("fp32", "backward", 1, 8, 2048, 128),
        Case("fp32", "backward", 1, 32, 1024, 128, Hkv=8, causal=True),
        Case("fp32", "forward+backward", 1, 1, 4, 8),
        Case("fp32", "forward+backward", 4, 12, 128, 64),
        Case("fp32", "forward+backward", 1, 8, 1024, 64, causal=True),
        Case("fp32", "forward+backward", 1, 12, 512, 64, bias="learned", quick=True),
        Case("fp32", "forward+backward", 4, 12, 128, 64, dropout_p=0.1, quick=True),
    ]
    wanted_in_bf16 = [c for c in forward if c.Lq >= 128 and c.layout == "heads"]
    bf16 = [replace(c, dtype="bf16", quick=c.quick and not c.causal) for c in wanted_in_bf16] + [
        Case("bf16", "forward", 1, 32, 1024, 128, Hkv=8, causal=True),
        Case("bf16", "backward", 1, 8, 512, 64, quick=True),
        Case("bf16", "backward", 1, 8, 4096, 64),
        Case("bf16", "backward", 1, 8, 4096, 64, causal=True),
        Case("bf16", "backward", 1, 8, 2048, 128),
        Case("bf16", "forward+backward", 4, 12, 128, 64),
    ]
    others = [
        Case("fp16", "forward", 1, 8, 512, 64, quick=True),
        Case("fp16", "forward", 1, 8, 2048, 128),
        Case("fp16", "backward", 1, 8, 512, 64),
        Case("fp64", "forward", 1, 8, 512, 64, quick=True),
        Case("fp64", "backward", 1, 8, 512, 64),
    ]
    return [*fp32, *bf16, *others]


def gpu_cases() -> list[Case]:
    """Rows that are too large for a CPU's table, behind those of `all_cases` where a GPU runs."""
    return [
        *(
            Case(dtype, direction, 4, 16, 4096, 128, causal=causal)
            for dtype in ("bf16", "fp16")
            for direction in ("forward", "backward")
            for causal in (False, True)
        ),
        Case("bf16", "forward", 16, 16, 1024, 64, causal=True, quick=True),
        Case("bf16", "forward", 1, 16, 16384, 128, causal=True),
        Case("bf16", "forward", 2, 32, 8192, 128, Hkv=8, causal=True),
        Case("bf16", "forward", 4, 16, 4096, 64),
        Case("bf16", "forward", 4, 8, 4096, 256, causal=True),
        Case("bf16", "backward", 4, 16, 4096, 64, causal=True),
        Case("fp32", "forward", 4, 16, 4096, 128),
        Case("fp32", "backward", 4, 16, 2048, 64),
    ]


def select(
    cases: Iterable[Case], *, rows: Iterable[str] = (), dtypes: Iterable[str] = (), passes: Iterable[str] = ()
) -> list[Case]:
    """The cases whose id holds one of the `rows` texts, of these dtypes and passes; empty filters let all through."""
    rows, dtypes, passes = list(rows), list(dtypes), list(passes)
    return [
        case
        for case in cases
        if (not rows or any(text.lower() in case.id.lower() for text in rows))
        and (not dtypes or case.dtype in dtypes)
        and (not passes or case.direction in passes)
    ]


def full_scores(case: Case) -> int:
    """All scores of the row, visible or not: what a plain implementation would hold at once."""
    return math.prod((case.B, case.Hq, case.Lq, case.Lk))
