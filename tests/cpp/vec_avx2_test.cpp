// The same target region as in csrc/cpu/isa/avx2/kernels.cpp.
#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>
#include <cstdlib>

#include "cpu/generic/std_headers.h"
#include "testing.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define ATTN_EXT_ISA_NAMESPACE avx2
#include "cpu/isa/avx2/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/math-inl.h"
#include "vec_tests-inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

TEST(vec, avx2) {
  if (attn_ext::test::isa_runs("avx2")) attn_ext::cpu::avx2::test_vec();
}

#endif  // x86-64
