"""The ways to install: each really builds and loads. Minutes in all, so they are marked `slow_build`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from trees import ROOT, THIS_PYTHON, TRY_IT, compiled_files, copy_tree, make_environment, run, tool_path

pytestmark = pytest.mark.slow_build

# A build that asks for a torch of its own fails at once instead of downloading one.
NO_SECOND_TORCH = "torch==0.0.0"


def pip(python: Path, *arguments: str | Path, env: dict[str, str] | None = None, ok: bool = True) -> str:
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, env=env, ok=ok)


def test_isolated_install_uses_the_torch_that_is_there(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "a path with spaces" / "attn ext")
    python = make_environment(tmp_path / "an environment")
    (tmp_path / "constraints.txt").write_text(NO_SECOND_TORCH)
    # pip passes PIP_CONSTRAINT on to the build's own environment; with --no-deps nothing else wants a torch
    log = pip(
        python, "install", "-v", "--no-deps", tree, env={"PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    )
    assert compiled_files(log) == {"module.cpp", "schema.cpp"}
    assert "'cuda': False" in run(python, "-c", TRY_IT, cwd=tmp_path)


def test_isolated_build_asks_for_torch_where_there_is_none(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    python = make_environment(tmp_path / "bare", torch=False)
    (tmp_path / "constraints.txt").write_text(NO_SECOND_TORCH)
    log = pip(
        python,
        "install",
        "--no-deps",
        tree,
        env={"PIP_CONSTRAINT": str(tmp_path / "constraints.txt")},
        ok=False,
    )
    assert "torch>=2.10" in log


def test_source_archive_builds_a_wheel_that_loads(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    python = make_environment(tmp_path / "env", tools=True)
    run(python, "setup.py", "-q", "sdist", "--dist-dir", tmp_path / "dist", cwd=tree)
    (archive,) = (tmp_path / "dist").iterdir()
    pip(python, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", archive)
    (wheel,) = (tmp_path / "wheels").iterdir()
    pip(python, "install", "--no-deps", "--no-index", wheel)
    run(python, "-c", TRY_IT, cwd=tmp_path)


def test_source_archive_holds_all_that_git_has(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    run(THIS_PYTHON, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path / "dist", cwd=ROOT)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {name for name in listed.stdout.splitlines() if name != ".gitignore"} - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc"))] == []


def test_editable_install_and_what_a_change_recompiles(tmp_path: Path) -> None:
    if shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")
    tree = copy_tree(tmp_path / "tree")
    python = make_environment(tmp_path / "env", tools=True)
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", tree)
    run(python, "-c", TRY_IT, cwd=tmp_path)

    def build(env: dict[str, str] | None = None) -> set[str]:
        output = run(python, "setup.py", "build_ext", "--inplace", cwd=tree, env=env)
        run(python, "-c", TRY_IT, cwd=tmp_path)
        return compiled_files(output)

    def touch(name: str) -> None:
        path = tree / name
        path.write_text(path.read_text() + "\n// touched\n")

    (binary,) = (tree / "attn_ext").glob("_C.*.so")
    assert build() == set(), "the editable install's objects are not used again"
    linked = (tree / "build").glob("lib.*/attn_ext/_C*.so")
    before = {path: path.stat().st_mtime_ns for path in linked}
    assert build() == set()
    assert {path: path.stat().st_mtime_ns for path in before} == before, "an unchanged tree was linked again"
    touch("csrc/module.cpp")
    assert build() == {"module.cpp"}
    touch("csrc/ceilings.h")
    assert build() == {"module.cpp", "schema.cpp"}
    assert build({"DEBUG": "1"}) == {"module.cpp", "schema.cpp"}
    assert "'debug': True" in run(python, "-c", TRY_IT, cwd=tmp_path)
    assert binary.exists()


def test_without_ninja(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "a tree")
    python = make_environment(tmp_path / "env", tools=True)
    path = {"PATH": tool_path(tmp_path / "bin", "ninja")}

    def build() -> str:
        return run(python, "setup.py", "build_ext", "--inplace", cwd=tree, env=path)

    first = build()
    assert "there is no ninja" in first
    assert compiled_files(first) == {"module.cpp", "schema.cpp"}
    run(python, "-c", TRY_IT, cwd=tree)
    assert compiled_files(build()) == set(), "an unchanged tree was compiled again"
    header = tree / "csrc" / "ceilings.h"
    header.write_text(header.read_text() + "\n// touched\n")
    assert compiled_files(build()) == {"module.cpp", "schema.cpp"}


def test_pip_without_a_compiler_ends_in_the_sentence(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    python = make_environment(tmp_path / "env", tools=True)
    path = tool_path(
        tmp_path / "bin", *(name for name in os.listdir("/usr/bin") if "++" in name), "c++", "g++", "clang++"
    )
    log = pip(python, "install", "--no-deps", "--no-build-isolation", tree, env={"PATH": path}, ok=False)
    assert "attn_ext: building needs a C++ compiler, and there is no c++, g++ or clang++ on PATH" in log
    assert "Traceback" not in log


def test_code_that_does_not_compile_ends_in_a_sentence(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    (tree / "csrc" / "schema.cpp").write_text("int broken(\n")
    output = run(THIS_PYTHON, "setup.py", "build_ext", "--inplace", cwd=tree, ok=False)
    assert "schema.cpp:1" in output
    assert "Traceback" not in output
