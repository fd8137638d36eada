#include <bit>
#include <cstdlib>

#include "cpu/generic/std_headers.h"
#include "testing.h"

#define ATTN_EXT_ISA_NAMESPACE scalar
#include "cpu/isa/scalar/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/math-inl.h"
#include "vec_tests-inl.h"

TEST(vec, scalar) { attn_ext::cpu::scalar::test_vec(); }
