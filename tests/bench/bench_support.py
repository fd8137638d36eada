"""What the tests of the benchmarks share: the way to the `bench` package, and made-up results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # `bench` is no part of the installed package

import pytest  # noqa: E402

from bench import attention, cases, common, over_length  # noqa: E402

MACHINE = {
    "cpu": "A CPU",
    "device": "cpu",
    "threads": 2,
    "isa": "scalar",
    "attn_ext": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "compiler": "GCC",
    "time": "2030-01-02T03:04:05+00:00",
}
CEILINGS = {"fma_fp32": 100.0, "fma_fp64": 50.0, "dot_bf16": None, "read_gbs": 10.0}


def made_up_row(case: cases.Case, ours_us: float, torch_us: float, spread: float = 0.05) -> dict[str, Any]:
    """A row as `bench attention` writes it, with p20 and p80 `spread` away from the medians."""

    def timing(us: float) -> dict[str, float]:
        return common.Timing(us, us * (1 - spread), us * (1 + spread), us * 2, 10, 1).report()

    row = {
        "id": case.id,
        "case": case.name,
        "dtype": case.dtype,
        "pass": case.direction,
        "flops": cases.flops(case),
        "check": {"ok": True, "worst": "", "checked": "all heads"},
        "rivals": {
            "attn_ext": {"how": "", **timing(ours_us)},
            "torch": {"how": "SDPA", **timing(torch_us)},
            "onnxruntime": {"skipped": "onnxruntime is not installed"},
        },
        "memory": None,
        "ratio": torch_us / ours_us,
    }
    attention.add_rates(row, CEILINGS)
    return row


def made_up_result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole result file."""
    return {
        "schema": common.SCHEMA,
        "bench": "attention",
        "machine": dict(MACHINE),
        "settings": {},
        "ceilings": {"before": CEILINGS, "after": CEILINGS, "mean": CEILINGS},
        "rows": rows,
        "memory_check": None,
    }


def quick_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round a rival, without pauses and warm-up, in the benchmarks over length."""
    honest = over_length.time_runners

    def time_runners(*args: Any, **options: Any) -> dict[str, common.Timing]:
        return honest(*args, **{**options, "rounds": 1, "pause": 0.0})

    monkeypatch.setattr(over_length, "time_runners", time_runners)
    monkeypatch.setattr(common, "WARM_UP_SECONDS", 0.0)
