"""The ceilings: they are positive numbers, and bad arguments are errors. How large they are is the machine's affair."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_ext._load import _C
from bench.common import ceiling_of

SECONDS = 0.05
MIB = 2**20


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fma_peak_is_a_positive_number(threads: int, dtype: str) -> None:
    peak = _C.measure_fma_peak(threads, SECONDS, dtype)
    assert math.isfinite(peak) and peak > 0


@pytest.mark.parametrize(
    ("of", "needs"), [("avx512_bf16", {"avx512f", "avx512bf16"}), ("amx_bf16", {"amx_bf16"})]
)
def test_bf16_peaks_are_there_exactly_where_this_process_has_the_instruction(
    of: str, needs: set[str]
) -> None:
    peak = _C.measure_bf16_peak(1, SECONDS, of)
    if needs <= set(_C.cpu_features()):
        assert peak is not None and math.isfinite(peak) and peak > 0
    else:
        assert peak is None


def test_features_of_bf16_are_those_that_the_system_lists() -> None:
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "flags" in line),
        "",
    ).split()
    features = _C.cpu_features()
    assert ("avx512bf16" in features) == ("avx512_bf16" in flags)
    tiles = next(isa for isa in _C.isas() if isa["name"] == "amx_bf16") if "amx_bf16" in flags else None
    refused = tiles is not None and (tiles["why_not"] or "").startswith("Linux refuses")
    assert ("amx_bf16" in features) == (tiles is not None and not refused)


def test_the_ceiling_of_bf16_is_the_best_of_what_can_compute_it() -> None:
    fp32 = {"fma_fp32": 100.0, "fma_fp64": 50.0}
    for name, peaks in {
        "fma_fp32": ({"dot_bf16": None, "tiles_bf16": None}, {}, {"dot_bf16": 60.0, "tiles_bf16": None}),
        "dot_bf16": ({"dot_bf16": 200.0, "tiles_bf16": None}, {"dot_bf16": 200.0}),
        "tiles_bf16": ({"dot_bf16": 60.0, "tiles_bf16": 800.0},),
    }.items():
        for more in peaks:
            ceilings = {**fp32, **more}
            for dtype in ("bf16", "int8"):
                assert ceiling_of(dtype, ceilings) == (name, ceilings[name])
            assert ceiling_of("fp32", ceilings) == ceiling_of("fp16", ceilings) == ("fma_fp32", 100.0)
            assert ceiling_of("fp64", ceilings) == ("fma_fp64", 50.0)


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
        (lambda: _C.measure_bf16_peak(5000, SECONDS, "amx_bf16"), "threads must be 1 to 4096, got 5000"),
        (lambda: _C.measure_bf16_peak(1, SECONDS, "avx512"), 'isa must be "amx_bf16" or "avx512_bf16", got'),
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
