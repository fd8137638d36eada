"""Is every operator there for tensors on a GPU? Nothing is run, so that no GPU is needed.

    python scripts/cuda_registers.py [FILE]

Without a FILE: of what attn_ext has loaded, which it does beside a torch with CUDA. With one, like
build/cuda_lib/attn_ext/_cuda.*.so: of that file, loaded beside attn_ext, whatever torch is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

import torch

import attn_ext
from attn_ext._load import _cuda

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


def loaded_by_the_package() -> ModuleType:
    """`attn_ext._cuda` as `import attn_ext` has loaded it; SystemExit says why it has not."""
    if isinstance(_cuda, str):
        raise SystemExit(f"attn_ext has loaded no kernels for tensors on a GPU: {_cuda}")
    return _cuda


def loaded_from(path: str) -> ModuleType:
    """The same from a file."""
    sys.setdlopenflags(os.RTLD_LAZY)  # a CPU build of torch lacks what is only called with such tensors
    spec = importlib.util.spec_from_file_location("attn_ext._cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Says what is there; SystemExit where something is missing."""
    paths = sys.argv[1:]
    module = loaded_from(*paths) if paths else loaded_by_the_package()
    for name in OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"attn_ext::{name}", "CUDA"):
            raise SystemExit(f"{module.__file__} has no {name} for tensors on a GPU")
    if module.build_info()["version"] != attn_ext.__version__:
        raise SystemExit(
            f"{module.__file__} is of version {module.build_info()['version']}, not {attn_ext.__version__}"
        )
    print(f"{len(OPERATORS)} operators for tensors on a GPU; {module.build_info()}")


if __name__ == "__main__":
    main()
