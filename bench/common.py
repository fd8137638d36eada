"""What the benchmarks share: the machine, the CPU's ceilings, timing that keeps rivals apart, result files."""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from attn_ext._memory import memory_bytes

SCHEMA = "attn_ext.bench/1"

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class BenchError(Exception):
    """Something the user can put right. The message is one sentence; the process ends with exit code 2."""


# --- what the commands share in their options ---------------------------------------------------------------------


def add_row_filter(parser: argparse.ArgumentParser) -> None:
    """The option --rows."""
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="TEXT",
        help="only rows whose id holds TEXT; repeatable",
    )


def add_run_options(parser: argparse.ArgumentParser, seconds: str) -> None:
    """--list, --threads and --seconds of the commands that measure; `seconds` says the default in words."""
    parser.add_argument("--list", action="store_true", help="print the rows' ids and stop")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--seconds", type=float, help=f"per rival and row (default: {seconds})")


def threads_of(options: argparse.Namespace) -> int:
    """The thread count to use; BenchError where it is below 1."""
    threads = torch.get_num_threads() if options.threads is None else options.threads
    if threads < 1:
        raise BenchError(f"--threads must be at least 1, got {threads}")
    return threads


def seconds_of(options: argparse.Namespace, default: float) -> float:
    """Seconds per rival and row; BenchError where they are not above 0 and at most 600."""
    seconds = default if options.seconds is None else options.seconds
    if not 0 < seconds <= 600:
        raise BenchError(f"--seconds must be above 0 and at most 600, got {seconds}")
    return seconds


# --- the machine --------------------------------------------------------------------------------------------------


def describe_machine(device: str, threads: int) -> dict[str, Any]:
    """What a reader must know to compare figures: hardware, threads, instruction set, versions, time.

    Raises:
        BenchError: ATTN_EXT_ISA names an instruction set that cannot run here.
    """
    import attn_ext
    from attn_ext._load import _C

    try:
        isa = attn_ext.backend.active()
    except ValueError as error:
        raise BenchError(str(error)) from error
    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": threads,
        "isa": isa,
        "cpu_features": list(_C.cpu_features()),
        "compiler": _C.build_info()["compiler"],
        "commit": git_commit(),
        "python": platform.python_version(),
        "attn_ext": attn_ext.__version__,
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        machine |= {
            "last_level_cache_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
    for name in ("onnxruntime", "openvino"):
        try:
            machine[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            machine[name] = None
    return machine


def machine_line(machine: Mapping[str, Any]) -> str:
    """The description in one line, for tables and plots."""
    on_cpu = machine["device"] == "cpu"
    place = (
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}" if on_cpu else machine["device"]
    )
    return (
        f"{place}; attn_ext {machine['attn_ext']}, "
        f"torch {machine['torch']}, Python {machine['python']}; {machine['time'][:10]}"
    )


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
    return fields.get("model name") or platform.machine()


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first CPU; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=32 * 2**20)


def git_commit() -> str | None:
    """The commit of this source tree, with a `+` where files differ from it; None outside git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# --- ceilings -----------------------------------------------------------------------------------------------------


def measure_ceilings(threads: int, seconds: float) -> dict[str, float | None]:
    """What the CPU can do right now: GFLOP/s in registers by dtype, GB/s read from memory.

    Args:
        threads: as many as the benchmark uses.
        seconds: for each of the five measurements.

    Returns:
        fma_fp32, fma_fp64, dot_bf16 (None where the CPU has no bf16 dot product), tiles_bf16 (None where the process
        may use no tiles), read_gbs.
    """
    from attn_ext._load import _C

    buffer = max(64 * 2**20, 4 * last_level_cache_bytes() // threads)
    return {
        "fma_fp32": _C.measure_fma_peak(threads, seconds, "float32"),
        "fma_fp64": _C.measure_fma_peak(threads, seconds, "float64"),
        "dot_bf16": _C.measure_bf16_peak(threads, seconds, "avx512_bf16"),
        "tiles_bf16": _C.measure_bf16_peak(threads, seconds, "amx_bf16"),
        "read_gbs": _C.measure_read_bandwidth(threads, buffer, seconds),
    }


def mean_ceilings(
    before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> dict[str, float | None]:
    """The mean of both measurements: what "% of ceiling" is taken of."""
    means: dict[str, float | None] = {}
    for name, first in before.items():
        last = after[name]
        means[name] = None if first is None or last is None else (first + last) / 2
    return means


def ceiling_of(dtype: str, ceilings: Mapping[str, float | None]) -> tuple[str, float | None]:
    """Name and GFLOP/s of the ceiling of a dtype; (name, None) where none was measured.

    That is the best that it can be computed with: bf16, also over an int8 cache, by tiles, by the dot product (Intel's
    is slower than fp32's multiply-adds) or in fp32; fp16 in fp32.
    """
    if "gemm_fp32" in ceilings:  # a GPU's
        name = f"gemm_{dtype}" if f"gemm_{dtype}" in ceilings else "gemm_fp32"
        return name, ceilings[name]
    names = {"fp64": ["fma_fp64"], "fp32": ["fma_fp32"], "fp16": ["fma_fp32"]}.get(
        dtype, ["tiles_bf16", "dot_bf16", "fma_fp32"]
    )
    name = max(names, key=lambda name: ceilings.get(name) or 0.0)
    return name, ceilings.get(name)


# --- timing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """How long one call takes, in microseconds: median and spread over samples of several calls each."""

    median_us: float
    p20_us: float
    p80_us: float
    first_us: (
        float  # the first timed call: what the calls before it, a check of the result, set up is not in it
    )
    samples: int
    calls_per_sample: int

    @staticmethod
    def of(seconds: Sequence[float], first: float, calls_per_sample: int) -> Timing:
        """Summary of samples, each in seconds a call."""
        p20, p80 = percentiles(seconds)
        return Timing(
            statistics.median(seconds) * 1e6,
            p20 * 1e6,
            p80 * 1e6,
            first * 1e6,
            len(seconds),
            calls_per_sample,
        )

    def report(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self)


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 20th and 80th percentile, between neighbours where they fall between them."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], cuts[-1]


def clearly_faster(row: dict[str, Any]) -> bool:
    """Whether even a slow call of ours (80th percentile) took less time than a quick one of torch's (20th)."""
    return row["rivals"]["attn_ext"]["p80_us"] < row["rivals"]["torch"]["p20_us"]


class Timer(Protocol):
    """Times calls on one device."""

    def seconds_per_call(self, call: Callable[[], Any], calls: int) -> float:
        """Mean of `calls` calls in a row, all work they started included."""
        ...


class CpuTimer:
    """Wall clock."""

    def seconds_per_call(self, call: Callable[[], Any], calls: int) -> float:
        repeats = range(calls)
        start = time.perf_counter()
        for _ in repeats:
            call()
        return (time.perf_counter() - start) / calls


@dataclass(frozen=True)
class Runner:
    """One rival in one row: `call` does what is timed and returns its result; all inputs are made before."""

    name: str
    call: Callable[[], Any]
    grad: bool = False  # call it with autograd recording
    how: str = ""  # which road the rival takes, for the report
    held: Any = None  # what `call` reads without owning it


MIN_SAMPLE_SECONDS = 200e-6  # far above the clock's own cost
WARM_UP_SECONDS = 0.02


def time_runners(
    timer: Timer, runners: Sequence[Runner], *, seconds: float, rounds: int, pause: float
) -> dict[str, Timing]:
    """Times rivals against each other, each in blocks of its own.

    Thread pools go on spinning for a while after a call, so a rival that follows at once would share the CPU with the
    last one. Hence blocks: pause, warm up, take samples; and several rounds of them, so that a change of the
    machine's speed meets every rival. The order turns round in every other round.

    Args:
        seconds: to spend on the samples of each runner, over all rounds (at least one sample a round).
        rounds: blocks of each runner.
        pause: seconds before each block.

    Returns:
        A Timing by name.
    """
    first: dict[str, float] = {}
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for runner in runners:
        time.sleep(pause)
        with torch.set_grad_enabled(runner.grad):
            first[runner.name] = timer.seconds_per_call(runner.call, 1)
            once = timer.seconds_per_call(runner.call, 1)
            if once < MIN_SAMPLE_SECONDS:  # short calls: again, warm
                once = timer.seconds_per_call(runner.call, 10)
        calls[runner.name] = max(1, math.ceil(MIN_SAMPLE_SECONDS / max(once, 1e-7)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for runner in runners if turn % 2 == 0 else reversed(runners):
                n = calls[runner.name]
                time.sleep(pause)
                with torch.set_grad_enabled(runner.grad):
                    warm_until = time.perf_counter() + WARM_UP_SECONDS
                    timer.seconds_per_call(runner.call, n)
                    while time.perf_counter() < warm_until:
                        timer.seconds_per_call(runner.call, n)
                    end = time.perf_counter() + seconds / rounds
                    samples[runner.name].append(timer.seconds_per_call(runner.call, n))
                    while time.perf_counter() < end:
                        samples[runner.name].append(timer.seconds_per_call(runner.call, n))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(taken, first[name], calls[name]) for name, taken in samples.items()}


# --- result files -------------------------------------------------------------------------------------------------


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Writes a result file. Numbers that JSON lacks (NaN, infinity) become null."""
    text = json.dumps(_finite(result), indent=1, allow_nan=False) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def write_csv(path: str | Path, fields: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes one line each, with these fields of it; what a line lacks stays empty."""
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def require_folder(path: str | Path) -> None:
    """BenchError where the folder that a file is to be written to does not exist."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise BenchError(f"cannot write {path}: there is no folder {folder}")


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a result file that this version understands.

    Raises:
        BenchError: no such file, not JSON, or written with another schema.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not a JSON file ({error})") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise BenchError(f"{path} has schema {schema!r}, and this version reads {SCHEMA!r}: measure it again")
    return result


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A heading, and on which side its cells are aligned."""

    heading: str
    right: bool = True


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Prints a table on standard output: with rich where it is installed, plainly otherwise. Nothing is cut off."""
    rows = [list(row) for row in rows]
    widths = [max(len(column.heading), *(len(row[i]) for row in rows), 0) for i, column in enumerate(columns)]
    needed = sum(widths) + 2 * len(widths)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(columns, rows, title))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, needed)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """The same table as text."""
    lines = [[column.heading for column in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def padded(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([*([title] if title else []), *(padded(line) for line in lines)])


def say(message: str) -> None:
    """Progress, on standard error."""
    print(message, file=sys.stderr, flush=True)
