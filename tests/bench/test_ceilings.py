"""The ceilings: they are positive numbers, and bad arguments are errors. How large they are is the machine's affair."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from attn_ext._load import _C

SECONDS = 0.05
MIB = 2**20


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fma_peak_is_a_positive_number(threads: int, dtype: str) -> None:
    peak = _C.measure_fma_peak(threads, SECONDS, dtype)
    assert math.isfinite(peak) and peak > 0


def test_bf16_peak_is_there_exactly_where_the_cpu_has_the_instruction() -> None:
    peak = _C.measure_bf16_peak(1, SECONDS)
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    if {"avx512f", "avx512_bf16"} <= set(flags):
        assert math.isfinite(peak) and peak > 0
    else:
        assert peak is None


@pytest.mark.parametrize("threads", [1, 3])
def test_read_bandwidth_is_a_positive_number(threads: int) -> None:
    bandwidth = _C.measure_read_bandwidth(threads, 8 * MIB, SECONDS)
    assert math.isfinite(bandwidth) and bandwidth > 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: _C.measure_fma_peak(0, SECONDS, "float32"), "threads must be 1 to 4096, got 0"),
        (lambda: _C.measure_fma_peak(-3, SECONDS, "float32"), "threads must be 1 to 4096, got -3"),
        (lambda: _C.measure_fma_peak(1, 0.0, "float32"), "seconds must be above 0"),
        (lambda: _C.measure_fma_peak(1, math.nan, "float32"), "seconds must be above 0"),
        (lambda: _C.measure_fma_peak(1, math.inf, "float32"), "seconds must be above 0"),
        (lambda: _C.measure_fma_peak(1, SECONDS, "int8"), 'dtype must be "float32" or "float64", got "int8"'),
        (lambda: _C.measure_bf16_peak(5000, SECONDS), "threads must be 1 to 4096, got 5000"),
        (
            lambda: _C.measure_read_bandwidth(1, 1000, SECONDS),
            "bytes_per_thread must be 1 MiB to 1 TiB, got 1000",
        ),
        (
            lambda: _C.measure_read_bandwidth(1, -1, SECONDS),
            "bytes_per_thread must be 1 MiB to 1 TiB, got -1",
        ),
        (lambda: _C.measure_read_bandwidth(1, MIB, -1.0), "seconds must be above 0"),
    ],
)
def test_bad_arguments_are_value_errors(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_other_python_threads_go_on_meanwhile() -> None:
    measuring = threading.Thread(target=_C.measure_fma_peak, args=(1, 0.5, "float32"))
    measuring.start()
    steps = 0
    while measuring.is_alive() and steps < 1000:
        steps += 1
    measuring.join()
    assert steps == 1000  # with the interpreter held, the loop would only start when the measurement is over
