"""scripts/gpu_check.py: what of it a machine without a GPU can see."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def says(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"]


def test_without_a_gpu_it_is_one_sentence_and_2() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # also where there is one
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "no GPU" in done.stderr and len(done.stderr.splitlines()) == 1


def test_all_steps_run_and_the_report_says_how_they_ended(gpu_check: ModuleType, tmp_path: Path) -> None:
    Step = gpu_check.Step
    outcomes = gpu_check.run_all(
        [
            Step("build", says("built")),
            Step("tests", says("2 failed", 3)),
            Step("sanitizer, memcheck", ["none"], skipped="it is not installed"),
            Step("nowhere", ["/no/such/program"]),
            Step("bench", [sys.executable, "-c", "import os; print(os.environ['HOW'])"], {"HOW": "fast"}, shown=True),
        ],
        tmp_path,
    )  # fmt: skip
    assert [outcome.failed for outcome in outcomes] == [False, True, False, True, False]
    assert (tmp_path / "tests.log").read_text() == "2 failed\n"
    text = gpu_check.report({"GPU": "A GPU, sm_90"}, outcomes)
    assert "FAILED: tests; nowhere. Skipped: sanitizer, memcheck.\n" in text and "* GPU: A GPU, sm_90" in text
    assert "| tests | FAILED (exit code 3) |" in text and "| build | passed |" in text
    assert "| sanitizer, memcheck | skipped: it is not installed |  |  |" in text
    assert "\n2 failed\n" in text and "\nfast\n" in text and "\nbuilt\n" not in text


def test_a_build_that_fails_is_the_end(gpu_check: ModuleType, tmp_path: Path) -> None:
    outcomes = gpu_check.run_all(
        [gpu_check.Step("build", says("no", 1)), gpu_check.Step("tests", says("yes"))], tmp_path
    )
    assert [outcome.status for outcome in outcomes] == ["FAILED (exit code 1)", "skipped: build failed"]
    assert "All steps that ran passed" not in gpu_check.report({}, outcomes)


def test_the_steps_are_for_the_gpu_that_is_there_and_name_what_exists(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    steps = {step.name: step for step in gpu_check.steps((12, 0), full=False)}
    assert steps["build"].environment == {"ATTN_EXT_CUDA": "1", "ATTN_EXT_CUDA_ARCHS": "120"}
    assert all(bool(step.skipped) == name.startswith("sanitizer") for name, step in steps.items())
    for step in steps.values():
        for word in step.command:
            if word.startswith(("scripts/", "tests/")) or word == "setup.py":
                assert (ROOT / word).exists()
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: "/a/compute-sanitizer")
    memcheck = {step.name: step for step in gpu_check.steps((9, 0), full=True)}["sanitizer, memcheck"]
    assert memcheck.command[:3] == ["/a/compute-sanitizer", "--tool", "memcheck"] and not memcheck.skipped
    assert "--quick" in steps["bench decode"].command
    assert "--quick" not in [w for s in gpu_check.steps((9, 0), full=True) for w in s.command]
