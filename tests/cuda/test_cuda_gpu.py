"""What only a GPU has: streams, graphs, several devices, large grids. (Untried as yet: no GPU has run these.)"""

from __future__ import annotations

import pytest
import torch
from cuda_support import attention
from device_support import DEVICE, carried
from op_support import (
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    make,
    raw_backward,
    raw_forward,
    raw_inference,
    reference_call,
)
from torch import Tensor

import attn_ext
from attn_ext.backend import check_cuda
from attn_ext.models import CausalLM

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="needs a GPU: the simulator has no streams, graphs or second device"
)


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [t.to("cuda") for t in tensors]


def a_cache(dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A cache of two sequences, whose keys blocks share out, and the tokens of a step."""
    cache = {
        name: make((2, 2, 2100, 64), dtype, seed=n).cuda() for n, name in enumerate(("k_cache", "v_cache"))
    }
    return cache, on_gpu(
        make((2, 4, 1, 64), dtype, seed=5), *(make((2, 2, 1, 64), dtype, seed=n) for n in (6, 7))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_decoding_is_captured_in_a_graph_and_replayed(dtype: torch.dtype) -> None:
    cache, (q, k, v) = a_cache(dtype)
    lengths = torch.tensor([1022, 8], device="cuda")

    def step() -> Tensor:
        return attn_ext.attention_with_kv_cache(q, **cache, cache_lengths=lengths, k=k, v=v)

    start = {name: t.clone() for name, t in cache.items()}
    expected = []
    for n in range(3):  # the same steps, one by one
        q.copy_(make(q.shape, dtype, seed=20 + n))
        expected.append(step())
        lengths += 1
    end = {name: t.clone() for name, t in cache.items()}

    for name, t in cache.items():
        t.copy_(start[name])
    lengths.copy_(torch.tensor([1022, 8]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for name, t in cache.items():
        assert_same_bits(t, start[name], f"{name}: a capture writes nothing")
    for n in range(3):
        q.copy_(make(q.shape, dtype, seed=20 + n))
        graph.replay()
        assert_same_bits(out, expected[n], f"step {n}")
        lengths += 1
    for name, t in cache.items():
        assert_same_bits(t, end[name], name)
    lengths.copy_(torch.tensor([2100, 8]))  # no room: told, not written
    graph.replay()
    with pytest.raises(IndexError, match="capacity"):
        check_cuda()


@pytest.mark.parametrize("kind", ["contiguous", "paged", "sliding"])
def test_a_step_of_a_model_is_captured_in_a_graph_and_replayed(kind: str) -> None:
    model = CausalLM(11, 32, 2, 64, num_layers=2, max_len=64).eval().cuda()
    window = {"window": 5} if kind == "sliding" else {}
    caches, expected = (model.new_cache(2, kind=kind, **window) for _ in range(2))
    for cache in caches:
        cache.reserve(64)
    ids = torch.arange(24, device="cuda").remainder(11).view(2, 12)
    token = ids[:, :1].clone()
    with torch.no_grad():
        for n in range(2):  # what is made once (libraries' workspaces) is made before the capture
            assert_same_bits(
                model(ids[:, n : n + 1], cache=caches), model(ids[:, n : n + 1], cache=expected), f"{n}"
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(token, cache=caches)
        for n in range(2, 12):
            token.copy_(ids[:, n : n + 1])
            graph.replay()
            assert_same_bits(logits, model(token, cache=expected), f"token {n}")
    assert caches[0].lengths.tolist() == [12, 12]


def test_forward_and_backward_are_captured_in_a_graph() -> None:
    q, k, v, bias, grad_out = on_gpu(*Shape(1, 4, 2, 70, 70, 64).qkv(), make((70, 70)), make((1, 4, 70, 64)))
    seed = torch.tensor(5, device="cuda")

    def run() -> tuple[Tensor, ...]:
        options = {"bias": bias, "dropout_seed": seed, "dropout_p": 0.3}
        out, _, row_max, row_sum = raw_forward(q, k, v, **options)
        return out, *raw_backward(grad_out, None, q, k, v, out, row_max, row_sum, grads=15, **options)[:4]

    graph = torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        captured = run()
    for n in (6, 7):
        q.copy_(make(q.shape, seed=n))
        seed.fill_(n)
        graph.replay()
        for got, want in zip(captured, run(), strict=True):
            assert_same_bits(got, want, "replayed")


def test_a_call_runs_on_the_current_stream() -> None:
    """Behind work that the stream has still to do: on another stream it would read zeros."""
    q, k, v = on_gpu(*Shape(1, 2, 1, 70, 70, 64).qkv())
    expected = raw_inference(q, k, v)
    late = torch.zeros_like(v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # clocks
        late.copy_(v)
        out = raw_inference(q, k, late)
    side.synchronize()
    assert_same_bits(out, expected, "on a stream of its own")


def test_calls_on_two_streams_do_not_disturb_each_other() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [on_gpu(*(t + n for t in Shape(2, 4, 2, 200, 200, 64).qkv())) for n in range(2)]
    lengths = torch.tensor([200, 90], device="cuda")
    expected = [attn_ext.attention(*tensors, key_lengths=lengths) for tensors in inputs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(attn_ext.attention(*inputs[n], key_lengths=lengths))
    torch.cuda.synchronize()
    for n in range(2):
        for out in found[n]:
            assert_same_bits(out, expected[n], f"stream {n}")
    check_cuda()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: this machine has fewer")
def test_a_device_that_is_not_the_current_one() -> None:
    q, k, v = (t.to("cuda:1") for t in Shape(1, 2, 1, 70, 70, 64).qkv())
    with torch.cuda.device(0):
        out = attn_ext.attention(q, k, v, key_lengths=torch.tensor([50], device="cuda:1"))
        assert torch.cuda.current_device() == 0 and out.device == q.device
    assert_same_bits(
        out.cpu(), attention(*(t.cpu() for t in (q, k, v)), key_lengths=torch.tensor([50])), "there"
    )
    with pytest.raises(ValueError, match="one device"):
        attn_ext.attention(q, k.to("cuda:0"), v)
    check_cuda("cuda:1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_blocks(dtype: torch.dtype, d: int) -> None:
    """More blocks than run at once, keys of many tiles: what the simulator has no time for."""
    q, k, v = Shape(2, 16, 4, 1000, 1100, d).qkv(dtype)
    options = {"causal": "bottom_right", "window": (700, None)}
    out = attention(q, k, v, **options)
    truth = reference_call(q, k, v, options, torch.float64)
    assert_close_to_reference(out, truth, reference_call(q, k, v, options, dtype))


def test_more_than_two_to_the_31_elements() -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < 24e9:
        pytest.skip(f"needs 24 GB of free memory on the GPU, and {free / 1e9:.0f} GB are free")
    length = 2**24 + 5  # 2.1 × 10^9 elements of k, and as many of v
    k, v = (torch.zeros(1, 1, length, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k[..., -1, :], v[..., -1, :] = 8.0, 1.0
    q = torch.full((1, 1, 1, 128), 8.0, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(attn_ext.attention(q, k, v).float().cpu(), torch.ones(1, 1, 1, 128))


def test_memory_that_there_is_not_is_an_error_and_the_next_call_works() -> None:
    q, k, v = on_gpu(*Shape(1, 1, 1, 4, 4, 8).qkv())
    rows = torch.cuda.mem_get_info()[1] // 4 // 8 + 1  # an output larger than the GPU
    with pytest.raises(RuntimeError, match="memory"):
        attn_ext.attention(q[:, :, :1].expand(1, 1, rows, 8), k, v)
    assert carried(attn_ext.attention)(q.cpu(), k.cpu(), v.cpu()).isfinite().all()
