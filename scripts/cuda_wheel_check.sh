#!/usr/bin/env bash
# The CUDA kernels beside a torch that is a CUDA build, on any machine with nvcc: builds a wheel against it, installs the wheel,
# and looks whether `attn_ext._cuda` links, loads and has its operators. Where there is no GPU none of its kernels is run; the
# rest of the package must work all the same, and `attn-ext info` must say why. Downloads gigabytes, so CI does not run it.
#
#   scripts/cuda_wheel_check.sh                           torch 2.14.1, for the H100 and the H200
#   TORCH=2.13.0 ATTN_EXT_CUDA_ARCHS="80 90" scripts/cuda_wheel_check.sh
#   CUDA_ENV=FOLDER                                       an environment to use and to keep (else a new one, removed at the end)
#
# What is compiled stays in build/cuda_wheel: a second run compiles what has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.14.1}
export ATTN_EXT_CUDA=1
export ATTN_EXT_CUDA_ARCHS=${ATTN_EXT_CUDA_ARCHS:-90}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
CUDA_ENV=${CUDA_ENV:-$WORK/env}
BUILD=$PWD/build/cuda_wheel

if [ ! -x "$CUDA_ENV/bin/python" ]; then
  "$PYTHON" -m venv "$CUDA_ENV"
fi
PY=$CUDA_ENV/bin/python
"$PY" -m pip install --quiet --disable-pip-version-check "torch==$TORCH" numpy 'setuptools>=77' 'pybind11>=2.12' ninja
"$PY" -c 'import torch; assert torch.version.cuda, "that torch is a CPU build"
print("cuda_wheel_check: torch", torch.__version__, "with CUDA", torch.version.cuda)'

rm -rf "$BUILD/dist"
"$PY" setup.py --quiet build --build-base "$BUILD" bdist_wheel --dist-dir "$BUILD/dist"
"$PY" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$BUILD"/dist/*.whl
"$PY" -m pip install --quiet --disable-pip-version-check "$(echo "$BUILD"/dist/*.whl)[cli]"

checks=$PWD/scripts
cd "$WORK" # where no source tree is in the way

# What only an interpreter has is left to it; all else must be in a library that the loader finds.
extension=$("$PY" -c 'import attn_ext, pathlib; print(*pathlib.Path(attn_ext.__file__).parent.glob("_cuda.*.so"))')
if [ -z "$extension" ]; then
  echo "cuda_wheel_check: the wheel has no attn_ext/_cuda" >&2
  exit 1
fi
torch_lib=$("$PY" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "lib")')
LD_LIBRARY_PATH=$torch_lib ldd -r "$extension" >links 2>&1
if grep -E 'not found|undefined symbol' links | grep -vE 'undefined symbol: _?Py'; then
  echo "cuda_wheel_check: $extension asks for what its libraries do not have" >&2
  exit 1
fi
if ! grep -q 'libtorch_cuda' links; then
  echo "cuda_wheel_check: $extension does not reach libtorch_cuda" >&2
  exit 1
fi
echo "cuda_wheel_check: $(basename "$extension") finds all its symbols"

"$PY" "$checks/cuda_registers.py"
"$PY" "$checks/smoke.py"
"$CUDA_ENV/bin/attn-ext" info | tee info
grep -qE '^CUDA kernels +nvcc ' info
if ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  grep -qE '^CUDA device +none, so that ' info
fi
echo "cuda_wheel_check: all is well"
