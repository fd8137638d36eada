"""Whether a build has CUDA kernels, for which GPUs, and what it says where it has none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from trees import ROOT

sys.path.insert(0, str(ROOT / "build_support"))
import attn_ext_nvcc as nvcc  # noqa: E402


@pytest.fixture(autouse=True)
def no_toolkit_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVCC", "CUDA_HOME", "ATTN_EXT_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)


def toolkit(folder: Path, release: str, library: bool = True) -> Path:
    """A folder with an nvcc that says what the real one says."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib64").mkdir()
    if library:
        (folder / "lib64" / "libcudart_static.a").write_bytes(b"")
    program = folder / "bin" / "nvcc"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.88";;\n'
        f'*) echo "#\\$ TOP={folder}" >&2;; esac\n'
    )
    program.chmod(0o755)
    return folder


def found(
    monkeypatch: pytest.MonkeyPatch, home: Path, torch_cuda: str | None, wanted: bool | None = None
) -> nvcc.Toolkit | str:
    monkeypatch.setenv("CUDA_HOME", str(home))
    return nvcc.find_toolkit(wanted, "2.13.0", torch_cuda)


def test_a_toolkit_of_torchs_cuda_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolkit(tmp_path / "with a space", "12.6")
    assert found(monkeypatch, home, "12.4") == nvcc.Toolkit(
        str(home / "bin" / "nvcc"), (12, 6), (80, 86, 89, 90), str(home / "lib64")
    )


@pytest.mark.parametrize(("release", "newest"), [("12.4", 90), ("12.7", 90), ("12.8", 120), ("13.0", 120)])
def test_generations_by_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, newest: int
) -> None:
    kit = found(monkeypatch, toolkit(tmp_path / "cuda", release), release)
    assert isinstance(kit, nvcc.Toolkit) and kit.archs[-1] == newest
    options = nvcc.flags(kit, ROOT, "g++")
    assert f"arch=compute_{newest},code=compute_{newest}" in options  # PTX, for what comes later
    assert "arch=compute_80,code=sm_80" in options


@pytest.mark.parametrize(("named", "archs"), [("80", (80,)), ("90 80", (80, 90)), ("8.0;12.0", (80, 120))])
def test_generations_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, archs: tuple[int, ...]
) -> None:
    monkeypatch.setenv("ATTN_EXT_CUDA_ARCHS", named)
    kit = found(monkeypatch, toolkit(tmp_path / "cuda", "13.0"), "13.0")
    assert isinstance(kit, nvcc.Toolkit) and kit.archs == archs


@pytest.mark.parametrize("named", ["hopper", "75", "90a x"])
def test_generations_that_there_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("ATTN_EXT_CUDA_ARCHS", named)
    with pytest.raises(SystemExit, match="ATTN_EXT_CUDA_ARCHS must name GPU generations from 80 on"):
        found(monkeypatch, toolkit(tmp_path / "cuda", "13.0"), "13.0")


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, toolkit(tmp_path / "cuda", "13.0"), "13.0", False) == (
        "ATTN_EXT_CUDA=0 at build time"
    )


def test_a_cpu_build_of_torch_takes_none_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = toolkit(tmp_path / "cuda", "13.0")
    assert "torch 2.13.0 is a CPU build" in str(found(monkeypatch, home, None))
    assert capsys.readouterr().out == ""  # nothing to warn of
    assert isinstance(found(monkeypatch, home, None, True), nvcc.Toolkit)


NOT_USABLE = {
    "mismatch": (
        "10.1",
        "12.6",
        "is of CUDA 10.1 and torch 2.13.0 of CUDA 12.6; have CUDA_HOME name a toolkit",
    ),
    "too old": ("12.3", "12.6", "is of CUDA 12.3, and 12.4 is the oldest"),
    "no version": ("what", "12.6", "does not say which release it is"),
}


@pytest.mark.parametrize("case", NOT_USABLE)
def test_toolkits_that_do_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    release, torch_cuda, words = NOT_USABLE[case]
    home = toolkit(tmp_path / "cuda", release)
    assert words in str(found(monkeypatch, home, torch_cuda))
    said = capsys.readouterr().out
    assert said.startswith("attn_ext: the CUDA kernels are left out: ") and words in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match="ATTN_EXT_CUDA=1 asks for the CUDA kernels, but"):
        found(monkeypatch, home, torch_cuda, True)


def test_no_runtime_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolkit(tmp_path / "cuda", "13.0", library=False)
    assert "no libcudart_static.a" in str(found(monkeypatch, home, "13.0"))


def test_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "there is no nvcc ($CUDA_HOME, PATH, /usr/local/cuda)" in str(found(monkeypatch, tmp_path, "13.0"))


def test_what_is_up_to_date_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc that writes down its calls, and the files it read."""
    home = toolkit(tmp_path / "cuda", "13.0")
    kit = found(monkeypatch, home, "13.0")
    assert isinstance(kit, nvcc.Toolkit)
    calls = tmp_path / "calls"
    (home / "bin" / "nvcc").write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {calls}\n'
        'while [ "$1" != -c ]; do shift; done\n'
        "source=$2; target=$4; depfile=$7\n"
        f'echo object > "$target"; echo "$target : $source \\\\\n {tmp_path}/header.h" > "$depfile"\n'
    )
    source, header = tmp_path / "kernel.cu", tmp_path / "header.h"
    source.write_text("")
    header.write_text("")

    def compiled(*options: str) -> int:
        calls.write_text("")
        objects = nvcc.compile_kernels(kit, [source], list(options), tmp_path / "out", 2)
        assert objects == [str(tmp_path / "out" / "kernel.o")]
        return len(calls.read_text().splitlines())

    assert compiled() == 1
    assert compiled() == 0
    assert compiled("-O1") == 1  # other options
    assert compiled("-O1") == 0
    later = (tmp_path / "out" / "kernel.o").stat().st_mtime_ns + 10**9
    os.utime(header, ns=(later, later))
    assert compiled("-O1") == 1
