#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>
#include <cstdlib>

#include "cpu/generic/std_headers.h"
#include "testing.h"

#define ATTN_EXT_ISA_NAMESPACE neon
#include "cpu/isa/neon/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/math-inl.h"
#include "vec_tests-inl.h"

TEST(vec, neon) { attn_ext::cpu::neon::test_vec(); }

#endif  // aarch64
