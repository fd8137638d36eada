// Compiled for AVX2, FMA and F16C between the pragmas, and for nothing more; cpu/dispatch.cpp asks the CPU for all three.
#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/generic/std_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define ATTN_EXT_ISA_NAMESPACE avx2
#include "cpu/isa/avx2/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/all-inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // x86-64
