"""PEP 517 backend: setuptools, made to build against the torch of the environment it installs into.

pip builds a package in an isolated environment. Named as a build requirement, torch would be downloaded a
second time there (gigabytes), and perhaps in another version. So torch is looked up in the target environment
and only asked for where there is none.
"""

from __future__ import annotations

import shutil
from typing import Any

import attn_ext_toolchain as toolchain
import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    toolchain.stop(
        f"building needs setuptools 77 or newer, and this environment has {setuptools.__version__}; "
        "upgrade it, or build without --no-build-isolation."
    )

from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import (  # noqa: E402, F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TARGET_TORCH = toolchain.reach_target_torch()


def _what_is_missing() -> list[str]:
    missing = [] if TARGET_TORCH else [f"torch>={'.'.join(map(str, toolchain.OLDEST_TORCH))}"]
    if shutil.which("ninja") is None:
        missing.append("ninja")
    return missing


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """torch and ninja, each where it is not there yet."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _what_is_missing()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """torch and ninja, each where it is not there yet."""
    return build_meta.get_requires_for_build_editable(config_settings) + _what_is_missing()
