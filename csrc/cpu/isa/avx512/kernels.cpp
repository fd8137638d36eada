// Compiled for AVX-512 F, BW, DQ and VL (and what comes with them: AVX2, FMA, F16C) between the pragmas, and for nothing
// more; cpu/dispatch.cpp asks the CPU for all of them.
#if defined(__x86_64__)

#if defined(ATTN_EXT_EMULATE_AVX512)
#include "cpu/isa/avx512/emulation.h"
#else
#include <immintrin.h>
#endif

#include "cpu/generic/std_headers.h"

#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#endif

#define ATTN_EXT_ISA_NAMESPACE avx512
#include "cpu/isa/avx512/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/all-inl.h"

#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#endif  // x86-64
