"""How fast is `attn_ext.attention`, in share of what the machine can do and beside the other libraries on it?

Every row is first compared with `attn_ext.reference` in float64. A row that is wrong is not timed, and makes the exit
code 1. Then rivals take turns in blocks of their own, after pauses (thread pools go on spinning for a while after a
call). The machine's ceilings are measured in the same run, before and after. Rows where we lose are shown as they are.

With --device cuda (untried: no GPU has run it) CUDA events time each call, after the L2 cache was emptied; ceilings are
torch's matrix products in the row's dtype (fp32 without TF32); and each of torch's kernels behind SDPA has a figure.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from bench import memory, plot
from bench.cases import PASSES, Case, Inputs, all_cases, flops, full_scores, gpu_cases, make_inputs, select
from bench.common import (
    DTYPES,
    SCHEMA,
    BenchError,
    Column,
    Runner,
    add_row_filter,
    add_run_options,
    ceiling_of,
    describe_machine,
    machine_line,
    mean_ceilings,
    print_table,
    require_folder,
    say,
    seconds_of,
    threads_of,
    time_runners,
    write_csv,
    write_json,
)
from bench.device import NAMES, Device, device_for
from bench.peers import (
    BACKENDS,
    ENGINES,
    CannotRun,
    backend_runner,
    eager_attention,
    eager_options,
    engine_runner,
    runner_of,
    torch_forward,
    torch_runner,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench attention`."""
    parser.add_argument("--device", choices=NAMES, default="cpu")
    add_row_filter(parser)
    parser.add_argument("--dtype", action="append", default=[], choices=tuple(DTYPES), help="repeatable")
    parser.add_argument(
        "--pass", action="append", default=[], choices=PASSES, dest="passes", help="repeatable"
    )
    add_run_options(parser, seconds="1, quick 0.2")
    parser.add_argument("--quick", action="store_true", help="the short rows, less time each, no memory")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory (a process a row)")
    parser.add_argument("--no-engines", action="store_true", help="torch only, not onnxruntime and openvino")
    parser.add_argument("--json", metavar="FILE", help="write the result for compare, plot and table")
    parser.add_argument("--csv", metavar="FILE", help="write one line a row and rival")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the shares of the ceiling")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result or the memory was wrong."""
    cases = [*all_cases(), *(gpu_cases() if options.device == "cuda" else [])]
    cases = select(cases, rows=options.rows, dtypes=options.dtype, passes=options.passes)
    if options.quick:
        cases = [case for case in cases if case.quick]
    if not cases:
        raise BenchError(
            "no row fits these filters; --list names the rows (with --quick only the short ones run)"
        )
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    device = device_for(options.device)
    settings = Settings.of(options)
    for path in filter(None, (options.json, options.csv, options.plot)):  # now, not after minutes of work
        require_folder(path)
    if options.plot:
        plot.require_matplotlib()
    torch.set_num_threads(settings.threads)
    result = measure(cases, device, settings)
    show(result)
    if options.json:
        write_json(options.json, result)
    if options.csv:
        write_csv(options.csv, CSV_FIELDS, csv_lines(result))
    if options.plot:
        plot.draw(result, options.plot)
    return exit_code(result)


@dataclass(frozen=True)
class Settings:
    """How a run measures."""

    threads: int
    seconds: float  # per rival and row
    rounds: int
    pause: float  # before each block
    ceiling_seconds: float  # per ceiling
    checked_scores: int  # how many scores of a row may be checked, at most
    memory: bool
    engines: bool

    @staticmethod
    def of(options: argparse.Namespace) -> Settings:
        quick = options.quick
        return Settings(
            threads=threads_of(options),
            seconds=seconds_of(options, 0.2 if quick else 1.0),
            rounds=3 if quick else 5,
            pause=0.05 if quick else 0.1,
            ceiling_seconds=0.3 if quick else 1.0,
            checked_scores=2**24 if quick else 2**27,
            memory=options.device == "cpu" and not (quick or options.no_memory),
            engines=options.device == "cpu" and not options.no_engines,
        )


def measure(cases: Sequence[Case], device: Device, settings: Settings) -> dict[str, Any]:
    """The whole run: ceilings, rows, ceilings again, memory. Returns what goes into the JSON file."""
    machine = describe_machine(device.name, settings.threads)
    before = device.ceilings(settings.threads, settings.ceiling_seconds)
    rows = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.id}")
        rows.append(measure_row(case, device, settings))
    after = device.ceilings(settings.threads, settings.ceiling_seconds)
    ceilings = mean_ceilings(before, after)
    for row in rows:
        add_rates(row, ceilings)
    if settings.memory:
        say("peak memory, a process a row")
        for row, case in zip(rows, cases, strict=True):
            if row["check"]["ok"]:
                row["memory"] = memory.measure(case, settings.threads, ("attn_ext", "torch"))
    return {
        "schema": SCHEMA,
        "bench": "attention",
        "machine": machine,
        "settings": {"seconds": settings.seconds, "rounds": settings.rounds, "pause": settings.pause},
        "ceilings": {"before": before, "after": after, "mean": ceilings},
        "rows": rows,
        "memory_check": memory.check_promise(settings.threads) if settings.memory else None,
    }


def measure_row(case: Case, device: Device, settings: Settings) -> dict[str, Any]:
    """Checks one row, then times all rivals in it."""
    inputs = make_inputs(case, device.name)
    row: dict[str, Any] = {
        "id": case.id,
        "case": case.name,
        "dtype": case.dtype,
        "pass": case.direction,
        "flops": flops(case),
        "check": check(case, inputs, settings.checked_scores),
        "rivals": {},
        "memory": None,
    }
    if not row["check"]["ok"]:
        say(f"    WRONG: {row['check']['worst']}")
        return row
    runners = [our_runner(case, inputs), torch_runner(case, inputs)]
    for name in ENGINES if settings.engines else ():
        try:
            engine = engine_runner(name, case, inputs, settings.threads)
            engine.runner.call()
            _require_same(case, inputs, engine.output())
        except CannotRun as reason:
            row["rivals"][name] = {"skipped": str(reason)}
        else:
            runners.append(engine.runner)
    for name in BACKENDS if device.name == "cuda" else ():
        try:
            runner, out = backend_runner(name, case, inputs)
            if not case.dropout_p:  # torch draws a mask of its own
                _require_same(case, inputs, out)
        except CannotRun as reason:
            row["rivals"][name] = {"skipped": str(reason)}
        else:
            runners.append(runner)
    timings = time_runners(
        device.timer, runners, seconds=settings.seconds, rounds=settings.rounds, pause=settings.pause
    )
    for runner in runners:
        row["rivals"][runner.name] = {"how": runner.how, **timings[runner.name].report()}
    row["ratio"] = timings["torch"].median_us / timings["attn_ext"].median_us
    return row


def add_rates(row: dict[str, Any], ceilings: dict[str, float | None]) -> None:
    """Adds GFLOP/s and the share of the ceiling to every timed rival of a row."""
    name, ceiling = ceiling_of(row["dtype"], ceilings)
    row["ceiling"] = name
    for rival in row["rivals"].values():
        if "median_us" in rival:
            rival["gflops"] = row["flops"] / rival["median_us"] / 1e3
            rival["share"] = rival["gflops"] / ceiling if ceiling else None


def exit_code(result: dict[str, Any]) -> int:
    """1 where a row was wrong or the promise of linear memory broken, else 0."""
    wrong = any(not row["check"]["ok"] for row in result["rows"])
    promise = result["memory_check"]
    return int(wrong or (promise is not None and promise["kept"] is False))


# --- what is timed ------------------------------------------------------------------------------------------------


def our_forward(inputs: Inputs) -> Callable[[], Tensor]:
    """The call itself."""
    return functools.partial(attn_ext.attention, inputs.q, inputs.k, inputs.v, **inputs.options)


def our_runner(case: Case, inputs: Inputs) -> Runner:
    """Our side of a row."""
    return runner_of("attn_ext", case, inputs, our_forward(inputs))


def forward_and_backward(rival: str, case: Case, inputs: Inputs) -> list[Tensor]:
    """Output, and in rows with a backward pass the gradients of q, k, v and a learned bias."""
    forward = our_forward(inputs) if rival == "attn_ext" else torch_forward(case, inputs)[0]
    if case.direction == "forward":
        with torch.no_grad():
            return [forward()]
    with torch.enable_grad():
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.grad_out)]


# --- the check ----------------------------------------------------------------------------------------------------

SEED = 1234  # of the dropout mask, the same for both sides
LARGEST_PIECE = 2**23  # scores handed to the reference at once, where the row can be cut


def check(case: Case, inputs: Inputs, checked_scores: int) -> dict[str, Any]:
    """Compares the row's output and gradients with the reference in float64.

    Allowed: twice the error of plain PyTorch in the row's own dtype + 1e-5 (gradients: three times + 1e-4; fp64:
    + 1e-10).
    A large row is cut into the query heads of one key/value head each, which do not know of each other, and as many of
    those are compared as `checked_scores` allows, at least one, spread evenly.

    Returns:
        ok, worst (the tensor nearest to its limit, in words), checked ("all heads" or "3 of 8 …").
    """
    torch.manual_seed(SEED)
    got = forward_and_backward("attn_ext", case, inputs)
    names = ["out", "dq", "dk", "dv", "dbias"][: len(got)]
    worst, limit_share = "", -1.0
    pieces = list(_pieces(case, inputs))
    cost = full_scores(case) * (1 if case.direction == "forward" else 3)
    affordable = max(1, checked_scores * len(pieces) // max(cost, 1))
    chosen = pieces if affordable >= len(pieces) else pieces[:: math.ceil(len(pieces) / affordable)]
    for piece in chosen:
        truth, plain = (_on_plain_torch(piece, exact) for exact in (True, False))
        for name, whole, right, yardstick in zip(names, got, truth, plain, strict=True):
            error, allowed = error_and_allowance(piece.part_of(name, whole), right, yardstick, name == "out")
            share = error / allowed if math.isfinite(error) else math.inf
            if share > limit_share:
                worst, limit_share = (
                    f"{name} of {piece.where}: error {error:.2e}, allowed {allowed:.2e}",
                    share,
                )
    heads = "all heads" if len(chosen) == len(pieces) else f"{len(chosen)} of {len(pieces)} key/value heads"
    return {"ok": limit_share <= 1.0, "worst": worst, "checked": heads}


def error_and_allowance(got: Tensor, truth: Tensor, plain: Tensor, is_output: bool) -> tuple[float, float]:
    """Largest error, and what is allowed for it. A NaN or infinity of ours is an infinite error.

    Args:
        got: ours, in the row's dtype. truth: in float64. plain: plain PyTorch's, in the row's dtype.
        is_output: the output, or else a gradient.
    """
    truth, plain = truth.double(), plain.double()
    error = float((got.double() - truth).abs().nan_to_num(math.inf, math.inf).max()) if got.numel() else 0.0
    rounding = (truth.to(got.dtype).double() - truth).abs()
    yardstick = torch.maximum((plain - truth).abs().nan_to_num(0.0, 0.0), rounding)
    factor, floor = (2.0, 1e-5) if is_output else (3.0, 1e-4)
    if got.dtype == torch.float64:
        floor = 1e-10
    return error, factor * (float(yardstick.max()) if got.numel() else 0.0) + floor


@dataclass(frozen=True)
class _Piece:
    """The query heads of one key/value head of one sequence (or, not cut, the whole row), and where they came from."""

    case: Case
    inputs: Inputs
    where: str
    batch: slice
    query_heads: slice
    kv_heads: slice

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This piece of one of our results (a learned bias is never cut)."""
        if name == "dbias":
            return whole
        return whole[self.batch, self.kv_heads if name in ("dk", "dv") else self.query_heads]


def _pieces(case: Case, inputs: Inputs) -> Iterator[_Piece]:
    # The dropout mask depends on the place in the batch; the gradient of a bias sums over it.
    if case.dropout_p or case.bias == "learned" or full_scores(case) <= LARGEST_PIECE:
        yield _Piece(case, inputs, "the row", slice(None), slice(None), slice(None))
        return
    group = case.Hq // case.Hkv
    for b in range(case.B):
        for h in range(case.Hkv):
            batch, queries, keys = slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1)
            options = dict(inputs.options)
            for name in ("mask", "bias"):
                t = options.get(name)
                if t is not None and t.dim() == 4:
                    options[name] = t[
                        batch if t.shape[0] > 1 else slice(None), queries if t.shape[1] > 1 else slice(None)
                    ]
            for name, part in (("key_lengths", batch), ("alibi_slopes", queries), ("sinks", queries)):
                if name in options:
                    options[name] = options[name][part]
            grad_out = None if inputs.grad_out is None else inputs.grad_out[batch, queries]
            cut = Inputs(
                inputs.q[batch, queries], inputs.k[batch, keys], inputs.v[batch, keys], grad_out, options
            )
            yield _Piece(
                replace(case, B=1, Hq=group, Hkv=1),
                cut,
                f"sequence {b}, key/value head {h}",
                batch,
                queries,
                keys,
            )


def _on_plain_torch(piece: _Piece, exact: bool) -> list[Tensor]:
    """The piece by the reference in float64 (exact), or by plain PyTorch in the row's dtype."""
    case, inputs = piece.case, piece.inputs
    backward = case.direction != "forward"

    def leaf(t: Tensor, learned: bool = True) -> Tensor:
        return (t.detach().double() if exact else t.detach()).requires_grad_(backward and learned)

    q, k, v = leaf(inputs.q), leaf(inputs.k), leaf(inputs.v)
    options = dict(inputs.options)
    leaves = [q, k, v]
    if case.bias:
        options["bias"] = leaf(options["bias"], case.bias == "learned")
        leaves += [options["bias"]] if case.bias == "learned" and backward else []
    with torch.set_grad_enabled(backward):
        if exact or case.dropout_p:  # the mask of a dropout is the reference's to make
            torch.manual_seed(SEED)
            out = reference.attention(q, k, v, **options)
        else:
            out = eager_attention(q, k, v, **eager_options(case, Inputs(q, k, v, None, options)))
        if not backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out.to(out.dtype))]


def _require_same(case: Case, inputs: Inputs, theirs: Tensor) -> None:
    """CannotRun where another engine computes something else than the row (its figure would mean nothing)."""
    ours = forward_and_backward("attn_ext", case, inputs)[0].float()
    theirs = theirs.float()
    if theirs.shape != ours.shape:
        raise CannotRun(f"gives shape {tuple(theirs.shape)}")
    limit = (1e-3 if case.dtype == "fp32" else 3e-2) * float(ours.abs().max())
    difference = float((ours - theirs).abs().max())
    if not difference <= limit:
        raise CannotRun(f"differs from the reference by {difference:.1e}")


# --- output -------------------------------------------------------------------------------------------------------


def microseconds(rival: dict[str, Any]) -> str:
    """Median, and how far p20 and p80 lie from it."""
    median = rival["median_us"]
    half = (rival["p80_us"] - rival["p20_us"]) / 2
    return f"{_three_figures(median)} ±{half / median:.0%}"


def rate(gflops: float) -> str:
    """GFLOP/s, three figures."""
    return _three_figures(gflops)


def _three_figures(x: float) -> str:
    if x <= 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(x)))
    return f"{x:.{digits}f}"


def percent(share: float | None) -> str:
    """Share of the ceiling in percent."""
    return "–" if share is None else f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def show(result: dict[str, Any]) -> None:
    """Prints the table, what the ceilings were, and a sentence or two that read it."""
    unit, by = unit_of(result)
    headings = (
        "dtype",
        "pass",
        "ours µs",
        unit,
        "% ceiling",
        "torch µs",
        unit,
        "ratio",
        f"others {unit}",
        "MB",
        "+ours",
        "+torch",
    )
    columns = [Column("B,H,L,D", right=False)]
    columns += [Column(text, right=text not in ("dtype", "pass", f"others {unit}")) for text in headings]
    cells = []
    for row in result["rows"]:
        start = [row["case"], row["dtype"], row["pass"]]
        if not row["check"]["ok"]:
            cells.append([*start, "WRONG", *[""] * 5, row["check"]["worst"], *[""] * 3])
            continue
        ours, theirs = row["rivals"]["attn_ext"], row["rivals"]["torch"]
        others = [
            f"{name} {rate(rival['gflops'] / by)}"
            for name, rival in row["rivals"].items()
            if name not in ("attn_ext", "torch") and "gflops" in rival
        ]
        cells.append(
            [
                *start,
                microseconds(ours),
                rate(ours["gflops"] / by),
                percent(ours["share"]),
                microseconds(theirs) + (MARKS[theirs["how"]] or " "),
                rate(theirs["gflops"] / by),
                f"{row['ratio']:.2f}×",
                ", ".join(others) or "–",
                *memory_cells(row["memory"]),
            ]
        )
    print_table(columns, cells, machine_line(result["machine"]))
    print()
    for line in notes(result):
        print(line)


def unit_of(result: dict[str, Any]) -> tuple[str, float]:
    """The unit of a table's rates, and how many GFLOP/s it is."""
    return ("GFLOP/s", 1.0) if result["machine"]["device"] == "cpu" else ("TFLOP/s", 1e3)


def memory_cells(measured: dict[str, Any] | None) -> list[str]:
    """What the call returns, and what ours and torch's peak rose by beyond that, in MB."""
    ours, theirs = ((measured or {}).get(name) for name in ("attn_ext", "torch"))
    numbers = [
        ours and ours["returned_bytes"],
        ours and ours["extra_bytes"],
        theirs and theirs["extra_bytes"],
    ]
    return ["–" if number is None else f"{number / 1e6:.1f}" for number in numbers]


MARKS = {"SDPA": "", "SDPA with mask": "ᵐ", "formula": "ᶠ"}
MARKS_MEAN = {
    "SDPA with mask": "with the options as one ready-made mask",
    "formula": "the plain formula, where SDPA lacks the option",
}


def marks_sentence(rows: Sequence[dict[str, Any]]) -> str:
    """What the marks that these rows have mean; empty where they have none."""
    ways = {row["rivals"]["torch"].get("how") for row in rows if row["check"]["ok"]}
    return "".join(f"; {MARKS[way]} {meaning}" for way, meaning in MARKS_MEAN.items() if way in ways)


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the table."""
    rows = [row for row in result["rows"] if row["check"]["ok"]]
    lost = [row["id"] for row in rows if row["ratio"] < 1]
    lines = [
        "Time of one call: median ± half the spread from the 20th to the 80th percentile. B,Hq/Hkv,Lq×Lk,D/Dv. "
        "flops: 4·B·Hq·Lq·Lk·(D+Dv)/2 of visible scores (causal: half), backward 2.5 ×.",
        f"torch: F.scaled_dot_product_attention{marks_sentence(rows)}. ratio: torch's time over "
        "ours. MB: what the call returns; + what the peak of memory "
        "rises by beyond that (backward rows: with their forward pass).",
    ]
    first, last = result["ceilings"]["before"], result["ceilings"]["after"]
    if first:
        unit, by = unit_of(result)
        peaks = [
            f"{label} {_pair(first[key], last[key], by)}"
            for key, label in CEILING_NAMES.items()
            if key in first
        ]
        read = f"memory read {_pair(first['read_gbs'], last['read_gbs'])} GB/s"
        lines.append(f"Ceilings before → after: {', '.join(peaks)} {unit}; {read}.")
        if "fma_fp32" in first:
            lines[-1] += (
                " fp16 rows are shares of fp32 FMA, bf16 rows of the best of tiles, dot product and fp32 FMA."
            )
        drift = max(abs(last[k] / first[k] - 1) for k in first if first[k] and last[k])
        if drift > 0.1:
            lines.append(f"The ceilings moved by {drift:.0%} during the run: the machine was not quiet.")
    skipped: dict[str, set[str]] = {}
    for row in rows:
        for name, rival in row["rivals"].items():
            if "skipped" in rival:
                skipped.setdefault(name, set()).add(rival["skipped"])
    lines += [f"{name} has no figure where: {'; '.join(sorted(why))}." for name, why in skipped.items()]
    starts = [
        f"{name} {rows[0]['rivals'][name]['first_us'] / 1e3:.1f} ms" for name in ("attn_ext", "torch") if rows
    ]
    if starts:
        lines.append(
            f"First timed call of the first row (after its check): {', '.join(starts)}; not in the medians."
        )
    if result["memory_check"]:
        lines.append(memory.promise_line(result["memory_check"]) + ".")
    wrong = [row["id"] for row in result["rows"] if not row["check"]["ok"]]
    lines.append(
        f"attn_ext is slower than torch in {len(lost)} of {len(rows)} rows"
        + (f": {'; '.join(lost)}." if lost else ".")
    )
    if wrong:
        lines.append(f"WRONG RESULTS in {len(wrong)} rows: {'; '.join(wrong)}.")
    return lines


CEILING_NAMES = {
    "fma_fp32": "fp32 FMA",
    "fma_fp64": "fp64 FMA",
    "dot_bf16": "bf16 dot product",
    "tiles_bf16": "bf16 tiles",
    "gemm_bf16": "matrix product bf16",
    "gemm_fp16": "fp16",
    "gemm_fp32": "fp32 without TF32",
    "gemm_fp64": "fp64",
}


def _pair(first: float | None, last: float | None, by: float = 1.0) -> str:
    return "none" if first is None or last is None else f"{first / by:.0f} → {last / by:.0f}"


CSV_FIELDS = (
    *(
        "id",
        "dtype",
        "pass",
        "rival",
        "how",
        "median_us",
        "p20_us",
        "p80_us",
        "first_us",
        "samples",
        "calls_per_sample",
    ),
    *(
        "flops",
        "gflops",
        "share",
        "ceiling",
        "skipped",
        "check",
        "peak_bytes",
        "returned_bytes",
        "extra_bytes",
    ),
    *("device", "threads", "isa", "attn_ext", "torch", "time"),
)


def csv_lines(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for every row and rival."""
    for row in result["rows"]:
        check = "ok" if row["check"]["ok"] else row["check"]["worst"]
        for rival, numbers in row["rivals"].items() or [("attn_ext", {})]:
            peak = (row["memory"] or {}).get(rival) or {}
            yield {**result["machine"], **row, "check": check, "rival": rival, **numbers, **peak}
