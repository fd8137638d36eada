"""Where a benchmark runs: how calls are timed there, what can be reached at most, and how much memory there is.

On the CPU that is the wall clock, and loops of attn_ext's own that show what its cores and its memory can do. On a GPU
it is CUDA events, with the L2 cache emptied before every call, and torch's matrix products and sums. Untried: no GPU
has run the second half of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from attn_ext import _load, _memory
from bench import common
from bench.common import DTYPES, BenchError, CpuTimer, Timer

NAMES = ("cpu", "cuda")


class Device(Protocol):
    """What the benchmarks ask of the place they run on."""

    @property
    def name(self) -> str:
        """As torch and --device name it."""
        ...

    @property
    def timer(self) -> Timer: ...

    def ceilings(self, threads: int, seconds: float) -> dict[str, float | None]:
        """What it can do right now: GFLOP/s by kind of arithmetic, and GB/s read; `seconds` for each of them."""
        ...

    def last_level_cache_bytes(self) -> int: ...

    def available_bytes(self) -> int | None:
        """Memory that is free; None where nobody says."""
        ...


@dataclass(frozen=True)
class CpuDevice:
    """The CPU, by the wall clock."""

    name: str = "cpu"
    timer: Timer = field(default_factory=CpuTimer)

    def ceilings(self, threads: int, seconds: float) -> dict[str, float | None]:
        return common.measure_ceilings(threads, seconds)

    def last_level_cache_bytes(self) -> int:
        return common.last_level_cache_bytes()

    def available_bytes(self) -> int | None:
        return _memory.available_bytes()


# --- a GPU --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EventTimer:
    """Events of a device before and after each call; what `between` does comes before the first of them.

    The host queues all calls of a sample and waits once: what `between` takes on the device hides what the host needs
    for the next call, as far as it takes longer.
    """

    new_event: Callable[[], Any]  # with record() and, in milliseconds, elapsed_time(later)
    synchronize: Callable[[], None]
    between: Callable[[], Any]

    def seconds_per_call(self, call: Callable[[], Any], calls: int) -> float:
        events = [(self.new_event(), self.new_event()) for _ in range(calls)]
        self.synchronize()
        for start, end in events:
            self.between()
            start.record()
            call()
            end.record()
        self.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / 1e3 / calls


def cuda_timer(cache_bytes: int) -> EventTimer:
    """The timer of the current GPU: before each call it writes four times the L2 cache."""
    everything = torch.empty(4 * cache_bytes, dtype=torch.int8, device="cuda")
    return EventTimer(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize, everything.zero_)


GEMM_SIZES = {"bf16": 8192, "fp16": 8192, "fp32": 4096, "fp64": 4096}
READ_BYTES = 2**30


def measure_gemm(timer: Timer, dtype: str, size: int, seconds: float, device: str) -> float:
    """GFLOP/s of torch's product of two square matrices: the fastest of as many as `seconds` allow."""
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    return 2.0 * size**3 / _fastest(timer, partial(torch.matmul, a, b), seconds) / 1e9


def measure_read(timer: Timer, count: int, seconds: float, device: str) -> float:
    """GB/s that torch reads to add `count` bytes' worth of fp32 numbers."""
    numbers = torch.ones(count // 4, device=device)
    return numbers.nbytes / _fastest(timer, numbers.sum, seconds) / 1e9


def _fastest(timer: Timer, call: Callable[[], Any], seconds: float) -> float:
    timer.seconds_per_call(call, 2)  # chooses its algorithm
    once = timer.seconds_per_call(call, 1)
    return min(timer.seconds_per_call(call, 1) for _ in range(max(3, int(seconds / max(once, 1e-6) / 2))))


@dataclass(frozen=True)
class CudaDevice:
    """The current GPU, by CUDA events."""

    timer: Timer
    name: str = "cuda"

    def ceilings(self, threads: int, seconds: float) -> dict[str, float | None]:
        """gemm_bf16, gemm_fp16, gemm_fp32 (without TF32: `device_for` sets that), gemm_fp64, read_gbs."""
        found: dict[str, float | None] = {
            f"gemm_{dtype}": measure_gemm(self.timer, dtype, size, seconds, self.name)
            for dtype, size in GEMM_SIZES.items()
        }
        return found | {"read_gbs": measure_read(self.timer, READ_BYTES, seconds, self.name)}

    def last_level_cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)

    def available_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info()[0])


def device_for(name: str) -> Device:
    """The device that --device names; BenchError where this machine or this build does not have it.

    For "cuda" products of fp32 are from then on those of fp32 (no TF32) in the whole process: ours are.
    """
    if name == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise BenchError("there is no CUDA device that torch can use on this machine; use --device cpu")
    if _load.cuda_device_type != "cuda":
        raise BenchError(f"attn_ext has no CUDA kernels here ({_load.why_no_cuda}); use --device cpu")
    torch.set_float32_matmul_precision("highest")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return CudaDevice(cuda_timer(int(properties.L2_cache_size)))
