"""A small speed table against `F.scaled_dot_product_attention` (in full: `python -m bench attention`)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import attention


@dataclass(frozen=True)
class Case:
    """One row. B batch, Hq/Hkv heads, Lq/Lk lengths, D head dim."""

    name: str
    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    key_lengths: Sequence[int] | None = None
    bias: bool = False  # (1, Hq, Lq, Lk), with a gradient
    backward: bool = False
    quick: bool = False  # also part of the quick table

    @property
    def shape(self) -> str:
        """(B, Hq/Hkv, Lq, Lk, D) without what is said twice."""
        heads = str(self.Hq) if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}"
        lengths = str(self.Lq) if self.Lq == self.Lk else f"{self.Lq}, {self.Lk}"
        return f"{self.B}, {heads}, {lengths}, {self.D}"


CASES = (
    Case("short batch", 4, 12, 12, 128, 128, 64, quick=True),
    Case(
        "padded batch", 8, 12, 12, 256, 256, 64, key_lengths=(256, 224, 192, 160, 128, 96, 64, 32), quick=True
    ),
    Case("medium", 1, 8, 8, 512, 512, 64, quick=True),
    Case("long, causal", 1, 8, 8, 2048, 2048, 64, causal=True),
    Case("long, D 128", 1, 8, 8, 2048, 2048, 128),
    Case("bf16", 1, 8, 8, 1024, 1024, 64, dtype=torch.bfloat16, quick=True),
    Case("train, causal", 1, 8, 8, 1024, 1024, 64, causal=True, backward=True),
    Case("train, learned bias", 1, 8, 8, 512, 512, 64, bias=True, backward=True, quick=True),
    Case("one query", 1, 32, 8, 1, 4096, 128),
    Case("tiny call", 1, 1, 1, 4, 4, 8, quick=True),
)


@dataclass(frozen=True)
class Row:
    """One measured case. Times are of one call, in seconds."""

    case: Case
    agrees: bool
    error: float  # largest difference of anything returned from float64
    torch_error: float
    ours: list[float] = field(default_factory=list)  # one a round
    torch: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times as fast as torch (medians)."""
        return statistics.median(self.torch) / statistics.median(self.ours)

    def report(self) -> dict[str, Any]:
        """The row, ready for JSON."""
        case = self.case
        return {
            "case": case.name,
            "shape": {"B": case.B, "Hq": case.Hq, "Hkv": case.Hkv, "Lq": case.Lq, "Lk": case.Lk, "D": case.D},
            "dtype": str(case.dtype).removeprefix("torch."),
            "causal": case.causal,
            "backward": case.backward,
            "agrees": self.agrees,
            "max_error": {"attn_ext": self.error, "torch": self.torch_error},
            "seconds": {"attn_ext": _spread(self.ours), "torch": _spread(self.torch)} if self.ours else None,
            "ratio": self.ratio if self.ours else None,
        }


def measure(quick: bool, on_case: Callable[[int], None] = lambda steps: None) -> list[Row]:
    """Check every case against float64, then time it (a case that fails the check is not timed)."""
    rows = []
    for case in cases(quick):
        rows.append(_measure_case(case, seconds=0.4 if quick else 1.2, rounds=5 if quick else 9))
        on_case(1)
    return rows


def cases(quick: bool) -> list[Case]:
    """The cases of the table."""
    return [case for case in CASES if case.quick or not quick]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, rows where torch is faster included."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    table.add_column("B, H, L, D", no_wrap=True)
    table.add_column("attn_ext ms", justify="right", no_wrap=True)
    table.add_column("torch ms", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for row in rows:
        if not row.ours:
            failed = Text("FAILED", style="bold red")
            table.add_row(row.case.name, row.case.shape, failed, Text(f"error {row.error:.1e}"), "")
            continue
        style = "green" if row.ratio >= 1 else "yellow"
        table.add_row(
            row.case.name,
            row.case.shape,
            _cell(row.ours),
            _cell(row.torch),
            Text(f"{row.ratio:.2f}×", style=style),
        )
    console.print(table)
    slower = sum(1 for row in rows if row.ours and row.ratio < 1)
    console.print(
        "Median of one call ± half the spread of the middle 60 %; fp32 unless named. Outputs and gradients "
        f"were first checked against float64. attn_ext is slower than torch in {slower} of {len(rows)} rows.",
        style="dim",
    )


def _measure_case(case: Case, seconds: float, rounds: int) -> Row:
    inputs = _inputs(case)
    ours, theirs = _runner(case, inputs, use_torch=False), _runner(case, inputs, use_torch=True)
    double = {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()
    }
    truth = _runner(case, double, use_torch=True)()
    errors = [_error(found, truth) for found in (ours(), theirs())]
    # At most twice the error of torch in the same dtype (gradients: three times), as flash-attention tests.
    factor, slack = (3.0, 1e-4) if case.backward else (2.0, 1e-5)
    row = Row(case, agrees=errors[0] <= factor * errors[1] + slack, error=errors[0], torch_error=errors[1])
    if not row.agrees:
        return row

    calls = _calls_in(ours, theirs, seconds / (2 * rounds))
    for round_ in range(rounds):
        pair = [(ours, row.ours), (theirs, row.torch)]
        for call, times in pair if round_ % 2 == 0 else reversed(pair):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
    return row


def _inputs(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).requires_grad_(case.backward)

    inputs = {
        "q": draw(case.B, case.Hq, case.Lq, case.D),
        "k": draw(case.B, case.Hkv, case.Lk, case.D),
        "v": draw(case.B, case.Hkv, case.Lk, case.D),
    }
    if case.bias:
        inputs["bias"] = draw(1, case.Hq, case.Lq, case.Lk)
    if case.backward:
        inputs["grad_out"] = draw(case.B, case.Hq, case.Lq, case.D).detach()
    return inputs


def _runner(case: Case, inputs: dict[str, Tensor], *, use_torch: bool) -> Callable[[], list[Tensor]]:
    """Returns the call to time, which returns the output and, for training, every gradient."""
    q, k, v, bias = inputs["q"], inputs["k"], inputs["v"], inputs.get("bias")
    lengths = None if case.key_lengths is None else torch.tensor(case.key_lengths)
    mask = bias
    if lengths is not None:
        mask = (torch.arange(case.Lk) < lengths[:, None])[:, None, None, :]
    grouped = case.Hq != case.Hkv

    def forward() -> Tensor:
        if use_torch:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=case.causal, enable_gqa=grouped
            )
        return attention(q, k, v, bias=bias, causal=case.causal, key_lengths=lengths)

    def training() -> list[Tensor]:
        output = forward()
        wanted = [tensor for tensor in (q, k, v, bias) if tensor is not None]
        return [output.detach(), *torch.autograd.grad(output, wanted, inputs["grad_out"])]

    def inference() -> list[Tensor]:
        with torch.no_grad():
            return [forward()]

    return training if case.backward else inference


def _error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference of anything; NaN counts as infinite."""
    largest = max(float((a.double() - b).abs().max()) for a, b in zip(found, truth, strict=True))
    return largest if all(bool(a.isfinite().all()) for a in found) else float("inf")


def _calls_in(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> int:
    """How many calls of the slower one fill `seconds`. Both have run once; this warms them up."""
    slowest = 0.0
    for call in (ours, theirs):
        start = time.perf_counter()
        call()
        slowest = max(slowest, time.perf_counter() - start)
    return max(1, int(seconds / slowest))


def _spread(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p20": ordered[round(0.2 * last)],
        "p80": ordered[round(0.8 * last)],
    }


def _cell(times: Sequence[float]) -> str:
    spread = _spread(times)
    half = (spread["p80"] - spread["p20"]) / 2
    milliseconds = spread["median"] * 1e3
    digits = max(0, 2 - math.floor(math.log10(milliseconds)))  # three figures
    return f"{milliseconds:.{digits}f} ±{half / spread['median']:4.0%}"
