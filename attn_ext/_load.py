"""Loads torch, then the compiled part of the package, and offers it as `_C`.

Loading `attn_ext._C` registers the operators (`torch.ops.attn_ext.*`). Whatever goes wrong here ends in one
ImportError of one sentence: what is wrong, and what to run.

Where torch is a CUDA build, `attn_ext._cuda` adds the same operators for tensors on a GPU. What keeps it from loading
is no error, for the CPU's kernels run without it: `why_no_cuda` says it to whoever comes with such tensors
(`_arguments.check_device`), and in `attn-ext info`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

OLDEST_TORCH = (2, 10)
_PACKAGE = Path(__file__).resolve().parent
_PIP = f"{shlex.quote(sys.executable)} -m pip install"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _rebuild() -> str:
    """What to run to get a compiled part that fits this interpreter and torch."""
    if os.environ.get("ATTN_EXT_CUDA_SIM") == "1":
        return (
            f"run `{shlex.quote(sys.executable)} setup.py build_cuda_sim` in a source tree, and Python there"
        )
    if (_PACKAGE.parent / "setup.py").exists():
        return f"run `make build` or `{_PIP} --no-build-isolation -e .` in {_PACKAGE.parent}"
    return f"run `{_PIP} --force-reinstall --no-deps --no-cache-dir` with what attn_ext was installed from"


def _import_torch() -> ModuleType:
    """Returns torch. Raises ImportError where there is none, where it is broken, and where it is too old."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise ImportError(
                f"attn_ext needs PyTorch, and the one in {sys.prefix} does not import ({_one_line(error)}): "
                f"reinstall it with `{_PIP} --force-reinstall torch`."
            ) from None
        raise ImportError(
            f"attn_ext needs PyTorch {oldest} or newer, and {sys.prefix} has none: "
            f"run `{_PIP} 'torch>={oldest}'`."
        ) from None
    except (ImportError, OSError) as error:
        raise ImportError(
            f"attn_ext needs PyTorch, and the one in {sys.prefix} does not import ({_one_line(error)}): "
            f"reinstall it with `{_PIP} --force-reinstall torch`."
        ) from None
    version = re.match(r"(\d+)\.(\d+)", str(getattr(torch, "__version__", "")))
    if version is None:
        raise ImportError(
            f"attn_ext needs PyTorch {oldest} or newer, and the `torch` that is imported "
            f"({getattr(torch, '__file__', None) or 'a folder of that name'}) is none: "
            "rename it, or run Python elsewhere."
        )
    if (int(version[1]), int(version[2])) < OLDEST_TORCH:
        raise ImportError(
            f"attn_ext needs PyTorch {oldest} or newer, and {sys.prefix} has {torch.__version__}: "
            f"run `{_PIP} 'torch>={oldest}'`."
        )
    return torch


def _why_not_found() -> str:
    """Why no `_C` file fits: none was built, or one for another Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    others = sorted(path.name for path in _PACKAGE.glob("_C.*") if path.suffix in (".so", ".pyd"))
    if others:
        return (
            f"it was built for another Python ({others[0]}, while this one loads _C{suffix}): {_rebuild()}."
        )
    if (_PACKAGE.parent / "setup.py").exists():
        return (
            f"it is not built in this source tree: {_rebuild()}, "
            "or leave that folder if attn_ext is installed elsewhere."
        )
    return f"it is missing from {_PACKAGE}: {_rebuild()}."


def _why_not_loaded(error: BaseException, torch: ModuleType) -> str:
    """Why the `_C` file that is there does not load."""
    said = _one_line(error)
    if "undefined symbol" in said:
        symbol = said.partition("undefined symbol: ")[2].partition(" ")[0].rstrip(",")
        return f"it asks for `{symbol}`, which torch {torch.__version__} does not have: {_rebuild()}."
    if "GLIBC" in said or "CXXABI" in said:
        return (
            f"it was built with a newer compiler than this system's libraries serve ({said}): {_rebuild()}."
        )
    if "libtorch" in said or "libc10" in said:
        return f"it does not find torch's libraries ({said}): {_rebuild()}."
    return f"its file does not load ({said}): {_rebuild()}."


def _simulated() -> Path | None:
    """Where ATTN_EXT_CUDA_SIM=1 has the CUDA kernels stand in for the CPU's, run by their simulator: that `_C`."""
    wanted = os.environ.get("ATTN_EXT_CUDA_SIM", "")
    if wanted not in ("", "0", "1"):
        raise ImportError(f"attn_ext: the variable ATTN_EXT_CUDA_SIM must be 0 or 1, not {wanted!r}.")
    if wanted != "1":
        return None
    folder = _PACKAGE.parent / "build" / "cuda_sim" / "attn_ext"  # as setup.py has it
    path = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        raise ImportError(
            "attn_ext: ATTN_EXT_CUDA_SIM=1 asks for the CUDA kernels in their simulator, which are not built "
            f"({path} is missing): {_rebuild()}, or unset the variable."
        )
    return path


def _import_file(path: Path) -> ModuleType:
    """`attn_ext._C` from a file that lies elsewhere."""
    spec = importlib.util.spec_from_file_location("attn_ext._C", path)
    assert spec is not None and spec.loader is not None  # the name ends as those of extensions do
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["attn_ext._C"] = module
    return module


def _import_extension() -> ModuleType:
    """Returns `attn_ext._C`; raises ImportError with one sentence where that is not to be had."""
    torch = _import_torch()  # first: it brings libtorch_cpu and libc10, which the extension is linked against
    simulated = _simulated()
    try:
        return _import_file(simulated) if simulated else importlib.import_module("attn_ext._C")
    except ModuleNotFoundError as error:
        if error.name != "attn_ext._C":
            raise
        why = _why_not_found()
    except (ImportError, OSError) as error:
        why = _why_not_loaded(error, torch)
    raise ImportError(f"attn_ext's compiled part (attn_ext._C) cannot be used: {why}")


def _import_cuda(C: ModuleType) -> ModuleType | str:
    """Loads `attn_ext._cuda` into a torch with CUDA; returns it, or why not."""
    torch = sys.modules["torch"]
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    try:
        cuda = importlib.import_module("attn_ext._cuda")
    except ModuleNotFoundError as error:
        if error.name != "attn_ext._cuda":
            raise
        reason = C.build_info()["cuda_reason"] or "the file attn_ext/_cuda is missing"
        return f"attn_ext was built without them ({reason})"
    except (ImportError, OSError) as error:
        return f"they do not load ({_one_line(error)}): {_rebuild()}"
    built = cuda.build_info()["nvcc"]
    if built.partition(".")[0] != torch.version.cuda.partition(".")[0]:
        return f"they were built with CUDA {built}, and torch has CUDA {torch.version.cuda}: {_rebuild()}"
    return cuda


_C = _import_extension()

_cuda: ModuleType | str = "their simulator stands in" if _simulated() else _import_cuda(_C)
why_no_cuda: str | None = _cuda if isinstance(_cuda, str) else None
# Where the tensors of the CUDA kernels live.
cuda_device_type: str | None = "cpu" if _simulated() else None if why_no_cuda else "cuda"
# The module that knows what they would launch.
cuda_kernels: ModuleType | None = _C if _simulated() else None if isinstance(_cuda, str) else _cuda
