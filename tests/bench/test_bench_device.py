"""Where a benchmark runs: what of the GPU's side can be seen without one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from bench_support import made_up_result, made_up_row, quick_timing

from attn_ext import _load
from bench import attention, cases, common, decode, decode_cases, device, over_length, peers
from bench.common import BenchError, CpuTimer

GEMMS = {"gemm_bf16": 8e5, "gemm_fp16": 7e5, "gemm_fp32": 5e4, "gemm_fp64": 6e4, "read_gbs": 4e3}
SMALL = cases.Case("fp32", "forward", 2, 4, 16, 8, causal=True)


class Clock:
    """A device whose time passes by what is queued: 7 ms for what comes between, 3 ms a call."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, [""]

    def queue(self, what: str, milliseconds: float) -> None:
        self.now += milliseconds
        self.done.append(what)

    def event(self) -> Any:
        clock = self

        class Event:
            at = float("nan")

            def record(self) -> None:
                self.at = clock.now
                clock.done.append("event")

            def elapsed_time(self, later: Any) -> float:
                return later.at - self.at

        return Event()


def test_events_time_the_calls_and_nothing_between_them() -> None:
    clock = Clock()
    timer = device.EventTimer(
        clock.event, lambda: clock.queue("wait", 100.0), lambda: clock.queue("flush", 7.0)
    )
    assert timer.seconds_per_call(lambda: clock.queue("call", 3.0), 2) == pytest.approx(3e-3)
    assert clock.done[1:] == ["wait", *["flush", "event", "call", "event"] * 2, "wait"]


def test_ceilings_are_of_the_fastest_call() -> None:
    times = iter([9.0, 9.0, 5e-3, 4e-3, 5e-3, 9.0, 9.0, 5e-3, 2e-3, 5e-3])

    class Timer:
        def seconds_per_call(self, call: Any, calls: int) -> float:
            call()
            return next(times)

    assert device.measure_gemm(Timer(), "fp32", 100, 1e-9, "cpu") == pytest.approx(2 * 100**3 / 4e-3 / 1e9)
    assert device.measure_read(Timer(), 4000, 1e-9, "cpu") == pytest.approx(4000 / 2e-3 / 1e9)
    assert device.measure_gemm(CpuTimer(), "bf16", 64, 1e-3, "cpu") > 0


def test_a_gpus_rows_are_shares_of_matrix_products_in_their_dtype() -> None:
    for dtype in ("bf16", "fp16", "fp32", "fp64"):
        assert common.ceiling_of(dtype, GEMMS) == (f"gemm_{dtype}", GEMMS[f"gemm_{dtype}"])
    assert common.ceiling_of("int8", GEMMS) == ("gemm_fp32", 5e4)


def test_the_table_of_a_gpu_has_its_own_unit_ceilings_and_rivals(capsys: pytest.CaptureFixture[str]) -> None:
    row = made_up_row(cases.Case("bf16", "forward", 4, 16, 4096, 128), 1000.0, 2000.0)
    row["rivals"]["flash"] = dict(row["rivals"]["torch"])
    row["rivals"]["cudnn"] = {"skipped": "refused: no"}
    attention.add_rates(row, GEMMS)
    result = made_up_result([row])
    result["machine"]["device"] = "A GPU"
    result["ceilings"] = {"before": GEMMS, "after": GEMMS, "mean": GEMMS}
    attention.show(result)
    shown = capsys.readouterr().out
    tflops = 4 * 4 * 16 * 4096 * 4096 * 128 / 1e-3 / 1e12
    assert f"{tflops:.0f}" in shown and f"{tflops * 1e3 / 8e5:.0%}" in shown and "TFLOP/s" in shown
    assert f"flash {tflops / 2:.0f}" in shown.replace(".0", "") and "A GPU; attn_ext" in shown
    assert "matrix product bf16 800 → 800" in shown and "cudnn has no figure where: refused: no." in shown


def test_each_backend_of_torch_has_a_figure_or_a_reason() -> None:
    inputs = cases.make_inputs(SMALL)
    runner, out = peers.backend_runner("math", SMALL, inputs)
    assert runner.name == "math"
    torch.testing.assert_close(out, attention.our_forward(inputs)())
    torch.testing.assert_close(runner.call(), out)
    with pytest.raises(peers.CannotRun, match=r"^refused: "):
        peers.backend_runner("cudnn", SMALL, inputs)
    capped = cases.Case("fp32", "forward", 1, 2, 8, 8, softcap=2.0)
    with pytest.raises(peers.CannotRun, match="lacks the option"):
        peers.backend_runner("math", capped, cases.make_inputs(capped))


def test_a_refusal_says_what_torch_says() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)

    def refused() -> torch.Tensor:
        import warnings

        warnings.warn("Flash attention kernel not used because: (Triggered internally at x)", stacklevel=1)
        warnings.warn("Flash attention has no fp64. (Triggered internally at y)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(peers.CannotRun, match=r"^refused: Flash attention has no fp64\.$"):
        peers.answer_of(refused)
    assert peers.answer_of(lambda: q) is q


def test_a_build_without_cuda_kernels_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_load, "cuda_device_type", None)
    monkeypatch.setattr(_load, "why_no_cuda", "a reason")
    with pytest.raises(BenchError, match=r"no CUDA kernels here \(a reason\)"):
        device.device_for("cuda")


# --- tensors: those of another device cannot meet the CPU's, on a GPU as little as on "meta" ----------------------


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no autocast for "meta" that the reference could switch off."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


SMALLER = [case for case in [*cases.all_cases(), *cases.gpu_cases()] if case.Lk <= 2048 and case.B < 100]


@pytest.mark.parametrize("case", SMALLER, ids=lambda c: c.id)
def test_all_of_a_row_is_computed_on_its_device(case: cases.Case, no_autocast: None) -> None:
    inputs = cases.make_inputs(case, "meta")
    piece = attention._Piece(case, inputs, "the row", slice(None), slice(None), slice(None))
    found = [
        peers.torch_forward(case, inputs)[0](),
        *attention._on_plain_torch(piece, True),
        *attention._on_plain_torch(piece, False),
    ]
    assert all(t.device.type == "meta" for t in found)


STEPS = [
    case for case in [*decode_cases.all_cases(), *decode_cases.gpu_cases()] if case.B <= 8 and case.L <= 4096
]


@pytest.mark.parametrize("case", STEPS, ids=lambda c: c.id)
def test_all_of_a_step_is_computed_on_its_device(case: decode_cases.Case, no_autocast: None) -> None:
    inputs = decode_cases.make_inputs(case, "meta")
    (cache,) = decode_cases.our_caches(case, inputs, 1)
    assert all(t.device.type == "meta" for t in cache.values() if isinstance(t, torch.Tensor))
    k, v = decode_cases.as_stored(case, inputs)
    found = [k, v, decode.by_heads(case, decode._exactly, inputs.q, k, v)]
    if case.dtype != "int8":
        found += [decode.torch_steps(name, case, inputs, 1)[0]() for name in ("torch", "torch cat")]
    assert all(t.device.type == "meta" for t in found)


def test_the_pages_and_scales_of_a_cache_lie_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cases.reference, "kv_cache_append_", lambda **_: None)  # it reads the table
    case = decode_cases.Case("int8", 1, 4, 2, 33, 16, page=16)
    (cache,) = decode_cases.our_caches(case, decode_cases.make_inputs(case, "meta"), 1)
    assert {name: t.device.type for name, t in cache.items()} == dict.fromkeys(
        ("k_cache", "v_cache", "k_scales", "v_scales", "block_table"), "meta"
    )


# --- a whole run: on the CPU, whose tensors and clock stand in for a GPU's ----------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> device.Device:
    """A device that calls itself "cuda"."""

    class StandIn(device.CpuDevice):
        def ceilings(self, threads: int, seconds: float) -> dict[str, float | None]:
            return dict(GEMMS)

    quick_timing(monkeypatch)
    machine = {**made_up_result([])["machine"], "device": "A GPU", "last_level_cache_bytes": 2**14}
    for module in (attention, over_length):
        monkeypatch.setattr(module, "describe_machine", lambda name, threads: machine)
    for module, honest in ((attention, cases.make_inputs), (decode, decode_cases.make_inputs)):
        monkeypatch.setattr(module, "make_inputs", lambda case, name, honest=honest: honest(case))
    monkeypatch.setattr(device.CpuDevice, "last_level_cache_bytes", lambda _: 2**14)
    return StandIn(name="cuda")


def test_a_run_of_bench_attention(stand_in: device.Device, capsys: pytest.CaptureFixture[str]) -> None:
    settings = attention.Settings(1, 1e-6, 1, 0.0, 1e-6, 2**20, memory=False, engines=False)
    backward = cases.Case("fp32", "backward", 1, 2, 16, 8)
    result = attention.measure([SMALL, backward], stand_in, settings)
    for row in result["rows"]:
        assert row["check"]["ok"] and row["ceiling"] == "gemm_fp32"
        assert row["rivals"]["math"]["gflops"] > 0 and row["rivals"]["math"]["share"] > 0
        assert row["rivals"]["cudnn"]["skipped"].startswith("refused: ")
    attention.show(result)
    shown = capsys.readouterr().out
    assert "math " in shown and "others TFLOP/s" in shown and "cudnn has no figure" in shown


def test_a_run_of_bench_decode(stand_in: device.Device, capsys: pytest.CaptureFixture[str]) -> None:
    settings = over_length.Settings(1, 1e-6, 1, 0.0, 1e-6, stand_in)
    rows = [decode_cases.Case(dtype, 1, 4, 2, 33, 16) for dtype in ("fp32", "int8")]
    result = decode.measure(rows, settings)
    floats, ints = result["rows"]
    assert floats["rivals"]["math"]["gbs"] > 0 and "refused" in floats["rivals"]["cudnn"]["skipped"]
    assert not peers.BACKENDS.keys() & ints["rivals"].keys()
    decode.show(result)
    shown = capsys.readouterr().out
    assert "others GB/s" in shown and "math " in shown
