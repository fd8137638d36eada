// The same target region as in csrc/cpu/isa/avx512/kernels.cpp.
#if defined(__x86_64__)

#if defined(ATTN_EXT_EMULATE_AVX512)
#include "cpu/isa/avx512/emulation.h"
#else
#include <immintrin.h>
#endif

#include <bit>
#include <cstdlib>

#include "cpu/generic/std_headers.h"
#include "testing.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers start from a deliberately uninitialised register, and warn of it when inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

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
#include "cpu/generic/math-inl.h"
#include "vec_tests-inl.h"

#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

TEST(vec, avx512) {
  if (attn_ext::test::isa_runs("avx512")) attn_ext::cpu::avx512::test_vec();
}

#endif  // x86-64
