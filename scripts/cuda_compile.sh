#!/usr/bin/env bash
# Compiles every CUDA kernel for real GPUs (no GPU needed). Fails where a kernel spills registers, and where one of those for
# tensor cores does not use them, their matrix loads or their copies: scripts/cuda_compile.sh
# (cuobjdump and nvdisasm must be on the PATH: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, as make cuda-compile does.)
set -euo pipefail
cd "$(dirname "$0")/.."

NVCC=${NVCC:-nvcc}
OUT=build/cuda
ARCHS=(80 90) # A100; H100, H200
mkdir -p "$OUT"

flags=(-std=c++20 -O3 --fmad=false --expt-relaxed-constexpr -Icsrc -Werror all-warnings -Xptxas -v -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas)
for arch in "${ARCHS[@]}"; do flags+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
flags+=(-gencode "arch=compute_${ARCHS[-1]},code=compute_${ARCHS[-1]}")

# The compiler's output of one source goes to its log; the sources are compiled side by side.
compile_one() {
  "$NVCC" "${flags[@]}" -c "$1" -o "$OUT/$(basename "$1" .cu).o" >"$OUT/$(basename "$1" .cu).log" 2>&1
}
sources=(csrc/cuda/*.cu)
workers=()
trap 'jobs -rp | xargs -r kill 2>/dev/null || true' EXIT
for source in "${sources[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do sleep 0.2; done
  compile_one "$source" &
  workers+=($!)
done

spilled=no
for i in "${!sources[@]}"; do
  source=${sources[$i]}
  log=$OUT/$(basename "$source" .cu).log
  if ! wait "${workers[$i]}"; then
    cat "$log"
    echo "$source does not compile" >&2
    exit 1
  fi
  # ptxas says of each kernel: "Compiling entry function 'NAME' for 'sm_80'", then its spills, then its registers.
  awk -v source="$source" '
    /Compiling entry function/ { split($0, part, "\x27"); name = part[2]; arch = part[4] }
    /bytes spill stores/ { spill = $0; sub(/^ */, "", spill) }
    /Used [0-9]+ registers/ { match($0, /[0-9]+ registers/); print source ": " arch " " substr($0, RSTART, RLENGTH) ", " spill ": " name }
  ' "$log" | (if command -v c++filt >/dev/null; then c++filt; else cat; fi) |
    sed -e 's/attn_ext::cuda::(anonymous namespace):://g' -e 's/attn_ext::cuda:://g' -e 's/>(.*/>/'
  if ! grep -q 'Used [0-9]* registers' "$log"; then
    echo "ptxas said nothing of $source" >&2
    exit 1
  fi
  if grep -qE '[1-9][0-9]* bytes spill (stores|loads)' "$log"; then spilled=yes; fi
done
if [ "$spilled" = yes ]; then
  echo "a kernel spills registers" >&2
  exit 1
fi

# Tensor-core products, loads of matrices, asynchronous copies: in every kernel of *_mma.cu, for every GPU.
for source in csrc/cuda/*_mma.cu; do
  object=$OUT/$(basename "$source" .cu).o
  for arch in "${ARCHS[@]}"; do
    cuobjdump -sass -arch "sm_$arch" "$object" >"$object.sass"
    awk -v source="$source" -v arch="sm_$arch" '
      function report() {
        if (name == "") return
        printf "%s: %s %d HMMA, %d LDSM, %d LDGSTS: %s\n", source, arch, hmma, ldsm, copies, name
        if (!hmma || !ldsm || !copies) bad = 1
      }
      /Function : / { report(); name = $3; hmma = ldsm = copies = 0; functions++ }
      / HMMA\./ { hmma++ }
      / LDSM\./ { ldsm++ }
      / LDGSTS\./ { copies++ }
      END {
        report()
        if (!functions) print source ": no kernel for " arch
        exit bad || !functions
      }
    ' "$object.sass" | (if command -v c++filt >/dev/null; then c++filt; else cat; fi) |
      sed -e 's/attn_ext::cuda::(anonymous namespace):://g' -e 's/attn_ext::cuda:://g' -e 's/attn_ext:://g' -e 's/>(.*/>/' || {
      echo "a kernel for tensor cores does not use them" >&2
      exit 1
    }
  done
done
