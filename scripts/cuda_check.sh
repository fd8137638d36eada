#!/usr/bin/env bash
# What nvcc made of the CUDA kernels: scripts/cuda_check.sh FOLDER ARCH...
# FOLDER holds the objects and what ptxas said of them (as setup.py leaves them). Fails where a kernel spills registers, and
# where one of those for tensor cores has no tensor-core products, no loads of matrices or no asynchronous copies.
# (cuobjdump and nvdisasm must be on the PATH: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, as make cuda-compile does.)
set -euo pipefail

folder=$1
shift
shorten() {
  (if command -v c++filt >/dev/null; then c++filt; else cat; fi) |
    sed -e 's/attn_ext::cuda::(anonymous namespace):://g' -e 's/attn_ext::cuda:://g' -e 's/attn_ext:://g' -e 's/(ForwardParams.*//' -e 's/(BackwardParams.*//'
}

spilled=no
for log in "$folder"/*.log; do
  # ptxas says of each kernel: "Compiling entry function 'NAME' for 'sm_80'", then its spills, then its registers.
  awk -v source="$(basename "$log" .log).cu" '
    /Compiling entry function/ { split($0, part, "\x27"); name = part[2]; arch = part[4] }
    /bytes spill stores/ { spill = $0; sub(/^ */, "", spill) }
    /Used [0-9]+ registers/ { match($0, /[0-9]+ registers/); print source ": " arch " " substr($0, RSTART, RLENGTH) ", " spill ": " name }
  ' "$log" | shorten
  if ! grep -q 'Used [0-9]* registers' "$log"; then
    echo "ptxas said nothing in $log" >&2
    exit 1
  fi
  if grep -qE '[1-9][0-9]* bytes spill (stores|loads)' "$log"; then spilled=yes; fi
done
if [ "$spilled" = yes ]; then
  echo "a kernel spills registers" >&2
  exit 1
fi

for object in "$folder"/*_mma.o; do
  for arch in "$@"; do
    cuobjdump -sass -arch "sm_$arch" "$object" >"${object%.o}.sass"
    awk -v source="$(basename "$object" .o).cu" -v arch="sm_$arch" '
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
    ' "${object%.o}.sass" | shorten || {
      echo "a kernel for tensor cores does not use them" >&2
      exit 1
    }
  done
done
