"""The rows of the decode benchmark: shapes and kinds of cache, what a step reads, and the tensors it works on."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ext import reference
from bench.common import DTYPES

ROOM = 64  # places behind the last token, as a cache that goes on growing has them


@dataclass(frozen=True)
class Case:
    """One row: a step stores token L − 1 of B sequences and attends from it to the last tokens, itself included."""

    dtype: str  # fp32, bf16, fp16 or fp64; int8: the cache, for bf16 queries
    B: int
    Hq: int
    Hkv: int
    L: int
    D: int
    page: int = 0  # tokens a page; 0: contiguous
    window: int = 0  # keys a query sees, in a ring of as many places; 0: all
    quick: bool = False

    @property
    def id(self) -> str:
        """The row's name across files: dtype, shape, kind."""
        return self._named(str(self.L))

    @property
    def family(self) -> str:
        """The same for any length."""
        return self._named("·")

    @property
    def length(self) -> int:
        return self.L

    def _named(self, length: str) -> str:
        kind = f" page {self.page}" if self.page else f" window {self.window}" if self.window else ""
        return f"{self.dtype} {self.B},{self.Hq}/{self.Hkv},{length},{self.D}{kind}"

    @property
    def query_dtype(self) -> torch.dtype:
        """Of queries, new tokens and output."""
        return torch.bfloat16 if self.dtype == "int8" else DTYPES[self.dtype]

    @property
    def visible(self) -> int:
        """Keys that the query sees."""
        return min(self.L, self.window) if self.window else self.L

    @property
    def bytes(self) -> int:
        """Keys and values that a step has to read (int8: with a scale of four bytes a token and head)."""
        size = self.D + 4 if self.dtype == "int8" else self.D * self.query_dtype.itemsize
        return 2 * self.B * self.Hkv * self.visible * size

    @property
    def flops(self) -> int:
        """q·k and weight·v, 2·D each for every query head and key."""
        return 4 * self.B * self.Hq * self.visible * self.D


SWEEP = (128, 256, 512, 1024, 2048, 4096, 8192, 32768, 65536)  # 16384 is a row anyway


def all_cases() -> list[Case]:
    """Every row, in the order of the table."""
    floats, everything = ("fp32", "bf16"), ("fp32", "bf16", "int8")
    cases = [
        *(Case(dtype, 1, 32, 8, 16384, 128) for dtype in everything),
        *(Case(dtype, 8, 32, 8, 2048, 128) for dtype in everything),
        *(Case(dtype, 1, 32, 32, 8192, 64) for dtype in everything),
        *(Case(dtype, 1, 32, 1, 16384, 128) for dtype in floats),  # one key/value head: bound by arithmetic
        *(Case(dtype, 1, 32, 8, 16384, 128, page=16) for dtype in everything),
        *(Case(dtype, 1, 32, 8, 16384, 128, window=4096, quick=True) for dtype in floats),
    ]
    for dtype in everything:
        cases += [Case(dtype, 1, 32, 8, L, 128, quick=L in (128, 1024, 4096)) for L in SWEEP]
    return cases


def gpu_cases() -> list[Case]:
    """Rows that are too large for a CPU's table, behind those of `all_cases` where a GPU runs."""
    return [
        Case("bf16", 64, 32, 8, 4096, 128, quick=True),
        Case("bf16", 64, 32, 8, 4096, 128, page=16),
        Case("int8", 64, 32, 8, 4096, 128),
        Case("bf16", 16, 32, 8, 16384, 128),
        Case("bf16", 1, 32, 8, 131072, 128),
    ]


# --- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """A row's query and the tokens that it sees; the last of them is the one that the step brings."""

    q: Tensor  # (B, Hq, 1, D)
    k: Tensor  # (B, Hkv, visible, D)
    v: Tensor  # (B, Hkv, visible, D)

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """k and v (B, Hkv, 1, D) of the token that the step stores."""
        return self.k[:, :, -1:], self.v[:, :, -1:]


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Random normal q, k, v, the same ones every time for the same row."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(case.B, heads, tokens, case.D, generator=generator).to(device, case.query_dtype)

    return Inputs(normal(case.Hq, 1), normal(case.Hkv, case.visible), normal(case.Hkv, case.visible))


def our_caches(case: Case, inputs: Inputs, copies: int) -> list[dict[str, Any]]:
    """Copies of a cache that holds all tokens but the last: keyword arguments of `attn_ext.attention_with_kv_cache`.

    The reference fills it, so that a wrong append of ours cannot hide. Places without a token hold NaN.
    """
    dtype = torch.int8 if case.dtype == "int8" else case.query_dtype
    device = inputs.q.device
    shared: dict[str, Any] = {}
    leading = (case.B, case.Hkv, case.window or case.L + ROOM)
    if case.page:
        width = math.ceil((case.L + ROOM) / case.page)
        leading = (case.B * width, case.Hkv, case.page)
        order = torch.randperm(leading[0], generator=torch.Generator().manual_seed(case.page))
        shared["block_table"] = order.view(case.B, width).to(device, torch.int32)
    if case.window:
        shared["ring"] = True
    unset = 77 if dtype == torch.int8 else math.nan
    tensors = {
        name: torch.full((*leading, case.D), unset, dtype=dtype, device=device)
        for name in ("k_cache", "v_cache")
    }
    if dtype == torch.int8:
        tensors |= {name: torch.full(leading, math.nan, device=device) for name in ("k_scales", "v_scales")}
    old = (inputs.k[:, :, :-1], inputs.v[:, :, :-1])
    reference.kv_cache_append_(k=old[0], v=old[1], cache_lengths=case.L - case.visible, **tensors, **shared)
    if case.window:
        shared["window"] = (case.window - 1, 0)
    rotating = {name: _copies(t, copies) for name, t in tensors.items()}
    return [{**{name: t[i] for name, t in rotating.items()}, **shared} for i in range(copies)]


def preallocated(case: Case, inputs: Inputs, copies: int) -> list[tuple[Tensor, Tensor]]:
    """What a cache in plain torch holds: k and v (B, Hkv, capacity, D), the tokens in their places."""
    capacity = case.window or case.L + ROOM
    places = torch.arange(case.L - case.visible, case.L - 1, device=inputs.k.device) % capacity
    filled = []
    for t in (inputs.k, inputs.v):
        cache = t.new_zeros(case.B, case.Hkv, capacity, case.D)
        cache[:, :, places] = t[:, :, :-1]
        filled.append(_copies(cache, copies))
    return list(zip(*filled, strict=True))


def past(inputs: Inputs, copies: int) -> list[tuple[Tensor, Tensor]]:
    """What a cache that is concatenated holds before the step: k and v (B, Hkv, visible − 1, D)."""
    return list(zip(*(_copies(t[:, :, :-1].contiguous(), copies) for t in (inputs.k, inputs.v)), strict=True))


def as_stored(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """k and v as the cache holds them: themselves, or for int8 what is left of them, in float32."""
    if case.dtype != "int8":
        return inputs.k, inputs.v
    size, device = inputs.k.shape, inputs.k.device
    k_cache, v_cache = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    k_scales, v_scales = (torch.zeros(size[:-1], device=device) for _ in range(2))
    reference.kv_cache_append_(k_cache, v_cache, inputs.k, inputs.v, 0, k_scales=k_scales, v_scales=v_scales)
    return k_cache * k_scales[..., None], v_cache * v_scales[..., None]


def _copies(t: Tensor, copies: int) -> tuple[Tensor, ...]:
    return t.expand(copies, *t.shape).contiguous().unbind() if copies > 1 else (t,)


# --- memory -------------------------------------------------------------------------------------------------------


def copies_of(case: Case, cache_bytes: int, available: int | None) -> int:
    """How many caches a rival goes through in turn, so that none of what it reads is still in a CPU cache.

    Args:
        cache_bytes: size of the last-level cache; the copies take four times that, or more.
        available: memory that is free; all rivals' copies take half of it at most, but there is always one.
    """
    wanted = math.ceil(4 * cache_bytes / case.bytes)
    affordable = wanted if available is None else available // (2 * 3 * _float_bytes(case))
    return max(1, min(wanted, affordable))


def memory_needed(case: Case) -> int:
    """Bytes that a row takes at least: inputs, three rivals' caches, what is concatenated, what is checked."""
    return 6 * _float_bytes(case)


def _float_bytes(case: Case) -> int:
    return 2 * case.B * case.Hkv * (case.visible + ROOM) * case.D * case.query_dtype.itemsize
