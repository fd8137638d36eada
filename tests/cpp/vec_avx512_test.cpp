// The same target region as in csrc/cpu/isa/avx512/kernels.cpp.
#if defined(__x86_64__)

#include "cpu/isa/avx512/intrinsics.h"

#include <bit>
#include <cstdlib>

#include "cpu/generic/std_headers.h"
#include "testing.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers start from a deliberately uninitialised register, and warn of it when inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "cpu/isa/avx512/region_begin.h"

#define ATTN_EXT_ISA_NAMESPACE avx512
#include "cpu/isa/avx512/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/math-inl.h"
#include "vec_tests-inl.h"

#include "cpu/isa/avx512/region_end.h"

TEST(vec, avx512) {
  if (attn_ext::test::isa_runs("avx512")) attn_ext::cpu::avx512::test_vec();
}

#endif  // x86-64
