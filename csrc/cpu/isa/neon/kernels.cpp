// aarch64: Advanced SIMD is part of the base architecture, so there is no target region.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "cpu/generic/std_headers.h"

#define ATTN_EXT_ISA_NAMESPACE neon
#include "cpu/isa/neon/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/all-inl.h"

#endif  // aarch64
