// Products of bf16 matrices by AMX's tiles: see generic/pair_products-inl.h. Included inside the target region.
#pragma once

#include "cpu/isa/amx_bf16/byte_tile.h"

namespace attn_ext::cpu::amx_bf16 {
namespace {

struct PairTile {
  static constexpr int kRows = 32;  // of C at a time: 2 × 2 tiles, each factor's tile loaded for two products
  static constexpr int kRowMultiple = amx::kTileRows;  // A and C are read and written up to the next multiple of it
  static constexpr int kDepth = amx::kTileDepth;       // A and B hold zeros up to the next multiple of it
  // Rows of k are a left factor as they lie: k · qᵀ has the bits of q · kᵀ.
  static constexpr bool kKeysAsTheyLie = true;

  // And so are rows of an int8 cache.
  static constexpr bool kBytesAsTheyLie = true;
  using Bytes = ByteTile;

  using Session = amx::Session;

  // C[rows × vecs·16] = (C +) A · B. A is read at a[r·lda + k], B in pairs at b[k/2·ldb …], C at c[r·ldc …].
  template <Start start, class... Asked>
  static void multiply(int64_t rows, int vecs, int64_t K, const bf16* a, int64_t lda, const Word<bf16>* b, int64_t ldb,
                       float* c, int64_t ldc, Asked... ahead) {
    with_sums(rows, vecs, [&](auto sums) {
      sums.template begin<start>(c, ldc);
      for (int64_t k = 0; k < K; k += kDepth) {
        sums.add(a + k, lda, b + k / 2 * ldb, ldb);
        (ahead.ask(k / kDepth), ...);
      }
      sums.end(c, ldc);
    });
  }

  // Rows of v are a right factor as they lie, too, for few rows of weights. A pair is two neighbouring features of one key
  // then, and weights with a zero beside them, (w, 0) in rows 0 to 7 of A and (0, w) in rows 8 to 15, make rows of even
  // features of C and rows of odd ones. The keys of even number come first and those of odd number after them: so a sum
  // has the bits that packed pairs of keys give it. Both features of a pair are lost where one is NaN or Inf (0 · Inf).
  //
  // C[n][16][16] = the products of kDepth keys, `stride` numbers apart, and 32 features, for up to two such panels of them.
  // A: one tile for each half of the keys.
  static constexpr int kSpreadRows = amx::kTileRows / 2;
  static constexpr int kSpreadTile = amx::kTileRows * amx::kTileDepth;
  static constexpr int kSpreadSums = amx::kTileRows * amx::kTileColumns;
  template <int panels, class... Asked>
  static void multiply_spread(const bf16* a, const bf16* v, int64_t stride, float* c, Asked... ahead) {
    static_assert(panels == 1 || panels == 2);
    amx::zero<0>();
    if constexpr (panels > 1) amx::zero<1>();
    multiply_half<4, panels>(a, v, stride, 0, ahead...);
    multiply_half<5, panels>(a + kSpreadTile, v + stride, stride, panels, ahead...);
    constexpr int64_t kSums = amx::kTileColumns * sizeof(float);
    amx::store<0>(c, kSums);
    if constexpr (panels > 1) amx::store<1>(c + kSpreadSums, kSums);
  }

  // C[16][16] = rows of A by a factor B of up to 4 steps, which stays in registers 4 to 7 from hold on. Two of these may
  // be under way, c = 0 and 1.
  static constexpr int kHeldSteps = 4;
  template <int steps>
  static void hold(const Word<bf16>* b, int64_t ldb) {
    each_of<steps>(
        [&]<int s>() { amx::load<4 + s>(b + s * amx::kTileRows * ldb, ldb * static_cast<int64_t>(sizeof *b)); });
  }
  template <int steps, int c, class... Asked>
  static void multiply_by_held(const bf16* a, int64_t lda, float* sums, Asked... ahead) {
    amx::zero<c>();
    each_of<steps>([&]<int s>() {
      amx::load<2 + s % 2>(a + s * kDepth, lda * static_cast<int64_t>(sizeof *a));
      amx::multiply_add<c, 2 + s % 2, 4 + s>();
      (ahead.ask(s), ...);
    });
    amx::store<c>(sums, amx::kTileColumns * static_cast<int64_t>(sizeof *sums));
  }

  // Bytes of k or v that a tile holds: what is asked for at a time. In one stroke it would keep the loads waiting.
  static constexpr int kAsked = amx::kTileRows * 64;

  // The sums of MT × NT tiles, in registers 0 to 3 from begin to end; 4 and 5 are those of A, 6 and 7 of B.
  template <int MT, int NT>
  struct Sums {
    static_assert(MT * NT <= 4 && NT <= 2);

    template <Start start>
    static void begin(const float* c, int64_t ldc) {
      each([&]<int m, int n>() {
        if constexpr (start == Start::zero) {
          amx::zero<m * NT + n>();
        } else {
          amx::load<m * NT + n>(tile_of(c, ldc, m, n), ldc * kSize);
        }
      });
    }

    // The products of kDepth numbers of A's rows. What is given as `ahead` is asked for on the way, with every tile of A.
    template <class... Asked>
    static void add(const bf16* a, int64_t lda, const Word<bf16>* b, int64_t ldb, Asked... ahead) {
      amx::load<6>(b, ldb * kSize);
      if constexpr (NT > 1) amx::load<7>(b + amx::kTileColumns, ldb * kSize);
      each([&]<int m, int n>() {
        constexpr int A = 4 + m % 2;
        if constexpr (n == 0) amx::load<A>(a + m * amx::kTileRows * lda, lda * static_cast<int64_t>(sizeof(bf16)));
        amx::multiply_add<m * NT + n, A, 6 + n>();
        if constexpr (n == NT - 1) (ahead.ask(m), ...);
      });
    }

    static void end(float* c, int64_t ldc) {
      each([&]<int m, int n>() { amx::store<m * NT + n>(tile_of(c, ldc, m, n), ldc * kSize); });
    }

   private:
    static constexpr int64_t kSize = sizeof(float);

    template <class F>
    [[gnu::always_inline]] static void each(F&& f) {
      [&]<int... t>(std::integer_sequence<int, t...>) { (f.template operator()<t / NT, t % NT>(), ...); }
      (std::make_integer_sequence<int, MT * NT>());
    }
    template <class C>
    static C* tile_of(C* c, int64_t ldc, int m, int n) {
      return c + m * amx::kTileRows * ldc + n * amx::kTileColumns;
    }
  };

  // Calls f with the sums of up to kRows rows and two vectors of columns.
  template <class F>
  static void with_sums(int64_t rows, int vecs, F&& f) {
    if (rows > amx::kTileRows) {
      vecs > 1 ? f(Sums<2, 2>()) : f(Sums<2, 1>());
    } else {
      vecs > 1 ? f(Sums<1, 2>()) : f(Sums<1, 1>());
    }
  }

 private:
  template <int count, class F>
  [[gnu::always_inline]] static void each_of(F&& f) {
    [&]<int... n>(std::integer_sequence<int, n...>) { (f.template operator()<n>(), ...); }
    (std::make_integer_sequence<int, count>());
  }

  // C += the products of every second key, from the first on.
  template <int A, int panels, class... Asked>
  static void multiply_half(const bf16* a, const bf16* v, int64_t stride, int64_t step, Asked... ahead) {
    constexpr int64_t kSize = sizeof(bf16);
    amx::load<A>(a, amx::kTileDepth * kSize);
    each_of<panels>([&]<int n>() {
      amx::load<6 + n>(v + n * amx::kTileDepth, 2 * stride * kSize);
      amx::multiply_add<n, A, 6 + n>();
      (ahead.ask(step + n), ...);
    });
  }
};

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16
