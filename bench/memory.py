"""How far does one call raise the peak of memory, beyond what it returns?

Without --row: the promise of linear memory. At (1,8,16384,64) fp32, where the scores alone would be 8.6 GB, forward and
backward together may raise the peak by the output, the gradients, the row statistics and 64 MB, no more. Exit code 1
where they do.

Every measurement is a process of its own, so that no scratch memory kept from an earlier call hides what a call needs.
The peak is the kernel's own (VmHWM), reset through /proc/self/clear_refs just before the call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case, all_cases, make_inputs
from bench.common import BenchError, say

ALLOWANCE_BYTES = 64_000_000
ROW_STATISTICS = 3  # lse, row max and row sum: one fp32 number a row each

PROMISE = Case("fp32", "forward+backward", 1, 8, 16384, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench memory`."""
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--row", help="measure this row of the attention benchmark instead, named by its full id"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument(
        "--rivals", default="attn_ext", help="attn_ext, or attn_ext,torch (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Measures in this very process (which is why `measure` starts one of its own)."""
    threads = options.threads or torch.get_num_threads()
    if threads < 1:
        raise BenchError(f"--threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
    if options.row is None:
        check = check_promise(threads)
        print(json.dumps(check) if options.json else promise_line(check))
        return 0 if check["kept"] in (True, None) else 1
    case = next((c for c in (*all_cases(), PROMISE) if c.id == options.row), None)
    if case is None:
        raise BenchError(f"there is no row {options.row!r}; `python -m bench attention --list` names them")
    measured = _measure_here(case, options.rivals.split(","))
    if options.json:
        print(json.dumps(measured))
    else:
        for name, numbers in measured.items():
            print(f"{name}: {memory_cell(numbers)} MB (returned + extra)")
    return 0


def memory_cell(numbers: dict[str, float] | None) -> str:
    """`returned+extra` in MB (1e6 bytes)."""
    if numbers is None:
        return "–"
    return f"{numbers['returned_bytes'] / 1e6:.1f}+{numbers['extra_bytes'] / 1e6:.1f}"


def measure(
    case: Case, threads: int, rivals: Sequence[str] = ("attn_ext",)
) -> dict[str, dict[str, float] | None]:
    """By rival: peak_bytes (how far the peak rose), returned_bytes (output and gradients), extra_bytes (the rest).

    None for all where the system does not offer a peak that can be reset (only Linux does), or where the process fails.
    """
    command = [sys.executable, "-m", "bench", "memory", "--json", "--threads", str(threads)]
    command += ["--row", case.id, "--rivals", ",".join(rivals)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        say(f"    memory of {case.id} was not measured: {last}")
        return dict.fromkeys(rivals)
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_promise(threads: int) -> dict[str, Any]:
    """Measures PROMISE: the rise of the peak, what is allowed, and whether it was kept (None: not measurable here)."""
    measured = measure(PROMISE, threads)["attn_ext"]
    statistics = ROW_STATISTICS * 4 * PROMISE.B * PROMISE.Hq * PROMISE.Lq
    returned = 4 * PROMISE.B * PROMISE.Lq * (2 * PROMISE.Hq * PROMISE.D + 2 * PROMISE.Hkv * PROMISE.D)
    allowed = returned + statistics + ALLOWANCE_BYTES
    peak = None if measured is None else measured["peak_bytes"]
    return {
        "row": PROMISE.id,
        "peak_bytes": peak,
        "returned_bytes": returned,
        "row_statistics_bytes": statistics,
        "allowed_bytes": allowed,
        "kept": None if peak is None else peak <= allowed,
    }


def promise_line(check: dict[str, Any]) -> str:
    """The check in words, both numbers in it."""
    megabytes = {
        name: value / 1e6 for name, value in check.items() if name.endswith("_bytes") and value is not None
    }
    allowed = (
        f"{megabytes['allowed_bytes']:.1f} MB allowed (output and gradients {megabytes['returned_bytes']:.1f}, "
        f"row statistics {megabytes['row_statistics_bytes']:.1f}, and {ALLOWANCE_BYTES / 1e6:.0f})"
    )
    if check["kept"] is None:
        return f"memory of {check['row']}: not measurable on this system; {allowed}"
    verdict = "kept" if check["kept"] else "BROKEN"
    return (
        f"memory of {check['row']}: the peak rose by {megabytes['peak_bytes']:.1f} MB, {allowed}: {verdict}"
    )


# --- in the measuring process -------------------------------------------------------------------------------------


def _measure_here(case: Case, rivals: Sequence[str]) -> dict[str, dict[str, float] | None]:
    from bench import attention  # here, for attention.py imports this module

    # Load code and start thread pools on something small first: neither belongs to the call.
    warm_up = Case(case.dtype, "forward+backward", 1, 2, 64, 16)
    for rival in rivals:
        attention.forward_and_backward(rival, warm_up, make_inputs(warm_up))
    inputs = make_inputs(case)
    measured: dict[str, dict[str, float] | None] = {}
    for rival in rivals:
        _trim_heap()
        if not _reset_peak():
            measured[rival] = None
            continue
        before = _status_bytes("VmRSS")
        kept = attention.forward_and_backward(rival, case, inputs)
        peak = _status_bytes("VmHWM") - before
        returned = sum(t.numel() * t.element_size() for t in kept)
        del kept
        measured[rival] = {
            "peak_bytes": peak,
            "returned_bytes": returned,
            "extra_bytes": max(0, peak - returned),
        }
    return measured


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/self/status has no {name}")


def _trim_heap() -> None:
    """Gives freed memory back to the system (glibc), so that using it again counts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
