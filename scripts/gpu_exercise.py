"""Calls every CUDA kernel at small sizes and compares the results with the reference: for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python scripts/gpu_exercise.py
    ATTN_EXT_CUDA_SIM=1 python scripts/gpu_exercise.py        in the simulator (python setup.py build_cuda_sim)

It does nothing with CUDA but what attn_ext and a few copies do. Raises AssertionError where a result is wrong,
SystemExit where there are no CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext import _load, reference

DEVICE = _load.cuda_device_type
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "window, ALiBi, sinks, softcap": {
        "window": (9, 2),
        "alibi_slopes": torch.tensor([0.1, 0.3, 0.5, 0.7]),
        "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0]),
        "softcap": 3.0,
    },
    "mask, key lengths": {"mask": torch.arange(45) % 3 > 0, "key_lengths": torch.tensor([45, 7])},
}


def there(value: Any) -> Any:
    """Tensors, in dicts as well, on the device."""
    if isinstance(value, dict):
        return {name: there(inner) for name, inner in value.items()}
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def close(got: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within what the dtype allows of numbers of about 1."""
    truth = truth.detach().double()
    error = float((got.detach().cpu().double() - truth).abs().max())
    assert error <= ALLOWED[dtype] * max(1.0, float(truth.abs().max())), f"{what}: off by {error:.1e}"


def attend(dtype: torch.dtype, d: int, dv: int, options: dict[str, Any]) -> None:
    """Output and gradients, of a bias as well."""
    shapes = ((2, 4, 37, d), (2, 2, 45, d), (2, 2, 45, dv), (1, 4, 37, 45))
    host = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    device = [there(t.detach()).requires_grad_() for t in host]
    exact = [t.detach().double().requires_grad_() for t in host]
    out = attn_ext.attention(*device[:3], bias=device[3], **there(options))
    truth = reference.attention(*exact[:3], bias=exact[3], **options, dtype=torch.float64)
    what = f"{dtype}, D {d}, Dv {dv}, {', '.join(options)}"
    close(out, truth, dtype, what)
    weights = torch.linspace(-1.0, 1.0, truth.numel(), dtype=torch.float64).view_as(truth)
    found = torch.autograd.grad(out, device, there(weights.to(dtype)))
    wanted = torch.autograd.grad(truth, exact, weights)
    for name, got, want in zip(("q", "k", "v", "bias"), found, wanted, strict=True):
        close(got, want, dtype, f"gradient of {name}: {what}")


def share(dtype: torch.dtype, d: int, dv: int) -> None:
    """A row against keys of three segments, which blocks share out; sinks that learn."""
    shapes = ((2, 4, 1, d), (2, 2, 2100, d), (2, 2, 2100, dv))
    host = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    host.append(torch.linspace(-1.0, 2.0, 4).requires_grad_())
    device = [there(t.detach()).requires_grad_() for t in host]
    exact = [t.detach().double().requires_grad_() for t in host]
    out = attn_ext.attention(*device[:3], sinks=device[3])
    truth = reference.attention(*exact[:3], sinks=exact[3], dtype=torch.float64)
    close(out, truth, dtype, f"shared, {dtype}")
    found, wanted = torch.autograd.grad(out.sum(), device), torch.autograd.grad(truth.sum(), exact)
    for name, got, want in zip(("q", "k", "v", "sinks"), found, wanted, strict=True):
        close(got, want, dtype, f"gradient of {name}: shared, {dtype}")


def weigh(dtype: torch.dtype) -> None:
    """The weights of some rows."""
    q, k = torch.randn(1, 2, 37, 24).to(dtype), torch.randn(1, 2, 45, 24).to(dtype)
    got = attn_ext.attention_weights(there(q), there(k), rows=[3, 36], causal="bottom_right")
    truth = reference.attention_weights(q, k, rows=[3, 36], causal="bottom_right", dtype=torch.float64)
    close(got, truth, dtype, f"weights, {dtype}")


def pack(dtype: torch.dtype) -> None:
    """Sequences behind one another, their gradients, and dropout."""
    cu = torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    host = [torch.randn(40, 4, 32).to(dtype) for _ in range(3)]
    device = [there(t).requires_grad_() for t in host]
    exact = [t.double().requires_grad_() for t in host]
    out = attn_ext.attention_varlen(*device, there(cu), there(cu), causal="top_left")
    truth = reference.attention_varlen(*exact, cu, cu, causal="top_left", dtype=torch.float64)
    close(out, truth, dtype, f"packed, {dtype}")
    found, wanted = torch.autograd.grad(out.sum(), device), torch.autograd.grad(truth.sum(), exact)
    for name, got, want in zip(("q", "k", "v"), found, wanted, strict=True):
        close(got, want, dtype, f"gradient of {name}: packed, {dtype}")
    dropped = attn_ext.attention_varlen(*device, there(cu), there(cu), dropout_p=0.5)
    assert dropped.isfinite().all() and not torch.equal(dropped, out)


def decode(dtype: torch.dtype, kind: str) -> None:
    """Tokens into a cache of each kind, rotated, and attention over it."""
    leading = (8, 2, 8) if kind == "pages" else (2, 2, 16 if kind == "ring" else 32)
    stored = torch.int8 if kind == "int8" else dtype
    cache: dict[str, Tensor] = {
        name: torch.zeros(*leading, 16, dtype=stored) for name in ("k_cache", "v_cache")
    }
    if kind == "pages":
        cache["block_table"] = torch.tensor([[7, 2, 5, 0], [1, 6, 3, 4]], dtype=torch.int32)
    if kind == "int8":
        cache |= {name: torch.zeros(leading) for name in ("k_scales", "v_scales")}
    more: dict[str, Any] = {"ring": True, "window": (9, 0)} if kind == "ring" else {}
    angles = torch.linspace(0.0, 3.0, 32)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    rotary = (angles.cos().to(exact), angles.sin().to(exact))
    device = there(cache)
    for start, n in ((0, 5), (5, 1), (6, 4), (10, 1)):
        q, k, v = (torch.randn(2, heads, n, 16).to(dtype) for heads in (4, 2, 2))
        lengths = torch.tensor([start, start])
        got = attn_ext.attention_with_kv_cache(
            there(q), **device, cache_lengths=there(lengths), k=there(k), v=there(v), **more,
            rotary=tuple(map(there, rotary)),
        )  # fmt: skip
        truth = reference.attention_with_kv_cache(
            q, **cache, cache_lengths=lengths, k=k, v=v, **more, rotary=rotary, dtype=torch.float64
        )
        close(got, truth, dtype, f"cache ({kind}), {dtype}, {n} tokens from {start} on")


def main() -> None:
    """All of it."""
    if DEVICE is None:
        raise SystemExit(f"gpu_exercise: there are no CUDA kernels here ({_load.why_no_cuda})")
    torch.manual_seed(0)
    for dtype in ALLOWED:
        for d, dv in ((24, 24), (64, 40), (128, 128), (130, 256), (20, 264)):
            attend(dtype, d, dv, {})
        for options in OPTIONS.values():
            attend(dtype, 33, 64, options)
        for d, dv in ((24, 40), (130, 256)):
            share(dtype, d, dv)
        weigh(dtype)
        pack(dtype)
        for kind in ("contiguous", "pages", "ring", "int8"):
            decode(dtype, kind)
    attn_ext.backend.check_cuda()
    print(f"gpu_exercise: all kernels ran on {DEVICE}, and agree with the reference")


if __name__ == "__main__":
    main()
