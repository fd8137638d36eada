"""A build that cannot succeed says why in a sentence; one that can keeps within the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trees import ROOT, THIS_PYTHON, make_environment, run, tool_path

sys.path.insert(0, str(ROOT / "build_support"))
import attn_ext_toolchain as toolchain  # noqa: E402


def refusal(env: dict[str, str], python: Path = THIS_PYTHON) -> str:
    """Runs setup.py on the real tree, which must refuse before it compiles anything; returns its sentence."""
    output = run(python, ROOT / "setup.py", "-q", "build_ext", env=env, ok=False)
    assert "Traceback" not in output, output
    sentence = output.strip().splitlines()[-1]
    assert sentence.startswith("attn_ext: ") and sentence.endswith((".", ").")), output
    return sentence


def test_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    said = refusal({"PATH": str(tmp_path / "bin")})
    assert "no c++, g++ or clang++ on PATH" in said
    assert "install g++ 11 or newer" in said


def test_compiler_that_is_not_there() -> None:
    assert "CXX names, `g++-of-nowhere`, is not there" in refusal({"CXX": "g++-of-nowhere"})


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_compiler_that_knows_no_cxx20(tmp_path: Path) -> None:
    compiler = script(tmp_path / "g++", "echo \"g++: error: unrecognized option '-std=c++20'\" >&2; exit 1")
    assert "is too old for C++20" in refusal({"CXX": compiler})


def test_gcc_10_is_refused(tmp_path: Path) -> None:
    compiler = script(tmp_path / "g++", 'exec g++ -U__GNUC__ -D__GNUC__=10 "$@"')
    assert "is too old for C++20" in refusal({"CXX": compiler})


def test_broken_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = script(tmp_path / "g++", "echo 'cannot execute cc1plus' >&2; exit 1")
    assert "it says: cannot execute cc1plus" in refusal({"CXX": compiler})


def test_simulator_without_boost(tmp_path: Path) -> None:
    compiler = script(tmp_path / "g++", "echo 'fcontext.hpp: No such file or directory' >&2; exit 1")
    with pytest.raises(SystemExit, match="libboost-context-dev"):
        toolchain.require_boost_context(compiler)


def test_this_machines_compiler_is_taken() -> None:
    assert toolchain.require_compiler()


def test_no_torch(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "bare", torch=False)
    said = refusal({"PYTHONPATH": ""}, python)
    assert "building needs PyTorch 2.10 or newer" in said
    assert "pip install 'torch>=2.10'" in said


def test_torch_too_old(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1'")
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    (tmp_path / "torch-2.9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n"
    )
    said = refusal({"PYTHONPATH": str(tmp_path)})
    assert "has 2.9.1" in said


@pytest.mark.parametrize("name", ["ATTN_EXT_CUDA", "DEBUG", "ATTN_EXT_WERROR"])
def test_switch_that_is_neither_0_nor_1(name: str) -> None:
    assert f"{name} must be 0 or 1, not 'perhaps'" in refusal({name: "perhaps"})


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_max_jobs_that_is_no_number(value: str) -> None:
    assert f"MAX_JOBS must be a whole number from 1 up, not '{value}'" in refusal({"MAX_JOBS": value})


@pytest.mark.parametrize(("gigabytes", "cores", "jobs"), [(64, 4, 4), (4, 16, 2), (0.5, 8, 1), (None, 3, 3)])
def test_parallel_jobs_keep_within_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, gigabytes: float | None, cores: int, jobs: int
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(
        toolchain, "_available_memory", lambda: None if gigabytes is None else int(gigabytes * 1e9)
    )
    assert toolchain.parallel_jobs() == jobs


def test_max_jobs_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.parallel_jobs() == 7


def test_ninja_of_an_environment_that_is_not_activated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ninja", reason="ninja is not installed: pip install ninja")
    monkeypatch.setenv("PATH", tool_path(tmp_path / "bin", "ninja"))
    assert toolchain.find_ninja()


def test_second_build_waits_for_the_first_but_not_for_a_dead_one(tmp_path: Path) -> None:
    lock = tmp_path / "build" / ".lock"
    hold = (
        f"import pathlib, sys, time; sys.path.insert(0, {str(ROOT / 'build_support')!r})\n"
        "import attn_ext_toolchain as toolchain\n"
        f"with toolchain.exclusive(pathlib.Path({str(lock)!r})):\n"
        "    print('in', flush=True); time.sleep(float(sys.argv[1]))\n"
    )

    def start(seconds: int) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", hold, str(seconds)], stdout=subprocess.PIPE, text=True)

    with start(seconds=600) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "in\n"
            with start(seconds=0) as second:
                assert second.stdout is not None
                assert "waiting for another build" in second.stdout.readline()
                first.send_signal(signal.SIGKILL)
                assert second.stdout.readline() == "in\n"
                assert second.wait(timeout=60) == 0
        finally:
            first.kill()
