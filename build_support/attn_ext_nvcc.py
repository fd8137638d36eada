"""The CUDA part of a build of attn_ext: whether there is to be one, for which GPUs, and nvcc's share of the compiling.

Used by `setup.py`. Standard library only. What keeps the CUDA kernels out of a build is one sentence, which the build
prints and `attn-ext info` repeats; where ATTN_EXT_CUDA=1 asks for them it ends the build.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from attn_ext_toolchain import stop

OLDEST_NVCC = (12, 4)


class Toolkit(NamedTuple):
    """An nvcc that serves, and what it compiles for."""

    nvcc: str
    release: tuple[int, int]
    archs: tuple[int, ...]  # 80 is sm_80
    library_dir: str  # with libcudart_static.a

    @property
    def version(self) -> str:
        return ".".join(map(str, self.release))


def find_nvcc() -> str | None:
    """$NVCC, else that of $CUDA_HOME, else the one on PATH or in /usr/local/cuda."""
    named = os.environ.get("NVCC", "").strip()
    if named:
        return named
    home = os.environ.get("CUDA_HOME", "").strip()
    places = [os.path.join(home, "bin", "nvcc")] if home else []
    places += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def _said(nvcc: str, *options: str) -> str:
    try:
        done = subprocess.run([nvcc, *options], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr


def _archs(release: tuple[int, int]) -> tuple[int, ...]:
    """$ATTN_EXT_CUDA_ARCHS ("80 90" or "8.0;9.0"), else every generation from Ampere on that the nvcc knows."""
    named = os.environ.get("ATTN_EXT_CUDA_ARCHS", "").strip()
    if named:
        found = [word.replace(".", "") for word in re.split(r"[\s,;]+", named)]
        if not all(word.isdigit() and int(word) >= 80 for word in found):
            stop(f"ATTN_EXT_CUDA_ARCHS must name GPU generations from 80 on, like '80 90', not {named!r}.")
        return tuple(sorted(int(word) for word in found))
    return (80, 86, 89, 90, *((100, 120) if release >= (12, 8) else ()))


def _library_dir(nvcc: str) -> str | None:
    top = re.search(r"#\$ TOP=(.*)", _said(nvcc, "-dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull))
    if top is None:
        return None
    places = (Path(top[1].strip()) / folder for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))
    return next((str(place) for place in places if (place / "libcudart_static.a").exists()), None)


def find_toolkit(wanted: bool | None, torch_version: str, torch_cuda: str | None) -> Toolkit | str:
    """The toolkit that builds the CUDA kernels for this torch, or the reason why they are left out.

    Args:
        wanted: ATTN_EXT_CUDA as a switch; None leaves it to what is there.
        torch_version: for the sentence.
        torch_cuda: the CUDA version of the torch that is built against, None for a CPU build.
    """
    if wanted is False:
        return "ATTN_EXT_CUDA=0 at build time"
    if wanted is None and torch_cuda is None:
        return f"torch {torch_version} is a CPU build (ATTN_EXT_CUDA=1 builds them all the same)"
    found = _usable_toolkit(torch_version, torch_cuda)
    if isinstance(found, str):
        if wanted:
            stop(f"ATTN_EXT_CUDA=1 asks for the CUDA kernels, but {found}.")
        print(f"attn_ext: the CUDA kernels are left out: {found} (ATTN_EXT_CUDA=0 says so from the start).")
    return found


def _usable_toolkit(torch_version: str, torch_cuda: str | None) -> Toolkit | str:
    nvcc = find_nvcc()
    oldest = ".".join(map(str, OLDEST_NVCC))
    if nvcc is None:
        return f"there is no nvcc ($CUDA_HOME, PATH, /usr/local/cuda); install the CUDA toolkit, {oldest} or newer"
    match = re.search(r"release (\d+)\.(\d+)", _said(nvcc, "--version"))
    if match is None:
        return f"`{nvcc} --version` does not say which release it is"
    release = (int(match[1]), int(match[2]))
    if torch_cuda is not None and int(torch_cuda.split(".")[0]) != release[0]:
        return (
            f"{nvcc} is of CUDA {match[1]}.{match[2]} and torch {torch_version} of CUDA {torch_cuda}; "
            f"have CUDA_HOME name a toolkit of CUDA {torch_cuda.split('.')[0]}"
        )
    if release < OLDEST_NVCC:
        return f"{nvcc} is of CUDA {match[1]}.{match[2]}, and {oldest} is the oldest that compiles them"
    library_dir = _library_dir(nvcc)
    if library_dir is None:
        return f"there is no libcudart_static.a beside {nvcc}"
    return Toolkit(nvcc, release, _archs(release), library_dir)


# ---- compiling -----------------------------------------------------------------------------------------------------


def flags(toolkit: Toolkit, root: Path, compiler: str) -> list[str]:
    """nvcc's options: machine code for every generation, and PTX of the newest for those to come."""
    result = [
        "-std=c++20", "-O3",
        "--fmad=false",  # a*b+c is fused where the kernels say fma and nowhere else
        "--expt-relaxed-constexpr", f"-I{root / 'csrc'}", f"-ccbin={shlex.split(compiler)[0]}",
        "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas",
        "-Xptxas", "-v",  # registers and spills, for the log
        *(["-Werror", "all-warnings"] if os.environ.get("ATTN_EXT_WERROR") == "1" else []),
    ]  # fmt: skip
    for arch in toolkit.archs:
        result += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    newest = toolkit.archs[-1]
    return [*result, "-gencode", f"arch=compute_{newest},code=compute_{newest}"]


def _is_up_to_date(target: Path, note: Path, options: str) -> bool:
    """Whether `target` was made with these options, after every file that it was made of was last changed."""
    depfile = target.with_suffix(".d")
    if not (target.exists() and depfile.exists() and note.exists()) or note.read_text() != options:
        return False
    made = target.stat().st_mtime_ns
    sources = depfile.read_text().partition(":")[2].replace("\\\n", " ")
    names = [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", sources.strip())]
    return all(Path(name).exists() and Path(name).stat().st_mtime_ns <= made for name in names)


def compile_kernels(
    toolkit: Toolkit, sources: Sequence[Path], options: list[str], folder: Path, jobs: int
) -> list[str]:
    """Compiles what changed, `jobs` at a time; returns the objects. What nvcc said lies beside each (.log)."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        target, note = folder / f"{source.stem}.o", folder / f"{source.stem}.options"
        command = [toolkit.nvcc, *options, "-c", str(source), "-o", str(target)]
        if not _is_up_to_date(target, note, shlex.join(command)):
            print(shlex.join(command), flush=True)
            began = time.time_ns()
            note.unlink(missing_ok=True)
            done = subprocess.run(
                [*command, "-MD", "-MF", str(target.with_suffix(".d"))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            target.with_suffix(".log").write_text(done.stdout)
            if done.returncode:
                print(done.stdout, flush=True)
                stop(f"nvcc did not compile {source}; what it said is above.")
            print(
                *(line for line in done.stdout.splitlines() if "warning" in line),
                sep="\n",
                end="",
                flush=True,
            )
            os.utime(
                target, ns=(began, began)
            )  # a source that changes meanwhile is newer than what was made of it
            note.write_text(shlex.join(command))
        return str(target)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, sources))
