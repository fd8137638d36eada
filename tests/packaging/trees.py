"""Environments and source trees for the tests of the build.

The packaging is under test, not the kernels: a copied tree gets a few lines of C++ in the kernels' place, so
that a build takes seconds. Its headers, setup.py and metadata are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# In the place of the kernels: what module.cpp calls, and one operator that torch can be asked for.
TINY_KERNELS = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "ceilings.h"
#include "cpu/dispatch.h"
#include "cpu/features.h"

namespace attn_ext::cpu {
std::vector<IsaInfo> isas() { return {{"scalar", true, true, true, {}}}; }
std::vector<std::string> compiled_isas() { return {"scalar"}; }
const Kernels& kernels() {
  static const Kernels none = [] {
    Kernels tiny{};  // by name, so that the tree also builds with kernels to come
    tiny.name = "scalar";
    tiny.tile = [](DType) { return TileShape{1, 1, false}; };
    return tiny;
  }();
  return none;
}
const char* active_isa() { return "scalar"; }
void use_isa(const std::string&) {}
std::vector<std::string> cpu_features() { return {}; }
}  // namespace attn_ext::cpu
namespace attn_ext::ceilings {
double measure_fma_peak(int, double, const std::string&) { return 1.0; }
std::optional<double> measure_bf16_peak(int, double, const std::string&) { return std::nullopt; }
double measure_read_bandwidth(int, int64_t, double) { return 1.0; }
}  // namespace attn_ext::ceilings

static torch::stable::Tensor probe(const torch::stable::Tensor& x) { return torch::stable::clone(x); }
STABLE_TORCH_LIBRARY(attn_ext, m) { m.def("probe(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) { m.impl("probe", TORCH_BOX(&probe)); }
"""

TRY_IT = """
import torch
from attn_ext._load import _C
assert torch.equal(torch.ops.attn_ext.probe(torch.arange(3)), torch.arange(3))
print(_C.build_info())
"""

# What an environment that is only built into does not have: the package itself and the tools to build it.
BUILD_TOOLS = re.compile(
    r"(attn_ext|__editable__|pip|setuptools|wheel|pybind11|ninja|pkg_resources|_distutils_hack|distutils-precedence"
    r"|__pycache__)",
    re.IGNORECASE,
)


def copy_tree(folder: Path) -> Path:
    """Copies what a source archive holds to `folder`, with the tiny kernels; returns `folder`."""
    shutil.copytree(
        ROOT,
        folder,
        ignore=shutil.ignore_patterns(
            ".git",
            ".venv*",
            "build",
            "dist",
            "*.so",
            "*.egg-info",
            "__pycache__",
            ".*_cache",
            ".hypothesis",
            "attn_ext-*",  # where `setup.py sdist`, perhaps of a test beside this one, collects files for a moment
        ),
    )
    for source in folder.glob("csrc/**/*.cpp"):
        if source.name != "module.cpp":
            source.unlink()
    (folder / "csrc" / "schema.cpp").write_text(TINY_KERNELS)
    (folder / "attn_ext" / "__init__.py").write_text("")  # the real one wants the real operators
    return folder


def make_environment(folder: Path, *, torch: bool = True, tools: bool = False) -> Path:
    """Makes a virtual environment and returns its interpreter.

    Args:
        folder: where to.
        torch: whether it shares this environment's torch (and whatever else is there) by links.
        tools: whether it shares the build tools as well, for builds without isolation.
    """
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    if torch:
        theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            shared = entry.suffix != ".pth" and not BUILD_TOOLS.match(entry.name)
            if tools and re.match(r"(setuptools|wheel|pybind11)", entry.name, re.IGNORECASE):
                if (theirs / entry.name).is_dir():
                    shutil.rmtree(theirs / entry.name)
                shared = True
            if shared and not (theirs / entry.name).exists():
                (theirs / entry.name).symlink_to(entry)
    return python


def tool_path(folder: Path, *without: str) -> str:
    """A PATH of one folder that links every program of the real PATH except those named."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if os.path.isdir(place) else ():
            if program.name not in without and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


def run(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, ok: bool | None = True
) -> str:
    """Runs a command and returns what it printed, stdout and stderr together.

    Args:
        command: program and arguments.
        cwd: working folder.
        env: variables on top of this process's, of which PYTHON* and setup.py's switches are not passed on.
        ok: whether it must succeed (True), fail (False), or either (None).
    """
    switches = ("PYTHON", "ATTN_EXT_", "DEBUG", "MAX_JOBS", "CXX", "CC", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(switches)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert ok is None or (done.returncode == 0) == ok, (
        f"exit status {done.returncode} of {command}:\n{done.stdout}"
    )
    return done.stdout


def compiled_files(output: str) -> set[str]:
    """Names of the sources that a build's output shows being compiled."""
    return set(re.findall(r"-c '?[^']*?/?([\w-]+\.cpp)'? -o", output))


THIS_PYTHON = Path(sys.executable)
