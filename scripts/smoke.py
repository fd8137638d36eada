"""Does an installed attn_ext work? Imports it, compares forward and backward with torch, prints how it was built.

Used where the whole test suite is not installed: `python scripts/smoke.py` in any folder but the source tree's.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

import attn_ext
from attn_ext._load import _C


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a weighted sum of `out` (the weights keep them from being all alike)."""
    weights = torch.linspace(-1.0, 1.0, out.numel()).view_as(out)
    return torch.autograd.grad((out * weights).sum(), inputs)


def main() -> None:
    """Raises AssertionError where attn_ext and torch differ by more than rounding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 65, 32, requires_grad=True) for _ in range(3))
    for causal in (False, True):
        ours = attn_ext.scaled_dot_product_attention(q, k, v, is_causal=causal)
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for mine, other in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    print(
        json.dumps(
            {"torch": torch.__version__, "isa": attn_ext.backend.active(), **_C.build_info()}, indent=2
        )
    )
    print("smoke test: forward and backward agree with torch")


if __name__ == "__main__":
    main()
