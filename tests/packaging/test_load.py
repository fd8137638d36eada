"""Whatever keeps the compiled part from loading is told in one sentence that says what to run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder of its own with nothing of attn_ext but its loader; returns the package in it."""
    folder = tmp_path / "site" / "attn_ext"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    shutil.copy(ROOT / "attn_ext" / "_load.py", folder)
    return folder


def fake_torch(package: Path, source: str) -> None:
    """Puts a `torch` beside the package that is found before the real one."""
    (package.parent / "torch").mkdir()
    (package.parent / "torch" / "__init__.py").write_text(source)


def sentence_of_loading(package: Path, before: str = "") -> str:
    """Imports the loader in a new interpreter; returns the one sentence that it must fail with."""
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); {before}\n"
        # what an editable install of this checkout put there would find the checkout's binary
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
        "import attn_ext._load"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=package.parent,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    kind, _, sentence = done.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "ImportError", done.stderr
    assert sentence.startswith("attn_ext") and sentence.endswith("."), sentence
    return sentence


def test_no_torch(package: Path) -> None:
    said = sentence_of_loading(package, before="sys.modules['torch'] = None")
    assert "needs PyTorch 2.10 or newer" in said
    assert "has none" in said
    assert f"{sys.executable} -m pip install 'torch>=2.10'" in said


def test_torch_too_old(package: Path) -> None:
    fake_torch(package, "__version__ = '2.9.1+cpu'")
    said = sentence_of_loading(package)
    assert "needs PyTorch 2.10 or newer" in said
    assert "has 2.9.1+cpu" in said
    assert "pip install 'torch>=2.10'" in said


def test_torch_of_two_digits_is_not_too_old(package: Path) -> None:
    fake_torch(package, "__version__ = '2.10.0'")
    assert "is missing from" in sentence_of_loading(package)


@pytest.mark.parametrize(
    "source",
    ["raise OSError('libcudart.so.13: cannot open shared object file')", "import no_such_module_anywhere"],
)
def test_torch_that_does_not_import(package: Path, source: str) -> None:
    fake_torch(package, source)
    said = sentence_of_loading(package)
    assert "does not import" in said
    assert "libcudart.so.13" in said or "no_such_module_anywhere" in said
    assert "--force-reinstall torch" in said


def test_a_torch_that_is_none(package: Path) -> None:
    fake_torch(package, "")
    said = sentence_of_loading(package)
    assert str(package.parent / "torch") in said
    assert "is none" in said


def test_not_built_source_tree(package: Path) -> None:
    (package.parent / "setup.py").write_text("")
    said = sentence_of_loading(package)
    assert "not built in this source tree" in said
    assert "`make build`" in said
    assert str(package.parent) in said


def test_installed_without_its_binary(package: Path) -> None:
    said = sentence_of_loading(package)
    assert f"missing from {package}" in said
    assert "--force-reinstall" in said


def test_built_for_another_python(package: Path) -> None:
    (package / "_C.cpython-99-x86_64-linux-gnu.so").write_bytes(b"")
    said = sentence_of_loading(package)
    assert "another Python (_C.cpython-99-x86_64-linux-gnu.so" in said
    assert f"loads _C{SUFFIX}" in said


def test_simulated_cuda_kernels_that_are_not_built(package: Path) -> None:
    said = sentence_of_loading(package, before="import os; os.environ['ATTN_EXT_CUDA_SIM'] = '1'")
    assert "which are not built" in said
    assert str(package.parent / "build" / "cuda_sim" / "attn_ext" / f"_C{SUFFIX}") in said
    assert f"{sys.executable} setup.py build_cuda_sim" in said


def test_simulated_cuda_kernels_by_a_word_that_is_no_switch(package: Path) -> None:
    said = sentence_of_loading(package, before="import os; os.environ['ATTN_EXT_CUDA_SIM'] = 'yes'")
    assert "ATTN_EXT_CUDA_SIM must be 0 or 1, not 'yes'" in said


@pytest.mark.parametrize("content", [b"", b"this is no shared object" * 100])
def test_file_that_is_no_shared_object(package: Path, content: bytes) -> None:
    (package / f"_C{SUFFIX}").write_bytes(content)
    said = sentence_of_loading(package)
    assert "its file does not load" in said
    assert "--force-reinstall" in said


def test_torch_lacks_a_symbol(package: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = 'extern "C" int aoti_torch_of_the_future(); int here() { return aoti_torch_of_the_future(); }'
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-z,now", "-x", "c++", "-", "-o", str(package / f"_C{SUFFIX}")],
        input=source,
        text=True,
        check=True,
    )
    said = sentence_of_loading(package)
    assert "asks for `aoti_torch_of_the_future`, which torch 2." in said
    assert "--force-reinstall" in said


def test_torch_libraries_are_not_found(package: Path) -> None:
    fake_torch(package, "__version__ = '2.13.0'")  # a torch that brings no libraries
    shutil.copy(sys.modules["attn_ext"]._load._C.__file__, package / f"_C{SUFFIX}")
    said = sentence_of_loading(package)
    assert "does not find torch's libraries" in said
    assert "libtorch_cpu.so" in said or "libc10.so" in said
