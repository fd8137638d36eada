"""`attn-ext info`: what this build is, what runs here, and why not more."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__, backend
from .._load import _C, _cuda, why_no_cuda
from .common import JsonOption, ThreadsOption, finish, says_errors_plainly, set_up


@says_errors_plainly()
def info(threads: ThreadsOption = None, json: JsonOption = False) -> None:
    """Print versions, instruction sets and what was built.

    What is missing is listed with the reason.
    """
    set_up(threads)
    report = collect()
    finish(report, show, json)


def collect() -> dict[str, Any]:
    """Everything `attn-ext info` knows, ready for JSON."""
    build = _C.build_info()
    active = backend.active()
    device, why_no_device = _cuda_device()
    return {
        "attn_ext": {"version": __version__, "folder": str(Path(_C.__file__).parent)},
        "build": build,
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cuda_device": device,
            "why_no_cuda_device": why_no_device,
        },
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "numpy": numpy.__version__,
        "machine": {
            "system": platform.platform(),
            "architecture": platform.machine(),
            "cpu": _cpu_name(),
            "cpus": os.cpu_count(),
            "cpus_allowed": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "features": list(_C.cpu_features()),
        },
        "threads": torch.get_num_threads(),
        "isa": {
            "active": active,
            "forced": os.environ.get("ATTN_EXT_ISA") or None,
            "all": [{**isa, "active": isa["name"] == active} for isa in _C.isas()],
        },
        "cuda": {
            "built": build["cuda"],
            "loaded": None if isinstance(_cuda, str) else _cuda.build_info(),
            "why_not": why_no_cuda,
        },
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `collect` returned."""
    build, torch_, machine, isa = report["build"], report["torch"], report["machine"], report["isa"]
    debug = ", debug" if build["debug"] else ""
    rows: list[tuple[str, str | Text]] = [
        ("attn_ext", f"{report['attn_ext']['version']} in {report['attn_ext']['folder']}"),
        (
            "built",
            f"{build['compiler']}, C++{str(build['cxx_standard'])[2:4]}{debug}, "
            f"against torch {build['built_with_torch']}; loads into torch {build['torch_target']} and later",
        ),
        ("torch", f"{torch_['version']} ({'CUDA ' + torch_['cuda'] if torch_['cuda'] else 'CPU build'})"),
        (
            "python",
            f"{report['python']['implementation']} {report['python']['version']}, numpy {report['numpy']}",
        ),
        ("machine", machine["system"]),
        ("cpu", f"{machine['cpu']} ({machine['architecture']})"),
        ("cpu features", " ".join(machine["features"]) or "none that the kernels ask for"),
        (
            "threads",
            f"{report['threads']} in use, {machine['cpus_allowed']} of {machine['cpus']} CPUs allowed",
        ),
    ]
    forced = " (ATTN_EXT_ISA)" if isa["forced"] else ""
    width = max(len(one["name"]) for one in isa["all"])
    for i, one in enumerate(isa["all"]):
        if one["active"]:
            state = Text(f"{one['name']:<{width}} active{forced}", style="bold green")
        elif one["compiled"] and one["supported"]:
            by_default = ", runs by default" if one["by_default"] else ""
            state = Text(f"{one['name']:<{width}} available{by_default}")
        else:
            state = Text(f"{one['name']:<{width}} no: {one['why_not']}", style="dim")
        rows.append(("instruction sets" if i == 0 else "", state))
    loaded = report["cuda"]["loaded"]
    rows.append(
        (
            "CUDA kernels",
            f"nvcc {loaded['nvcc']}, for sm {loaded['archs']}"
            if loaded
            else f"no: {report['cuda']['why_not']}",
        )
    )
    if torch_["cuda"]:
        none = f"none, so that only the CPU's kernels can run: {torch_['why_no_cuda_device']}"
        rows.append(("CUDA device", torch_["cuda_device"] or none))

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
    console.print(table)


def _cuda_device() -> tuple[str | None, str | None]:
    """The current GPU's name, or why there is none."""
    try:
        return torch.cuda.get_device_name(), None
    except (AssertionError, RuntimeError) as error:  # torch's own: a CPU build, no driver, no GPU
        return None, str(error).partition(". ")[0]


def _cpu_name() -> str:
    """The model name as the kernel gives it (Linux), else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # no /proc on this system
    return platform.processor() or platform.machine()
