"""What is installed says of itself what it should, and its binary asks of torch only what it may."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_ext._load import _C


def _readelf(*options: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    return subprocess.run(
        ["readelf", "--wide", *options, _C.__file__], check=True, capture_output=True, text=True
    ).stdout


def test_asks_for_torch_and_numpy_and_nothing_else_at_run_time() -> None:
    required = importlib.metadata.requires("attn_ext") or []
    assert sorted(line for line in required if "extra ==" not in line) == ["numpy", "torch>=2.10"]


@pytest.mark.parametrize("extra", ["bench", "cli", "dev", "hf", "plot", "test"])
def test_offers_the_extra(extra: str) -> None:
    assert extra in (importlib.metadata.metadata("attn_ext").get_all("Provides-Extra") or [])


def test_console_script_is_there() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="attn-ext")
    assert [script.value for script in scripts] == ["attn_ext.cli:main"]


def test_one_version_everywhere() -> None:
    import attn_ext

    assert attn_ext.__version__ == importlib.metadata.version("attn_ext") == _C.build_info()["version"]


def test_build_info_tells_how_it_was_built() -> None:
    info = _C.build_info()
    assert info["torch_target"] == "2.10"
    assert info["cxx_standard"] >= 202002
    assert "scalar" in info["isas"]
    assert any(name in info["compiler"] for name in ("GCC", "lang"))
    assert info["cuda"] == (info["cuda_reason"] == "")


def test_every_isa_is_either_supported_or_says_why_not() -> None:
    for isa in _C.isas():
        assert (isa["why_not"] is None) == (isa["compiled"] and isa["supported"]), isa


def test_links_libtorch_cpu_and_libc10_only() -> None:
    needed = [
        line.split("[")[1].rstrip("]") for line in _readelf("--dynamic").splitlines() if "(NEEDED)" in line
    ]
    of_torch = {name for name in needed if name.startswith(("libtorch", "libc10", "libcu", "libshm"))}
    assert of_torch == {"libtorch_cpu.so", "libc10.so"}


def test_uses_nothing_of_torch_but_its_stable_abi() -> None:
    undefined = [
        line.split()[-1].split("@")[0] for line in _readelf("--dyn-syms").splitlines() if " UND " in line
    ]
    # Mangled names of the namespaces at, c10 and torch: C++ that changes from one release to the next.
    unstable = [
        name
        for name in undefined
        if name.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "_ZNK3c10"))
    ]
    assert unstable == []
    assert any(name.startswith("aoti_torch_") or name.startswith("torch_") for name in undefined)


def test_source_tree_has_the_licence_that_the_metadata_names() -> None:
    assert importlib.metadata.metadata("attn_ext")["License-Expression"] == "MIT"
    assert (Path(__file__).resolve().parents[2] / "LICENSE").read_text().startswith("MIT License")
