"""Builds `attn_ext._C`, and `attn_ext._cuda` where it can be; all else about the package stands in pyproject.toml.

`python setup.py build_cuda_sim` builds another `_C`, into build/cuda_sim, whose kernels are the CUDA ones, run on the
CPU by the simulator in tests/cuda_sim: tests/cuda loads it, and nothing installs it.

Environment:
    CXX                 the C++ compiler (else c++, g++ or clang++)
    MAX_JOBS            files compiled at once (else one a core, as far as memory reaches)
    DEBUG=1             -O1 -g instead of -O3
    ATTN_EXT_WERROR=1   warnings are errors
    ATTN_EXT_CUDA=0/1   without / with the CUDA kernels (else where there is nvcc and torch is a CUDA build)
    ATTN_EXT_CUDA_ARCHS the GPU generations to compile for, like "80 90" (else all from Ampere on that nvcc knows)
    NVCC, CUDA_HOME     where nvcc is
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent
os.chdir(HERE)
sys.path.insert(0, str(HERE / "build_support"))
import attn_ext_nvcc as nvcc  # noqa: E402
import attn_ext_toolchain as toolchain  # noqa: E402

# The oldest torch whose stable ABI the build keeps to: the same binary then serves every later torch.
TORCH_TARGET_VERSION = "0x{:02x}{:02x}000000000000".format(*toolchain.OLDEST_TORCH)

BUILD_COMMANDS = {
    "build", "build_cuda_sim", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop",
}  # fmt: skip
CUDA_SIM = HERE / "build" / "cuda_sim"  # attn_ext/_load.py looks here


def switched_on(name: str) -> bool | None:
    """The environment variable as a switch: True for 1, False for 0, None where unset or empty."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        toolchain.stop(f"{name} must be 0 or 1, not {value!r}.")
    return {"": None, "0": False, "1": True}[value]


def host_extension(
    name: str, sources: list[str], depends: list[str], libraries: list[str], extra_args: list[str]
) -> Extension:
    """A pybind11 module and, through torch's stable ABI, operators."""
    from torch.utils.cpp_extension import include_paths, library_paths

    optimise = ["-O1", "-g"] if switched_on("DEBUG") else ["-O3", "-g0"]
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if switched_on("ATTN_EXT_WERROR") else [])]
    if toolchain.is_gcc(os.environ["CXX"]):
        # GCC 11 and 12 report the undefined registers inside their own AVX-512 header (GCC bug 105593);
        # clang's check is sound and stays on.
        warnings += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    return Extension(
        name,
        sources=sources,
        # A header that changes makes the extension out of date; ninja then finds the files that include it.
        depends=depends,
        include_dirs=[str(HERE / "csrc")],  # absolute: ninja runs in the build folder
        libraries=["torch_cpu", "c10", *libraries],
        library_dirs=library_paths(),
        extra_compile_args=[
            "-std=c++20",
            *optimise,
            # a*b+c is fused where the kernels say fma and nowhere else, whatever the compiler.
            "-ffp-contract=off",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            "-fno-lto",
            "-pthread",
            *warnings,
            *extra_args,
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
            # -isystem: -Werror is for our headers. pybind11 first, since torch bundles another copy of it.
            *(
                flag
                for folder in (toolchain.require_pybind11(), *include_paths())
                for flag in ("-isystem", folder)
            ),
        ],
        extra_link_args=["-pthread", "-fno-lto"],
        language="c++",
    )


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


HEADERS = ("csrc/**/*.h", "csrc/**/*.hpp", "csrc/**/*.inc")


def cpu_extension() -> Extension:
    sources = files("csrc/*.cpp", "csrc/on_cpu/*.cpp", "csrc/cpu/**/*.cpp")
    return host_extension("attn_ext._C", sources, files(*HEADERS), [], [])


def cuda_sim_extension() -> Extension:
    """The same operators over the CUDA kernels in their simulator (see CMakeLists.txt, which builds the C++ tests)."""
    toolchain.require_boost_context(os.environ["CXX"])
    kernels = files("csrc/cuda/*.cu")
    wrappers = []
    for kernel in kernels:  # BuildExtension would give a .cu to nvcc
        wrapper = CUDA_SIM / "temp" / "generated" / f"cuda_{Path(kernel).stem}.cpp"
        toolchain.write_if_changed(wrapper, f'#include "cuda/{Path(kernel).name}"\n')
        wrappers.append(str(wrapper.relative_to(HERE)))
    simulator = [path for path in files("tests/cuda_sim/*.cpp") if not path.endswith("_test.cpp")]
    return host_extension(
        "attn_ext._C",
        [
            *files("csrc/*.cpp", "csrc/cuda/*.cpp"),
            "csrc/on_cuda/device.cpp",
            "csrc/on_cuda/plan.cpp",
            "csrc/cpu/dispatch.cpp",
            "csrc/cpu/features.cpp",
            *simulator,
            *wrappers,
        ],
        [*files(*HEADERS, "csrc/cuda/*.cuh", "tests/cuda_sim/*.h"), *kernels],
        ["boost_context"],
        ["-DATTN_EXT_CUDA_SIM=1", "-DATTN_EXT_ON_CUDA=1", "-Wno-psabi", f"-I{HERE / 'tests'}"],
    )


def cuda_extension(toolkit: nvcc.Toolkit) -> Extension:
    """`attn_ext._cuda`: the same operators for tensors on a GPU. nvcc's objects come when it is built (BuildExt)."""
    shared = [f"csrc/{name}.cpp" for name in ("attention", "kv_cache", "schema", "tensors")]
    extension = host_extension(
        "attn_ext._cuda",
        [*shared, *files("csrc/on_cuda/*.cpp", "csrc/cuda/*.cpp")],
        files(*HEADERS, "csrc/cuda/*.cuh", "csrc/cuda/*.cu"),
        ["cudart_static", "dl", "rt"],
        ["-DATTN_EXT_ON_CUDA=1", "-DUSE_CUDA"],
    )
    extension.library_dirs.append(toolkit.library_dir)
    # The current stream is asked of libtorch_cuda, which libtorch brings where torch has one.
    extension.extra_link_args += ["-Wl,--no-as-needed", "-ltorch"]
    return extension


def build_settings() -> dict[str, object]:
    """The arguments of `setup` for a command that compiles. Stops where something is missing."""
    toolchain.require_platform()
    toolchain.reach_target_torch()
    toolchain.require_torch()
    toolchain.require_pybind11()
    toolchain.require_python_headers()
    os.environ["CXX"] = toolchain.require_compiler()
    os.environ["MAX_JOBS"] = str(toolchain.parallel_jobs())
    if not toolchain.find_ninja():
        print("attn_ext: there is no ninja, so files are compiled one at a time (`pip install ninja` helps)")

    import torch
    from torch.utils.cpp_extension import BuildExtension

    toolkit = nvcc.find_toolkit(switched_on("ATTN_EXT_CUDA"), torch.__version__, torch.version.cuda)

    class BuildExt(BuildExtension):
        """torch's build_ext that keeps its objects, and leaves alone what is up to date."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # torch forces a rebuild because ninja knows better; but an unchanged tree needs not even a link.
            self.force = False
            if self.editable_mode:
                # setuptools would compile an editable install in a temporary folder, from scratch each time.
                self.build_temp = str(
                    HERE / "build" / f"temp.{self.plat_name}-{sys.implementation.cache_tag}"
                )

        def run(self) -> None:
            with toolchain.exclusive(HERE / "build" / ".lock"):
                self._note_configuration()
                if self.inplace and isinstance(toolkit, str):
                    for left_over in Path("attn_ext").glob("_cuda.*.so"):  # it may not fit this `_C`
                        left_over.unlink()
                super().run()

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except RuntimeError as error:
                if "compiling objects" not in str(error):
                    raise
                toolchain.stop("the compiler stopped; what it said is above.")

        def build_extension(self, ext: Extension) -> None:
            if ext.name != "attn_ext._cuda":
                return super().build_extension(ext)
            assert isinstance(toolkit, nvcc.Toolkit)
            temp = self.build_temp
            self.build_temp = os.path.join(temp, "cuda")  # the sources of `_C`, compiled for another place
            ext.extra_objects = nvcc.compile_kernels(
                toolkit,
                [HERE / name for name in files("csrc/cuda/*.cu")],
                nvcc.flags(toolkit, HERE, os.environ["CXX"]),
                HERE / self.build_temp / "kernels",
                int(os.environ["MAX_JOBS"]),
            )
            super().build_extension(ext)
            self.build_temp = temp

        def _note_configuration(self) -> None:
            """Writes what `build_info()` tells, and the flags, to files that the extension depends on."""
            generated = HERE / self.build_temp / "generated"
            config = generated / "attn_ext_build_config.h"
            toolchain.write_if_changed(
                config,
                "#pragma once\n"
                f'#define ATTN_EXT_VERSION "{self.distribution.get_version()}"\n'
                f'#define ATTN_EXT_BUILT_WITH_TORCH "{torch.__version__}"\n'
                f"#define ATTN_EXT_DEBUG_BUILD {int(bool(switched_on('DEBUG')))}\n"
                f"#define ATTN_EXT_WHY_NO_CUDA {json.dumps(toolkit if isinstance(toolkit, str) else '')}\n"
                + (
                    f'#define ATTN_EXT_NVCC_VERSION "{toolkit.version}"\n'
                    f'#define ATTN_EXT_CUDA_ARCHS "{" ".join(map(str, toolkit.archs))}"\n'
                    if isinstance(toolkit, nvcc.Toolkit)
                    else ""
                ),
            )
            for extension in self.extensions:
                flags = generated / f"flags_{extension.name.rpartition('.')[2]}.txt"
                toolchain.write_if_changed(
                    flags,
                    "\n".join([os.environ["CXX"], *extension.sources, *extension.extra_compile_args, ""]),
                )
                extension.include_dirs.append(str(generated))
                extension.depends += [str(config), str(flags)]

    class BuildCudaSim(BuildExt):
        """The `_C` of tests/cuda, into a folder of its own."""

        description = "build the CUDA kernels in their simulator, for ATTN_EXT_CUDA_SIM=1 pytest tests/cuda"

        def finalize_options(self) -> None:
            self.distribution.ext_modules = [cuda_sim_extension()]
            super().finalize_options()
            self.build_lib, self.build_temp = str(CUDA_SIM), str(CUDA_SIM / "temp")

    extensions = [cpu_extension()]
    if isinstance(toolkit, nvcc.Toolkit):
        extensions.append(cuda_extension(toolkit))
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": BuildExt, "build_cuda_sim": BuildCudaSim},
    }


# Metadata and source archives need neither torch nor a compiler.
setup(**(build_settings() if BUILD_COMMANDS.intersection(sys.argv) else {}))
