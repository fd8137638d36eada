// Products of bf16 matrices by VDPBF16PS: see generic/pair_products-inl.h. Included inside the target region.
//
// Every lane of C takes two products at a time, a pair of A broadcast against a pair of B: one chain over the pairs in
// rising order. Subnormal numbers count as zeros.
#pragma once

namespace attn_ext::cpu::avx512_bf16 {
namespace {

struct PairTile {
  static constexpr int kRows = 12;               // 12 × 2 vectors of C + 2 of B of 32 registers
  static constexpr int kRowMultiple = 1;         // A and C have just the rows that are asked for
  static constexpr int kDepth = 2;               // A and B hold zeros up to the next multiple of it
  static constexpr bool kKeysAsTheyLie = false;  // a row of k as the left factor would leave most of a vector of q idle
  static constexpr bool kBytesAsTheyLie = false;
  struct Bytes {};

  struct Session {};

  // C[rows × vecs·16] = (C +) A · B. A is read at a[r·lda + k], B in pairs at b[k/2·ldb …], C at c[r·ldc …].
  template <Start start, class... Asked>
  static void multiply(int64_t rows, int vecs, int64_t K, const bf16* a, int64_t lda, const Word<bf16>* b, int64_t ldb,
                       float* c, int64_t ldc, Asked... ahead) {
    with_row_count<float, kRows>(rows, [&](auto count) {
      constexpr int MR = decltype(count)::value;
      vecs > 1 ? tile<MR, 2, start>(K, a, lda, b, ldb, c, ldc, ahead...)
               : tile<MR, 1, start>(K, a, lda, b, ldb, c, ldc, ahead...);
    });
  }

 private:
  using V = Vec<float>;

  static V dot(V a, V b, V c) {
#if defined(ATTN_EXT_EMULATE_AVX512)
    return {emulation::dot(c.v, a.v, b.v)};
#else
    return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
#endif
  }

  static V broadcast_pair(const bf16* a) {
    int32_t bits;
    std::memcpy(&bits, a, sizeof bits);
    return {_mm512_castsi512_ps(_mm512_set1_epi32(bits))};
  }

  template <int MR, int NV, Start start, class... Asked>
  static void tile(int64_t K, const bf16* a, int64_t lda, const Word<bf16>* b, int64_t ldb, float* c, int64_t ldc,
                   Asked... ahead) {
    V acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) acc[r][n] = start == Start::zero ? V::zero() : V::load(c + r * ldc + n * V::N);
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; k += 2) {
      V pairs[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) pairs[n] = V::load(reinterpret_cast<const float*>(b + k / 2 * ldb + n * V::N));
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const V pair = broadcast_pair(a + r * lda + k);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = dot(pair, pairs[n], acc[r][n]);
      }
      (ahead.ask(k / 2), ...);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) acc[r][n].store(c + r * ldc + n * V::N);
    }
  }
};

}  // namespace
}  // namespace attn_ext::cpu::avx512_bf16
