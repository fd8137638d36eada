"""Loads a `_cuda` file beside attn_ext, whatever torch is: is every operator there for tensors on a GPU?

    python scripts/cuda_registers.py build/cuda_lib/attn_ext/_cuda.*.so

Nothing is run: where torch is a CPU build there are no such tensors.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

import attn_ext

OPERATORS = (
    "attention_inference",
    "attention_forward",
    "attention_backward",
    "attention_weights",
    "kv_cache_append_",
    "attention_with_kv_cache",
    "attention_with_kv_cache_append_",
    "take_fault",
)


def main() -> None:
    (path,) = sys.argv[1:]
    sys.setdlopenflags(os.RTLD_LAZY)  # a CPU build of torch lacks what is only called with such tensors
    spec = importlib.util.spec_from_file_location("attn_ext._cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"attn_ext::{name}", "CUDA"):
            raise SystemExit(f"{path} has no {name} for tensors on a GPU")
    if module.build_info()["version"] != attn_ext.__version__:
        raise SystemExit(f"{path} is of version {module.build_info()['version']}, not {attn_ext.__version__}")
    print(f"{len(OPERATORS)} operators for tensors on a GPU; {module.build_info()}")


if __name__ == "__main__":
    main()
