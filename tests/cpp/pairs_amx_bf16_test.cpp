// The same target region as in csrc/cpu/isa/amx_bf16/kernels.cpp, and outside of it what every machine runs.
#if defined(__x86_64__)

#include "cpu/isa/avx512/intrinsics.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <limits>

#include "bf16_model.h"
#include "cpu/generic/std_headers.h"
#include "cpu/isa/amx_bf16/tiles.h"
#include "testing.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers start from a deliberately uninitialised register, and warn of it when inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn_ext::cpu::amx_bf16 {
namespace {

// A tile's depth: a chain of the even products and one of the odd ones, and the sum of both is added.
template <class Left, class Right>
float model_of_one_depth(Left left, Right right, float sum) {
  float chains[2] = {0, 0};
  for (int k = 0; k < amx::kTileDepth; ++k) {
    chains[k % 2] = test::flushed_multiply_add(left(k), right(k), chains[k % 2]);
  }
  return test::flushed_multiply_add(1, sum, test::flushed_multiply_add(1, chains[0], chains[1]));
}

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16

#include "cpu/isa/avx512_bf16/region_begin.h"

#define ATTN_EXT_ISA_NAMESPACE amx_bf16
#include "cpu/isa/avx512/vec.h"
#include "cpu/isa/avx512_bf16/pairs.h"
// What follows is written over its Vec and Pairs.
#include "cpu/generic/math-inl.h"
#include "cpu/generic/gemm-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/isa/amx_bf16/pair_tile.h"

#include "pairs_tests-inl.h"

namespace attn_ext::cpu::amx_bf16 {
namespace {

// Keys in four tiles: what the forward pass uses beside PairTile::multiply.
void check_four_tiles() {
  constexpr int64_t rows = 4 * amx::kTileRows, columns = amx::kTileColumns, K = 2 * amx::kTileDepth;
  Random random(5);
  for (const Mood mood : kMoods) {
    Block<bf16> a(rows * K), b(K * columns);
    Block<float> c(rows * columns);
    for (int64_t i = 0; i < a.count; ++i) a[i] = test::random_bf16(random, mood);
    for (int64_t i = 0; i < b.count; ++i) b[i] = test::random_bf16(random, mood);
    const auto* words = reinterpret_cast<const Word<bf16>*>(b.x);
    const amx::Session session;
    PairTile::Sums<4, 1> sums;
    sums.begin<Start::zero>(c.x, columns);
    for (int64_t k = 0; k < K; k += PairTile::kDepth) sums.add(a.x + k, K, words + k / 2 * columns, columns);
    sums.end(c.x, columns);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < columns; ++n) {
        float want = 0;
        for (int64_t k = 0; k < K; k += PairTile::kDepth) {
          want = model_of_one_depth([&](int i) { return to_float(a[m * K + k + i]); },
                                    [&](int i) { return to_float(b[((k + i) / 2 * columns + n) * 2 + i % 2]); }, want);
        }
        const float got = c[m * columns + n];
        CHECK(test::same_bits(got, want), "[%d][%d] is %a, not %a", int(m), int(n), double(got), double(want));
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16

#include "cpu/isa/avx512/region_end.h"

namespace attn_ext::cpu::amx_bf16 {
namespace {

// From here on for every machine: the emulation is plain C++.
struct Tiles {
  bf16 a[amx::kTileRows][amx::kTileDepth];
  bf16 b[amx::kTileDepth / 2][amx::kTileColumns][2];
  float c[amx::kTileRows][amx::kTileColumns];
};

void check_tiles(const char* what, const Tiles& x, const float (&got)[amx::kTileRows][amx::kTileColumns]) {
  for (int m = 0; m < amx::kTileRows; ++m) {
    for (int n = 0; n < amx::kTileColumns; ++n) {
      const float want = model_of_one_depth([&](int k) { return to_float(x.a[m][k]); },
                                            [&](int k) { return to_float(x.b[k / 2][n][k % 2]); }, x.c[m][n]);
      CHECK(test::same_bits(got[m][n], want), "%s: [%d][%d] is %a, not %a", what, m, n, double(got[m][n]),
            double(want));
    }
  }
}

void check_hardware(const Tiles& x) {
  using namespace amx::hardware;
  float got[amx::kTileRows][amx::kTileColumns];
  const Session session;
  load<0>(x.c, 64);
  load<3>(x.a, 64);
  load<7>(x.b, 64);
  multiply_add<0, 3, 7>();
  store<0>(got, 64);
  check_tiles("the CPU", x, got);
}

void check_emulated(const Tiles& x) {
  using namespace amx::emulated;
  float got[amx::kTileRows][amx::kTileColumns];
  const Session session;
  load<0>(x.c, 64);
  load<3>(x.a, 64);
  load<7>(x.b, 64);
  multiply_add<0, 3, 7>();
  store<0>(got, 64);
  check_tiles("emulated", x, got);
}

void check_both(const Tiles& x, bool hardware) {
  check_emulated(x);
  if (hardware) check_hardware(x);
}

void check_instruction(bool hardware) {
  Random random(4);
  Tiles x;
  for (const Mood mood : kMoods) {
    for (int n = 0; n < std::max(1, 12 / test::thinning()); ++n) {
      for (auto& row : x.a) {
        for (bf16& number : row) number = test::random_bf16(random, mood);
      }
      for (auto& row : x.b) {
        for (auto& pair : row) {
          for (bf16& number : pair) number = test::random_bf16(random, mood);
        }
      }
      for (auto& row : x.c) {
        for (float& sum : row) sum = test::random_sum(random, mood);
      }
      check_both(x, hardware);
    }
  }
  // Row m takes from 2^-126 (and column n adds to it) some steps of 2^-151: what of it is taken for zero.
  std::memset(&x, 0, sizeof x);
  for (int m = 0; m < amx::kTileRows; ++m) {
    for (int odd : {0, 1}) {
      x.a[m][odd] = to_bf16(0x1p-63f);
      x.a[m][2 + odd] = to_bf16(static_cast<float>(m - 12) * 0x1p-51f);
    }
  }
  for (int n = 0; n < amx::kTileColumns; ++n) {
    for (int odd : {0, 1}) {
      x.b[0][n][odd] = to_bf16(n < 8 || odd == 0 ? 0x1p-63f : 0.0f);
      x.b[1][n][odd] = to_bf16(static_cast<float>(n % 8) * 0x1p-100f);
    }
    for (int m = 0; m < amx::kTileRows; ++m) x.c[m][n] = n % 2 == 0 ? 0.0f : -0x1p-126f;
  }
  check_both(x, hardware);
}

// Bytes: sums of 64 products, whole numbers that wrap round.
struct ByteTiles {
  int8_t a[amx::kTileRows][64], b[amx::kTileRows][64];
  int32_t c[amx::kTileRows][amx::kTileColumns];
};

void check_byte_tiles(const char* what, const ByteTiles& x, const int32_t (&got)[amx::kTileRows][amx::kTileColumns]) {
  for (int m = 0; m < amx::kTileRows; ++m) {
    for (int n = 0; n < amx::kTileColumns; ++n) {
      int64_t want = x.c[m][n];
      for (int k = 0; k < 64; ++k) want += int64_t{x.a[m][k]} * x.b[k / 4][4 * n + k % 4];
      CHECK(got[m][n] == static_cast<int32_t>(want), "%s: [%d][%d] is %d, not %d", what, m, n, got[m][n],
            static_cast<int32_t>(want));
    }
  }
}

void check_byte_instruction(bool hardware) {
  Random random(6);
  ByteTiles x;
  for (int n = 0; n < 20; ++n) {
    const bool extreme = n % 4 == 0;  // ±128 only, and sums near the largest
    const auto byte = [&] {
      return static_cast<int8_t>(extreme ? (random.below(2) ? -128 : 127) : random.below(256) - 128);
    };
    for (auto& row : x.a) std::generate(std::begin(row), std::end(row), byte);
    for (auto& row : x.b) std::generate(std::begin(row), std::end(row), byte);
    for (auto& row : x.c) {
      for (int32_t& sum : row)
        sum = extreme ? std::numeric_limits<int32_t>::max() - random.below(9) : random.below(9999) - 5000;
    }
    int32_t got[amx::kTileRows][amx::kTileColumns];
    {
      using namespace amx::emulated;
      const Session session;
      load<1>(x.c, 64);
      load<2>(x.a, 64);
      load<6>(x.b, 64);
      multiply_add_bytes<1, 2, 6>();
      store<1>(got, 64);
    }
    check_byte_tiles("emulated", x, got);
    if (!hardware) continue;
    {
      using namespace amx::hardware;
      const Session session;
      load<1>(x.c, 64);
      load<2>(x.a, 64);
      load<6>(x.b, 64);
      multiply_add_bytes<1, 2, 6>();
      store<1>(got, 64);
    }
    check_byte_tiles("the CPU", x, got);
  }
}

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16

// The emulation everywhere; the instruction where the kernels use it.
TEST(pairs, tiles) {
#if defined(ATTN_EXT_EMULATE_AMX)
  const bool hardware = false;
#else
  const bool hardware = attn_ext::test::isa_runs("amx_bf16");
#endif
  attn_ext::cpu::amx_bf16::check_instruction(hardware);
  attn_ext::cpu::amx_bf16::check_byte_instruction(hardware);
}

TEST(pairs, amx_bf16) {
  if (!attn_ext::test::isa_runs("amx_bf16")) return;
  attn_ext::cpu::amx_bf16::test_pairs();
  attn_ext::cpu::amx_bf16::check_four_tiles();
}

#endif  // x86-64
