"""Everything that only a machine with a GPU can tell of attn_ext, in one run and one report: `make gpu-check`.

    python scripts/gpu_check.py            minutes
    python scripts/gpu_check.py --full     times all rows, not only the short ones

It builds for the GPU that is there, runs tests/cuda, has compute-sanitizer watch a script, and runs the benchmarks. The
report is build/gpu-check/report.md; what each step printed lies beside it. Exit codes: 0 all well; 1 a step failed;
2 there is no GPU that torch can use.

A step that cannot run here (no compute-sanitizer) is skipped, with the reason, and fails nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu-check"
TAIL = 150  # lines of a step's output that the report repeats where it failed, or where they are what one wants to read


@dataclass(frozen=True)
class Step:
    """A command of the check."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    shown: bool = False  # the report repeats the end of its output in any case
    skipped: str = ""  # why it cannot run here


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: Step
    status: str  # "passed", "skipped: …" or "FAILED (exit code …)"
    seconds: float = 0.0
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.status.startswith("FAILED")


# --- the steps ----------------------------------------------------------------------------------------------------


def steps(capability: tuple[int, int], full: bool) -> list[Step]:
    """All steps, in order, for a GPU of that generation."""
    python, quick = sys.executable, [] if full else ["--quick"]
    build = {"ATTN_EXT_CUDA": "1", "ATTN_EXT_CUDA_ARCHS": "{}{}".format(*capability)}
    # Without torch's own allocator each tensor is an allocation, whose end the sanitizer knows.
    watched = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizer = find_sanitizer()
    missing = "" if sanitizer else "there is no compute-sanitizer ($CUDA_HOME, PATH, /usr/local/cuda)"
    return [
        Step("build", [python, "setup.py", "--quiet", "build_ext", "--inplace"], build),
        Step("operators", [python, "scripts/cuda_registers.py"], shown=True),
        Step("exercise", [python, "scripts/gpu_exercise.py"], shown=True),
        Step("tests", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda"], shown=True),
        *(
            Step(
                f"sanitizer, {tool}",
                [sanitizer or "", "--tool", tool, "--error-exitcode", "1", python, "scripts/gpu_exercise.py"],
                watched,
                skipped=missing,
            )
            for tool in ("memcheck", "racecheck", "synccheck")
        ),
        *(
            Step(
                f"bench {name}",
                [python, "-m", "bench", name, "--device", "cuda", *quick, "--json", str(FOLDER / f"{name}.json")],
                shown=True,
            )
            for name in ("attention", "decode")
        ),
    ]  # fmt: skip


def find_sanitizer() -> str | None:
    """compute-sanitizer of $CUDA_HOME, else that on PATH or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME", "").strip()
    places = [os.path.join(home, "bin")] if home else []
    return shutil.which(
        "compute-sanitizer",
        path=os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),
    )


def run(step: Step, folder: Path) -> Outcome:
    """Runs a step, shows and keeps what it prints."""
    if step.skipped:
        return Outcome(step, f"skipped: {step.skipped}")
    began = time.monotonic()
    lines = []
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **step.environment}
    try:
        with subprocess.Popen(
            step.command, cwd=ROOT, env=environment, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        status = "passed" if process.returncode == 0 else f"FAILED (exit code {process.returncode})"
    except OSError as error:
        status = f"FAILED (it does not start: {error})"
    output = "".join(lines)
    (folder / file_name(step)).write_text(output, encoding="utf-8")
    return Outcome(step, status, time.monotonic() - began, output)


def file_name(step: Step) -> str:
    """Of what a step printed."""
    return step.name.replace(", ", "-").replace(" ", "-") + ".log"


def run_all(chosen: Iterable[Step], folder: Path) -> list[Outcome]:
    """Runs the steps one after the other, to the end: a GPU is not always at hand. Without a build there is no more."""
    outcomes: list[Outcome] = []
    for step in chosen:
        print(f"\n== {step.name}", flush=True)
        if outcomes and outcomes[0].failed:
            outcomes.append(Outcome(step, f"skipped: {outcomes[0].step.name} failed"))
        else:
            outcomes.append(run(step, folder))
        print(f"== {step.name}: {outcomes[-1].status}", flush=True)
    return outcomes


# --- the report ---------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What one must know to read the rest."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "GPU": f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} "
        f"multiprocessors, {properties.total_memory / 2**30:.0f} GiB; {torch.cuda.device_count()} in all",
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": sys.version.partition(" ")[0],
        "commit": first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def first_line(command: Sequence[str]) -> str:
    """The first line that a command prints; "unknown" where there is none."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return next((line.strip() for line in said.splitlines() if line.strip()), "unknown")


def report(where: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """The report as Markdown."""
    failed = [outcome.step.name for outcome in outcomes if outcome.failed]
    skipped = [outcome.step.name for outcome in outcomes if outcome.status.startswith("skipped")]
    verdict = f"FAILED: {'; '.join(failed)}." if failed else "All steps that ran passed."
    verdict += f" Skipped: {'; '.join(skipped)}." if skipped else ""
    lines = ["# attn_ext on a GPU", "", verdict, ""]
    lines += [f"* {name}: {value}" for name, value in where.items()]
    lines += ["", "| step | result | seconds | output |", "|---|---|---|---|"]
    for outcome in outcomes:
        ran = not outcome.status.startswith("skipped")
        seconds, file = (f"{outcome.seconds:.0f}", file_name(outcome.step)) if ran else ("", "")
        lines.append(f"| {outcome.step.name} | {outcome.status} | {seconds} | {file} |")
    for outcome in outcomes:
        if outcome.output and (outcome.failed or outcome.step.shown):
            end = outcome.output.rstrip().splitlines()[-TAIL:]
            lines += ["", f"## {outcome.step.name}", "", "```", *end, "```"]
    return "\n".join(lines) + "\n"


# --- main ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="time all rows, not only the short ones")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(
            "gpu_check: there is no GPU that torch can use on this machine, so there is nothing to check.",
            file=sys.stderr,
        )
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    where = machine()
    outcomes = run_all(steps(torch.cuda.get_device_capability(), options.full), FOLDER)
    path = FOLDER / "report.md"
    path.write_text(report(where, outcomes), encoding="utf-8")
    print(f"\n{report(where, outcomes)}\ngpu_check: {path}")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
