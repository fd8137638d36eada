// The dropout mask bit by bit: with equal scores and v the unit matrix, element d of an output row is key d's weight.
#include <cmath>

#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

TEST(dropout, philox_known_answers) {
  // From the authors' test vectors.
  struct Known {
    uint32_t counter[4], key[2], result[4];
  };
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& k : known) {
    uint32_t got[4];
    philox(k.counter, k.key, got);
    for (int w = 0; w < 4; ++w) CHECK(got[w] == k.result[w], "word %d is %08x, not %08x", w, got[w], k.result[w]);
  }
}

Problem equal_scores(Case c) {
  c.D = 1;
  c.Dv = c.Lk;
  Problem problem(c);
  problem.q.fill(0);
  problem.v.for_each(
      [&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) { problem.v.set(b0, b1, h, l, d, l == d ? 1 : 0); });
  return problem;
}

// Key j of row 0 under seed 0: its 16 bits are the least threshold that keeps it, plus nothing.
TEST(dropout, known_bits_in_the_kernels) {
  const uint32_t words[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (const DType dtype : {DType::float32, DType::float64}) {
    for_each_isa([&] {
      for (int64_t j = 0; j < 8; ++j) {
        const uint32_t bits = words[j / 2] >> (16 * (j % 2)) & 0xffff;
        for (const uint32_t threshold : {bits, bits + 1}) {
          Case c{.dtype = dtype, .Lq = 1, .Lk = 8};
          c.dropout_p = threshold / 65536.0;
          c.dropout_seed = 0;
          const Problem problem = equal_scores(c);
          const double got = run_forward(problem).out.get(0, 0, 0, 0, j);
          const double want = threshold > bits ? 0 : 65536.0 / (65536.0 - threshold) / 8;
          CHECK(std::fabs(got - want) < 1e-6, "key %d of bits %04x at threshold %04x: %g, not %g", static_cast<int>(j),
                bits, threshold, got, want);
        }
      }
    });
  }
}

// Every combination of position and window against the definition: the mask belongs to the key, wherever a block starts.
TEST(dropout, masks) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    for (const double p : {1e-5, 0.1, 0.5, 0.999, 1.0}) {
      for (const int64_t left : {kUnbounded, int64_t{3}, int64_t{10}}) {
        check_case({.name = "dropout",
                    .dtype = dtype,
                    .B1 = 2,
                    .Hq = 2,
                    .Hkv = 1,
                    .Lq = 12,
                    .Lk = 45,
                    .D = 3,
                    .Dv = 6,
                    .causal = left < 5 ? Causal::none : Causal::bottom_right,
                    .window_left = left,
                    .dropout_p = p,
                    .dropout_seed = 0xfedcba9876543210u,
                    .grad_lse = true});
      }
    }
    check_case({.name = "long dropout", .dtype = dtype, .Lq = 3, .Lk = 1300, .window_left = 270, .dropout_p = 0.4});
    check_case({.name = "packed dropout",
                .dtype = dtype,
                .Hq = 2,
                .cu_q = {0, 3, 20, 21},
                .cu_k = {0, 7, 50, 90},
                .causal = Causal::bottom_right,
                .window_left = 6,
                .dropout_p = 0.4});
  }
}

}  // namespace
}  // namespace attn_ext::test
