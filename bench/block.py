"""How fast is a whole encoder block, beside torch.nn.TransformerEncoderLayer with the same weights?

BERT-base sizes: d_model 768, 12 heads, d_ff 3072. Two rows a shape: a train step (forward and backward, dropout 0.1)
and evaluation without gradients, where torch takes its fused fast path; in fp32, and in bf16 autocast. Every row is
first compared with torch's layer without dropout, output and gradient; a row that is wrong is not timed, and makes the
exit code 1. Rows where we lose are shown as they are.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_ext import masks
from attn_ext.nn import from_torch
from bench.attention import microseconds
from bench.common import (
    SCHEMA,
    BenchError,
    Column,
    CpuTimer,
    Runner,
    add_row_filter,
    add_run_options,
    describe_machine,
    machine_line,
    print_table,
    require_folder,
    say,
    seconds_of,
    threads_of,
    time_runners,
    write_json,
)

D_MODEL, HEADS, D_FF, DROPOUT = 768, 12, 3072, 0.1
SHAPES = ((8, 128), (4, 512))
# Largest difference from torch's layer, as a share of the largest number: both round, in other orders.
ALLOWED = {"fp32": 1e-4, "bf16": 4e-2}


@dataclass(frozen=True)
class Case:
    """One row."""

    batch: int
    length: int
    work: str  # "train" or "eval"
    dtype: str  # "fp32", or "bf16" for autocast
    padded: bool = False  # the second half of the sequences is half as long

    @property
    def id(self) -> str:
        """Names the row in filters and files."""
        return f"{self.dtype} {self.work} {self.batch}×{self.length}" + (" padded" if self.padded else "")

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast, where the row is bf16."""
        return torch.autocast("cpu", torch.bfloat16) if self.dtype == "bf16" else nullcontext()


def all_cases() -> list[Case]:
    """The rows, in the order of the table."""
    cases = [
        Case(batch, length, work, dtype)
        for dtype in ("fp32", "bf16")
        for work in ("train", "eval")
        for batch, length in SHAPES
    ]
    return [*cases, Case(8, 128, "train", "fp32", padded=True), Case(8, 128, "eval", "fp32", padded=True)]


def chosen(texts: Sequence[str]) -> list[Case]:
    """The rows whose id holds one of `texts`; without any, all that this CPU has matrix products for.

    A bf16 block is mostly torch's own linear layers, and where the CPU has no AVX-512 their backward takes about a
    hundred times what fp32 takes: minutes a row that say nothing of attention. `--rows bf16` measures them anyway.
    """
    if texts:
        return [case for case in all_cases() if any(text in case.id for text in texts)]
    fast_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [case for case in all_cases() if fast_bf16 or case.dtype != "bf16"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench block`."""
    add_row_filter(parser)
    add_run_options(parser, seconds="3, quick 0.5")
    parser.add_argument("--quick", action="store_true", help="less time a row")
    parser.add_argument("--json", metavar="FILE", help="write the result for compare")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result was wrong."""
    cases = chosen(options.rows)
    if not cases:
        raise BenchError("no row fits these filters; --list names the rows")
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    threads = threads_of(options)
    seconds = seconds_of(options, 0.5 if options.quick else 3.0)
    if options.json:
        require_folder(options.json)
    torch.set_num_threads(threads)
    if not options.rows and len(cases) < len(all_cases()):
        say(
            "bf16 rows are left out: torch has no fast bf16 linear layers on this CPU (--rows bf16 measures them)"
        )
    result = measure(cases, threads, seconds)
    show(result)
    if options.json:
        write_json(options.json, result)
    return int(any(not row["check"]["ok"] for row in result["rows"]))


def measure(cases: Sequence[Case], threads: int, seconds: float) -> dict[str, Any]:
    """The whole run. Returns what goes into the JSON file."""
    rows = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.id}")
        rows.append(measure_row(case, seconds))
    return {
        "schema": SCHEMA,
        "bench": "block",
        "machine": describe_machine("cpu", threads),
        "settings": {"seconds": seconds, "d_model": D_MODEL, "h": HEADS, "d_ff": D_FF, "dropout": DROPOUT},
        "rows": rows,
    }


def measure_row(case: Case, seconds: float) -> dict[str, Any]:
    """Checks one row, then times both sides."""
    torch.manual_seed(0)
    x = torch.randn(case.batch, case.length, D_MODEL)
    grad = torch.randn_like(x)
    check = compare(case, steps(case, 0.0, x, grad))
    row: dict[str, Any] = {"id": case.id, "check": check, "rivals": {}}
    if not check["ok"]:
        say(f"    WRONG: {check['worst']}")
        return row
    runners = [
        Runner(name, step, grad=case.work == "train") for name, step in steps(case, DROPOUT, x, grad).items()
    ]
    timings = time_runners(CpuTimer(), runners, seconds=seconds, rounds=5, pause=0.1)
    for name, timing in timings.items():
        row["rivals"][name] = {
            **timing.report(),
            "tokens_per_second": x[..., 0].numel() / timing.median_us * 1e6,
        }
    row["ratio"] = timings["torch"].median_us / timings["attn_ext"].median_us
    return row


def steps(case: Case, dropout: float, x: Tensor, grad: Tensor) -> dict[str, Callable[[], list[Tensor]]]:
    """What is timed, by rival: returns the output and, of a train step, the gradients of x and all parameters."""
    torch.manual_seed(1)
    theirs = nn.TransformerEncoderLayer(D_MODEL, HEADS, D_FF, dropout, activation="gelu", batch_first=True)
    theirs.train(case.work == "train")
    ours = from_torch(theirs)
    lengths = torch.full((case.batch,), case.length)
    if case.padded:
        lengths[case.batch // 2 :] //= 2
    key_lengths = lengths if case.padded else None
    padding = masks.to_torch_key_padding_mask(masks.padding(lengths, case.length)) if case.padded else None
    forwards = {
        "attn_ext": (ours, functools.partial(ours, key_lengths=key_lengths)),
        "torch": (theirs, functools.partial(theirs, src_key_padding_mask=padding)),
    }
    return {
        name: functools.partial(_step, case, module, forward, x, grad)
        for name, (module, forward) in forwards.items()
    }


def _step(
    case: Case, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> list[Tensor]:
    if case.work == "eval":
        with torch.no_grad(), case.precision():
            return [forward(x)]
    x = x.detach().requires_grad_()
    with case.precision():
        out = forward(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad.to(out.dtype))]


def compare(case: Case, sides: dict[str, Callable[[], list[Tensor]]]) -> dict[str, Any]:
    """Compares both sides: the output, and the gradient of x (the parameters come in another order and number).

    Padded positions are left out: torch's fast path gives 0 there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of nested tensors, a prototype in torch
        ours, theirs = (sides[name]() for name in ("attn_ext", "torch"))
    worst, share = "", -1.0
    for name, mine, yours in zip(("out", "dx"), ours, theirs, strict=False):
        real = torch.ones(case.batch, case.length, 1, dtype=torch.bool)
        if case.padded and case.work == "eval":
            real[case.batch // 2 :, case.length // 2 :] = False
        difference = ((mine.float() - yours.float()) * real).abs().max().item()
        allowed = ALLOWED[case.dtype] * yours.float().abs().max().item()
        if not difference / allowed <= share:
            worst, share = f"{name}: differs by {difference:.2e}, allowed {allowed:.2e}", difference / allowed
    return {"ok": share <= 1.0, "worst": worst, "checked": "output and gradient of x"}


def show(result: dict[str, Any]) -> None:
    """Prints the table and how to read it."""
    columns = [Column("row", right=False)]
    columns += [Column(text) for text in ("ours µs", "tokens/s", "torch µs", "tokens/s", "ratio")]
    cells = []
    for row in result["rows"]:
        if not row["check"]["ok"]:
            cells.append([row["id"], "WRONG", row["check"]["worst"], "", "", ""])
            continue
        sides = [row["rivals"][name] for name in ("attn_ext", "torch")]
        figures = [
            text for side in sides for text in (microseconds(side), f"{side['tokens_per_second']:,.0f}")
        ]
        cells.append([row["id"], *figures, f"{row['ratio']:.2f}×"])
    print_table(columns, cells, machine_line(result["machine"]))
    lost = [row["id"] for row in result["rows"] if row["check"]["ok"] and row["ratio"] < 1]
    reading = [
        f"batch × tokens; d_model {D_MODEL}, {HEADS} heads, d_ff {D_FF}.",
        "Median ± half the spread from the 20th to the 80th percentile.",
        f"Slower than torch in {len(lost)} of {len(cells)} rows" + (f": {'; '.join(lost)}." if lost else "."),
    ]
    print("\n" + " ".join(reading))
