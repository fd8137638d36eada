// Compiled for AVX-512 F, BW, DQ and VL (and what comes with them: AVX2, FMA, F16C) between the pragmas, and for nothing
// more; cpu/dispatch.cpp asks the CPU for all of them.
#if defined(__x86_64__)

#include "cpu/isa/avx512/intrinsics.h"

#include "cpu/generic/std_headers.h"

#include "cpu/isa/avx512/region_begin.h"

#define ATTN_EXT_ISA_NAMESPACE avx512
#include "cpu/isa/avx512/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/all-inl.h"

#include "cpu/isa/avx512/region_end.h"

#endif  // x86-64
