// The same target region as in csrc/cpu/isa/avx512_bf16/kernels.cpp.
#if defined(__x86_64__)

#include "cpu/isa/avx512/intrinsics.h"

#include <bit>
#include <cstdlib>

#include "bf16_model.h"
#include "cpu/generic/std_headers.h"
#include "cpu/isa/avx512_bf16/emulation.h"
#include "testing.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers start from a deliberately uninitialised register, and warn of it when inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn_ext::cpu::avx512_bf16 {
namespace {

// A pair: the odd product first.
template <class Left, class Right>
float model_of_one_depth(Left left, Right right, float sum) {
  return test::flushed_multiply_add(left(0), right(0), test::flushed_multiply_add(left(1), right(1), sum));
}

}  // namespace
}  // namespace attn_ext::cpu::avx512_bf16

#include "cpu/isa/avx512_bf16/region_begin.h"

#define ATTN_EXT_ISA_NAMESPACE avx512_bf16
#include "cpu/isa/avx512/vec.h"
#include "cpu/isa/avx512_bf16/pairs.h"
// What follows is written over its Vec and Pairs.
#include "cpu/generic/math-inl.h"
#include "cpu/generic/gemm-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/isa/avx512_bf16/pair_tile.h"

#include "pairs_tests-inl.h"

namespace attn_ext::cpu::avx512_bf16 {
namespace {

#if !defined(ATTN_EXT_EMULATE_AVX512)
float dot_of_the_cpu(uint32_t a, uint32_t b, float c) {
  const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a)),
                 right = (__m512bh)_mm512_set1_epi32(static_cast<int>(b));
  return _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(c), left, right));
}
#endif

}  // namespace
}  // namespace attn_ext::cpu::avx512_bf16

#include "cpu/isa/avx512/region_end.h"

namespace attn_ext::cpu::avx512_bf16 {
namespace {

// From here on for every machine: the emulation is plain C++.
struct Dot {
  uint32_t a, b;
  float c;
};

// The emulation against the model, and, where `hardware` says that it is there, the instruction.
void check_dot(const Dot& x, [[maybe_unused]] bool hardware) {
  const auto part = [](uint32_t pair, int i) { return to_float(bf16{static_cast<uint16_t>(pair >> (16 * i))}); };
  const float want = model_of_one_depth([&](int i) { return part(x.a, i); }, [&](int i) { return part(x.b, i); }, x.c);
  const float emulated = emulation::dot(x.a, x.b, x.c);
  CHECK(test::same_bits(emulated, want), "%a + 0x%08x · 0x%08x emulated is %a, not %a", double(x.c), x.a, x.b,
        double(emulated), double(want));
#if !defined(ATTN_EXT_EMULATE_AVX512)
  if (!hardware) return;
  const float got = dot_of_the_cpu(x.a, x.b, x.c);
  CHECK(test::same_bits(got, want), "%a + 0x%08x · 0x%08x is %a, not %a", double(x.c), x.a, x.b, double(got),
        double(want));
#endif
}

void check_dots(bool hardware) {
  Random random(3);
  for (const Mood mood : kMoods) {
    for (int n = 0; n < 20000 / test::thinning(); ++n) {
      const auto pair = [&] { return pair_bits(test::random_bf16(random, mood), test::random_bf16(random, mood)); };
      check_dot({pair(), pair(), test::random_sum(random, mood)}, hardware);
    }
  }
  // Sums one step of 2^-151 after the other around the smallest normal number: where a fused multiply-add rounds, and
  // what it takes for zero.
  for (const float sign : {1.0f, -1.0f}) {
    for (int step = -40; step <= 40; ++step) {
      const bf16 tiny = to_bf16(0x1p-100f), steps = to_bf16(sign * static_cast<float>(step) * 0x1p-51f);
      for (const float sum : {sign * 0x1p-126f, sign * 0x1.000002p-126f, sign * 0x1.fffffep-126f}) {
        check_dot({pair_bits(tiny, bf16{0}), pair_bits(steps, bf16{0}), sum}, hardware);
        check_dot({pair_bits(bf16{0}, tiny), pair_bits(bf16{0}, steps), sum}, hardware);
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::avx512_bf16

// The emulation everywhere.
TEST(pairs, dot) { attn_ext::cpu::avx512_bf16::check_dots(attn_ext::test::isa_runs("avx512_bf16")); }

TEST(pairs, avx512_bf16) {
  if (attn_ext::test::isa_runs("avx512_bf16")) attn_ext::cpu::avx512_bf16::test_pairs();
}

#endif  // x86-64
