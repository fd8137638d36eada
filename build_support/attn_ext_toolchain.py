"""What a build of attn_ext finds on the machine: torch, the C++ compiler, ninja, memory.

Used by `setup.py` and by the PEP 517 backend beside this file. Standard library only: it runs before anything
else is known to be there. Whatever is missing ends the build with one sentence (`stop`), without a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

OLDEST_TORCH = (2, 10)

# What one compiler process of this package takes at most; the default number of parallel jobs keeps within
# memory.
BYTES_PER_JOB = 1_500_000_000

# Compiles with what the sources need; the #error lines name the compiler that is too old.
COMPILER_PROBE = """
#if defined(__clang__)
#if __clang_major__ < 14
#error attn_ext_too_old
#endif
#elif defined(__GNUC__)
#if __GNUC__ < 11
#error attn_ext_too_old
#endif
#else
#error attn_ext_unknown_compiler
#endif
#include <bit>
#include <concepts>
#include <span>
static_assert(std::has_single_bit(8u) && std::integral<int>);
"""


def stop(sentence: str) -> NoReturn:
    """Ends the build with exit status 1 and `sentence` on stderr."""
    raise SystemExit(f"attn_ext: {sentence}")


# ---- torch -------------------------------------------------------------------------------------------------


def _version_pair(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_version() -> str | None:
    """Version of the torch that `import torch` would find, without importing it; None where there is none."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# Run by the target's own interpreter: what it would import as torch, and from where.
ASK_FOR_TORCH = """
import importlib.metadata, importlib.util, json, os, sys
spec = importlib.util.find_spec("torch")
found = {}
if spec is not None and spec.origin:
    found = {"folder": os.path.dirname(os.path.dirname(spec.origin)), "path": sys.path,
             "version": importlib.metadata.version("torch")}
print(json.dumps(found))
"""


def reach_target_torch() -> str | None:
    """Makes the target environment's torch importable in a build that pip has isolated.

    pip isolates a build through environment variables; the interpreter is still the target's. Asked without
    those variables it tells where it would find torch, be it in site-packages, in a user's folder or an
    editable one. (`python -m build` and uv make an environment of their own: there is no target to ask.)
    Those folders go to the end of `sys.path`: build requirements still come from the isolated environment.

    Returns torch's version, or None where there is no torch that is new enough.
    """
    version = torch_version()
    if version is None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        # in the root folder, since the current one is searched first
        answer = subprocess.run(
            [sys.executable, "-c", ASK_FOR_TORCH],
            capture_output=True,
            text=True,
            check=False,
            env=clean,
            cwd="/",
        )
        found = json.loads(answer.stdout) if answer.returncode == 0 else {}
        if not found or _version_pair(found["version"]) < OLDEST_TORCH:
            return None
        sys.path.extend(
            folder for folder in [*found["path"], found["folder"]] if folder and folder not in sys.path
        )
        importlib.invalidate_caches()
        version = found["version"]
    return version if _version_pair(version) >= OLDEST_TORCH else None


def require_torch() -> None:
    """Stops the build unless a torch that is new enough can be imported."""
    version = torch_version()
    oldest = ".".join(map(str, OLDEST_TORCH))
    if version is None:
        stop(
            f"building needs PyTorch {oldest} or newer in {sys.prefix}; install it first, "
            f"for example with `{sys.executable} -m pip install 'torch>={oldest}'`."
        )
    if _version_pair(version) < OLDEST_TORCH:
        stop(f"building needs PyTorch {oldest} or newer; {sys.prefix} has {version}, so upgrade it first.")


def require_pybind11() -> str:
    """Include folder of the pybind11 package (torch bundles a copy of its own, which is not used)."""
    try:
        import pybind11
    except ImportError:
        stop(
            "building without isolation needs pybind11; install it first, "
            f"for example with `{sys.executable} -m pip install pybind11`."
        )
    return pybind11.get_include()


# ---- platform, compiler, ninja -----------------------------------------------------------------------------


def require_platform() -> None:
    """Stops the build on a platform that nobody has tried."""
    if not sys.platform.startswith("linux"):
        stop(f"it builds on Linux only so far, and this is {sys.platform}; on Windows, WSL 2 will do.")
    if sys.maxsize < 2**32:
        stop("it needs a 64-bit Python.")


def require_compiler() -> str:
    """The C++ compiler's command (`$CXX`, else c++, g++ or clang++), tried on a few lines of C++20."""
    wanted = os.environ.get("CXX", "").strip()
    command = wanted or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    how = "install g++ 11 or newer or clang++ 14 or newer (Debian, Ubuntu: `apt-get install g++`)"
    if not command:
        stop(f"building needs a C++ compiler, and there is no c++, g++ or clang++ on PATH; {how}.")
    program = shlex.split(command)[0]
    if not shutil.which(program):
        stop(f"building needs a C++ compiler, and the one that CXX names, `{program}`, is not there; {how}.")
    probe = subprocess.run(
        [*shlex.split(command), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input=COMPILER_PROBE,
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        said = next((line.strip() for line in probe.stderr.splitlines() if line.strip()), "nothing")
        if "attn_ext_too_old" in probe.stderr or "-std=c++20" in probe.stderr:
            stop(f"`{command}` is too old for C++20; {how}, or set CXX to one that is.")
        stop(f"`{command}` does not compile a few lines of C++20 (it says: {said}); {how}, or set CXX.")
    return command


def require_boost_context(command: str) -> None:
    """Stops the build where Boost.Context, on which the simulator of the CUDA kernels runs its threads, is missing."""
    probe = subprocess.run(
        [*shlex.split(command), "-fsyntax-only", "-x", "c++", "-"],
        input="#include <boost/context/detail/fcontext.hpp>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        stop(
            "the simulator of the CUDA kernels needs Boost.Context "
            "(Debian, Ubuntu: `apt-get install libboost-context-dev`)."
        )


def is_gcc(command: str) -> bool:
    """Whether the C++ compiler is GCC (clang calls itself __GNUC__ as well)."""
    macros = subprocess.run(
        [*shlex.split(command), "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


def require_python_headers() -> None:
    """Stops the build where CPython's headers are not installed."""
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        stop(
            f"building needs Python's headers, and {include} has no Python.h "
            f"(Debian, Ubuntu: `apt-get install {name}`)."
        )


def find_ninja() -> bool:
    """Whether ninja can be called, looking also beside the interpreter and in the `ninja` package.

    A virtual environment that is used without being activated has ninja in its bin folder, not on PATH.
    """
    folders = [os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        import ninja

        folders.append(ninja.BIN_DIR)
    for folder in folders:
        if shutil.which("ninja"):
            return True
        if os.path.exists(os.path.join(folder, "ninja")):
            os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", os.defpath)
    return shutil.which("ninja") is not None


# ---- resources ---------------------------------------------------------------------------------------------


def _available_memory() -> int | None:
    """Bytes that can be used without swapping, also under a container's limit; None where nothing tells."""
    amounts = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        amounts.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(amounts) if amounts else None


def parallel_jobs() -> int:
    """How many files to compile at once: `$MAX_JOBS`, else one a core, as far as memory reaches."""
    wanted = os.environ.get("MAX_JOBS", "").strip()
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            stop(f"MAX_JOBS must be a whole number from 1 up, not {wanted!r}.")
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    memory = _available_memory()
    return cores if memory is None else max(1, min(cores, memory // BYTES_PER_JOB))


@contextlib.contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Lets one build at a time into a build folder. The lock goes with the process, killed or not."""
    import fcntl

    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with open(lock_file, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("attn_ext: waiting for another build in this folder to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_if_changed(path: Path, text: str) -> None:
    """Writes `text` unless the file has it already, so that its time stamp tells when it last changed."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
