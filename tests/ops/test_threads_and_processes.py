"""Threads, forked and spawned processes, the floating point state, and memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from op_support import OPTIONS, Shape, assert_same_bits, make
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import attn_ext

TIME_LIMIT = 60.0  # seconds: a process that takes longer hangs
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc or forks")


def forward_and_backward(s: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and gradients of a causal call with fixed inputs."""
    tensors = [x.requires_grad_(True) for x in s.qkv(dtype)]
    out = attn_ext.attention(*tensors, causal="bottom_right")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


LARGE, SMALL = Shape(2, 8, 8, 256, 256, 64), Shape(1, 2, 1, 3, 5, 8)


# -------------------------------------------------------------------------------------------------- processes


# Made before any fork: torch's own parallel loops, random numbers among them, may hang in a forked child.
CHILDS_WORK = {
    dtype: [
        ([x.requires_grad_(True) for x in s.qkv(dtype)], make((s.b, s.hq, s.lq, s.d), dtype))
        for s in (SMALL, LARGE)
    ]
    for dtype in (torch.float32, torch.bfloat16)
}
both_dtypes = pytest.mark.parametrize("dtype", list(CHILDS_WORK), ids=["float32", "bfloat16"])


def total(x: Tensor) -> float:
    """The sum of a tensor, by NumPy alone."""
    if x.dtype != torch.bfloat16:
        return float(x.numpy().astype("float64").sum())
    bits = x.view(torch.int16).numpy().astype("uint16").astype("uint32") << 16
    return float(bits.view("float32").astype("float64").sum())


def answer(dtype: torch.dtype, results: Any) -> None:
    """Run in a child: a tiny call, then a large one, with and without gradients; sends sums of the results back."""
    try:
        sums = []
        for tensors, grad_out in CHILDS_WORK[dtype]:
            out = attn_ext.attention(*tensors, causal="bottom_right")
            found = [out.detach(), *torch.autograd.grad(out, tensors, grad_out)]
            with torch.no_grad():
                found.append(attn_ext.attention(*tensors))
            sums += [total(x) for x in found]
        results.put(sums)
    except BaseException as error:  # the parent must hear of it, whatever it is
        results.put(repr(error))
        raise


def expected_answer(dtype: torch.dtype) -> list[float]:
    """What `answer` sends, computed here."""
    holder: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answer(dtype, holder)
    return holder.get()


def in_child(method: str, target: Callable[[Any], None]) -> Any:
    """Run target(queue) in a child process and return what it puts there, within the time limit."""
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=target, args=(results,), daemon=True)
    child.start()
    try:
        return results.get(timeout=TIME_LIMIT)
    except queue.Empty:
        raise AssertionError(f"the {method}ed child did not answer within {TIME_LIMIT:g} s") from None
    finally:
        child.terminate()
        child.join(10)


@linux_only
@pytest.mark.isa_matrix
@both_dtypes
def test_a_forked_child_computes_the_same_after_its_parent_used_all_threads(dtype: torch.dtype) -> None:
    expected = expected_answer(dtype)  # starts torch's thread pool, which does not survive the fork
    assert in_child("fork", partial(answer, dtype)) == expected
    assert expected_answer(dtype) == expected, "the parent no longer computes the same after forking"


def run_python(code: str, **environment: str) -> str:
    """What a fresh Python that can import this package and these tests prints."""
    places = [
        str(Path(attn_ext.__file__).parents[1]),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=2 * TIME_LIMIT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@both_dtypes
def test_a_process_of_its_own_computes_the_same(dtype: torch.dtype) -> None:
    printed = run_python(f"import test_threads_and_processes as t; print(*t.expected_answer(t.{dtype}))")
    assert [float(x) for x in printed.split()] == pytest.approx(expected_answer(dtype), rel=1e-6)


@linux_only
def test_threads_and_children_from_before_the_first_call_compute_the_same_in_bfloat16() -> None:
    # Where bf16 runs by tiles, the first call asks Linux for them, once for the process: threads that run by then have
    # them too, a child that was forked before asks itself.
    printed = run_python("""
import os, threading
import torch
import test_threads_and_processes as t

go = threading.Event()
of_thread = []
def work():
    go.wait()
    of_thread.extend(t.expected_answer(torch.bfloat16))
thread = threading.Thread(target=work)
thread.start()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, repr(t.expected_answer(torch.bfloat16)).encode())
    os._exit(0)
os.close(write)
here = t.expected_answer(torch.bfloat16)
go.set()
thread.join()
of_child = b""
while more := os.read(read, 65536):
    of_child += more
assert of_thread == here, (of_thread, here)
assert of_child.decode() == repr(here), (of_child, here)
print("the same")
""")
    assert printed.strip() == "the same"


class Attended(Dataset[Tensor]):
    """A data set whose items are made by attention."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        x = make((1, 8, 200, 64), seed=index)
        return attn_ext.attention(x, x, x, causal=True)[0, 0, -1]


@linux_only
def test_data_loader_workers_can_call_attention_after_the_parent_did() -> None:
    expected_answer(torch.float32)
    alone = torch.stack([Attended()[i] for i in range(8)])
    loader = DataLoader(
        Attended(), batch_size=4, num_workers=2, timeout=TIME_LIMIT, multiprocessing_context="fork"
    )
    torch.testing.assert_close(torch.cat(list(loader)), alone, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- threads


@pytest.mark.isa_matrix
def test_eight_threads_calling_at_once_get_what_each_gets_alone() -> None:
    jobs = [
        (
            Shape(2, 4, 2, 33 + 7 * i, 60 + 11 * i, 8 * (i % 3 + 1) + i % 2),
            (torch.float32, torch.bfloat16)[i % 2],
        )
        for i in range(8)
    ]
    expected = [forward_and_backward(*job) for job in jobs]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            start.wait()
            for _ in range(20):
                for actual, alone in zip(forward_and_backward(*jobs[i]), expected[i], strict=True):
                    assert_same_bits(actual, alone, f"thread {i}")
        except BaseException as error:  # an assertion in a thread would otherwise go unnoticed
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.isa_matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_changing_the_thread_count_between_calls_never_changes_the_result(dtype: torch.dtype) -> None:
    # Scratch memory sized by an earlier thread count would overflow or mix results.
    shapes = (Shape(12, 3, 3, 103, 17, 8), Shape(1, 2, 1, 40, 300, 33), SMALL)
    torch.set_num_threads(1)
    expected = [forward_and_backward(s, dtype) for s in shapes]
    for threads in (16, 3, 1, 5, 2, 16):
        torch.set_num_threads(threads)
        for s, alone in zip(shapes, expected, strict=True):
            for actual, first in zip(forward_and_backward(s, dtype), alone, strict=True):
                assert_same_bits(actual, first, f"{threads} threads, {s}")


def test_a_backward_hook_may_call_attention_again() -> None:
    expected = forward_and_backward(LARGE)
    inner: list[list[Tensor]] = []
    q, k, v = (x.requires_grad_(True) for x in LARGE.qkv())

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            inner.append(forward_and_backward(LARGE))

    q.register_hook(hook)
    out = attn_ext.attention(q, k, v, causal="bottom_right")
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
    for outer, nested, alone in zip(found, inner[0], expected, strict=True):
        assert_same_bits(outer, alone, "outer backward")
        assert_same_bits(nested, alone, "call from the hook")


def test_more_threads_than_cores_by_environment_variable() -> None:
    code = "import torch, attn_ext; x = torch.ones(2, 8, 200, 64); print(attn_ext.attention(x, x, x).mean().item())"
    assert float(run_python(code, OMP_NUM_THREADS="32")) == pytest.approx(1.0, abs=1e-6)


# --------------------------------------------------------------------------------------- floating point state


def tiny_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Values so small that outputs and gradients are subnormal: flushing to zero would show."""
    q, k, v = Shape(2, 4, 4, 65, 130, 16).qkv()
    return q, k, v * 1e-39


def subnormal_now() -> bool:
    """Whether this thread keeps subnormal numbers at this moment (True) or flushes them to zero."""
    return bool((torch.tensor([1e-39]) * torch.tensor([0.5])).item() != 0.0)


@pytest.mark.isa_matrix
def test_the_callers_flush_to_zero_state_neither_changes_nor_reaches_the_kernels() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    torch.set_flush_denormal(False)
    q, k, v = tiny_inputs()
    tensors = [x.requires_grad_(True) for x in (q, k, v)]
    grad_out = make((2, 4, 65, 16), seed=8)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        expected = attn_ext.attention(*tensors)
        expected_grads = torch.autograd.grad(expected, tensors, grad_out)
        assert (expected.detach() != 0).any() and expected.abs().max() < 1e-37
        assert subnormal_now(), "attention left flush-to-zero switched on"
        torch.set_flush_denormal(True)
        try:
            out = attn_ext.attention(*tensors)
            grads = torch.autograd.grad(out, tensors, grad_out)
            with torch.no_grad():
                lean = attn_ext.attention(*tensors)
            still = not subnormal_now()
        finally:
            torch.set_flush_denormal(False)
        assert still, "attention switched flush-to-zero off for its caller"
        assert_same_bits(out, expected, "output under flush-to-zero")
        assert_same_bits(lean, expected, "inference output under flush-to-zero")
        for actual, first in zip(grads, expected_grads, strict=True):
            assert_same_bits(actual, first, "gradient under flush-to-zero")


# ----------------------------------------------------------------------------------------------------- memory


def resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def train_forward_only() -> None:
    q, k, v = (x.requires_grad_(True) for x in BUSY)
    attn_ext.attention(q, k, v, causal=True)


def train_with_backward() -> None:
    q, k, v = (x.detach().requires_grad_(True) for x in BUSY)
    attn_ext.attention(q, k, v, causal=True, bias=BIAS, return_lse=True)[0].sum().backward()


def train_under_checkpoint() -> None:
    q, k, v = (x.detach().requires_grad_(True) for x in BUSY)
    checkpoint(
        lambda *x: attn_ext.attention(*x, dropout_p=0.1), q, k, v, use_reentrant=False
    ).sum().backward()


def infer() -> None:
    with torch.no_grad():
        attn_ext.attention(*BUSY, causal=True, return_weights=True)


def raise_an_error() -> None:
    with pytest.raises(ValueError):
        attn_ext.attention(BUSY[0], BUSY[1][..., :32], BUSY[2])


BUSY = Shape(1, 4, 4, 128, 128, 64).qkv()
BIAS = torch.zeros(128, 128)


@linux_only
@pytest.mark.parametrize(
    ("work", "times"),
    [
        (train_forward_only, 2000),
        (train_with_backward, 500),
        (train_under_checkpoint, 500),
        (infer, 2000),
        (raise_an_error, 2000),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_memory_stays_flat_over_many_calls(work: Callable[[], None], times: int) -> None:
    for _ in range(50):
        work()
    gc.collect()
    gc.disable()  # what only the cycle collector could free counts as leaked
    try:
        before = resident()
        for _ in range(times):
            work()
        grown = resident() - before
    finally:
        gc.enable()
    # One kept output is 128 kB: 500 of them would be 64 MB.
    assert grown < 16 * 2**20, f"{grown / 2**20:.1f} MB more after {times} calls"


def test_outputs_die_with_their_last_reference_without_the_cycle_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            q, k, v = (x.requires_grad_(True) for x in SMALL.qkv())
            out, lse = attn_ext.attention(q, k, v, return_lse=True)
            if backward:
                out.sum().backward()
            watched = [weakref.ref(x) for x in (out, lse, q)]
            del out, lse, q, k, v
            assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


LONG = 8192


@linux_only
@pytest.mark.isa_matrix
@pytest.mark.parametrize(
    "option",
    ["plain", "causal bottom-right", "broadcast biases", "everything that needs no matrix", "dropout"],
)
def test_no_option_needs_memory_for_a_square_of_the_length(option: str) -> None:
    # 8192 x 8192 floats are 256 MB; inputs, outputs and gradients here are a few MB.
    reset = Path("/proc/self/clear_refs")
    s = Shape(1, 1, 1, LONG, LONG, 8)
    options: dict[str, Any] = {
        "plain": lambda: {},
        "causal bottom-right": lambda: OPTIONS["causal bottom-right"](s),
        "broadcast biases": lambda: {"mask": make((LONG,), seed=5), "bias": make((LONG, 1), seed=6)},
        "everything that needs no matrix": lambda: {
            "mask": make((1, LONG)) > -1.0,
            "bias": make((LONG,), seed=6),
            "causal": "top_left",
            "window": (4000, 4000),
            "softcap": 5.0,
            "alibi_slopes": torch.tensor([0.001]),
            "sinks": torch.tensor([0.3]),
            "key_lengths": torch.tensor([LONG - 3]),
            "return_lse": True,
        },
        "dropout": lambda: {"dropout_p": 0.2},
    }[option]()
    tensors = [x.requires_grad_(True) for x in s.qkv()]
    learned = [
        x.requires_grad_(True) for x in options.values() if isinstance(x, Tensor) and x.is_floating_point()
    ]
    if "alibi_slopes" in options:
        options["alibi_slopes"].requires_grad_(False)
        learned = [x for x in learned if x.requires_grad]
    try:
        reset.write_text("5")  # the high-water mark starts again from now
    except OSError:
        pytest.skip("the peak of the resident memory cannot be reset here")
    before = peak()
    out = attn_ext.attention(*tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    torch.autograd.grad(out.sum(), [*tensors, *learned])
    grown = peak() - before
    assert grown < 64 * 2**20, f"peak rose by {grown / 2**20:.0f} MB"


def peak() -> int:
    """Highest resident memory of this process since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
