// Products of bf16 matrices by AMX's tiles: see generic/pair_products-inl.h. Included inside the target region.
#pragma once

namespace attn_ext::cpu::amx_bf16 {
namespace {

struct PairTile {
  static constexpr int kRows = 32;  // of C at a time: 2 × 2 tiles, each factor's tile loaded for two products
  static constexpr int kRowMultiple = amx::kTileRows;  // A and C are read and written up to the next multiple of it
  static constexpr int kDepth = amx::kTileDepth;       // A and B hold zeros up to the next multiple of it
  // Rows of k are a left factor as they lie: k · qᵀ has the bits of q · kᵀ.
  static constexpr bool kKeysAsTheyLie = true;

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

    // The products of kDepth numbers of A's rows. What is given as `ahead` is asked for on the way, kAsked bytes with every
    // tile of A: in one stroke they would keep the loads waiting.
    static constexpr int kAsked = amx::kTileRows * 64;
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
};

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16
