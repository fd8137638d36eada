#!/usr/bin/env bash
# One build, several torches: builds a wheel against the headers of the oldest torch that attn_ext supports and loads
# that same wheel in that version and in newer ones. Downloads gigabytes (whole torch builds), so CI does not run it.
#
#   scripts/torch_range.sh                 2.10 builds; 2.10, 2.13.0 and 2.14.1 load
#   TORCH_BUILD=2.11.0 TORCH_LOAD="2.12.0 2.13.0" scripts/torch_range.sh
#   KEEP=1                                 leaves the environments in $WORK (else it removes them one by one)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_BUILD=${TORCH_BUILD:-2.10.*}
TORCH_LOAD=${TORCH_LOAD:-$TORCH_BUILD 2.13.0 2.14.1}
KEEP=${KEEP:-0}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
echo "torch_range: working in $WORK"

# environment NAME TORCH: a virtual environment with that torch and what it needs to be imported on a CPU. --no-deps
# first, since torch's own list would bring its CUDA libraries; but a CUDA build does not even load without them.
environment() {
  local folder=$WORK/$1 version=$2
  "$PYTHON" -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps "torch==$version"
  "$folder/bin/pip" install --quiet --disable-pip-version-check \
    numpy filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools>=77' pybind11 ninja
  if ! "$folder/bin/python" -c 'import torch' 2>/dev/null; then
    "$folder/bin/pip" install --quiet --disable-pip-version-check "torch==$version"
  fi
  "$folder/bin/python" -c 'import torch; print("torch_range: have torch", torch.__version__)'
}

forget() {
  if [ "$KEEP" != 1 ]; then rm -rf "${WORK:?}/$1"; fi
}

environment build "$TORCH_BUILD"
"$WORK/build/bin/python" setup.py --quiet sdist --dist-dir "$WORK/sdist"
"$WORK/build/bin/pip" wheel --quiet --no-deps --no-build-isolation -w "$WORK/wheels" "$WORK"/sdist/*.tar.gz
forget build

for version in $TORCH_LOAD; do
  environment load "$version"
  "$WORK/load/bin/pip" install --quiet --no-deps "$WORK"/wheels/*.whl
  (cd "$WORK" && "$WORK/load/bin/python" "$OLDPWD/scripts/smoke.py")
  echo "torch_range: the build for torch $TORCH_BUILD works in torch $version"
  if [ "$KEEP" = 1 ]; then mv "$WORK/load" "$WORK/load-$version"; fi
  forget load
done
