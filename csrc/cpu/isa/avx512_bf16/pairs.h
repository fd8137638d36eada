// What pairs of bf16 need of AVX-512 and its bf16 extension: see generic/pair_products-inl.h. Included inside the target
// region, after isa/avx512/vec.h. A Vec<float> holds 16 pairs here, as bits.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

struct Pairs {
  using V = Vec<float>;

  // Pair n: (a[n], b[n]).
  static V of_rows(const bf16* a, const bf16* b) {
    alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    const __m512i both = _mm512_inserti64x4(first, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kTurns), both))};
  }
  static V of_rows(const int8_t* a, const int8_t* b) { return of_whole(V::load(a), V::load(b)); }

  // Pair n: (a[n], b[n]) of numbers that bf16 holds exactly.
  static V of_whole(V a, V b) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
    const __m512i high = _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm512_castsi512_ps(_mm512_or_si512(low, high))};
  }

  // The first of all pairs, and the second ones.
  static void split(V pairs, bf16* first, bf16* second) {
    alignas(64) static constexpr uint16_t kTurns[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i apart = _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), _mm512_castps_si512(pairs.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(apart));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(apart, 1));
  }

  // Both numbers of the words with a zero beside them: (first, 0), (0, first), (second, 0), (0, second).
  static void spread(V words, V (&to)[4]) {
    const __m512i bits = _mm512_castps_si512(words.v);
    to[0].v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff)));
    to[1].v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    to[2].v = _mm512_castsi512_ps(_mm512_srli_epi32(bits, 16));
    to[3].v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // Numbers of even and of odd place among 32, and back.
  static void unzip(const float* from, V& even, V& odd) {
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    even.v = _mm512_permutex2var_ps(low, places, high);
    odd.v = _mm512_permutex2var_ps(low, _mm512_add_epi32(places, _mm512_set1_epi32(1)), high);
  }
  static void zip(V even, V odd, float* to) {
    const __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(even.v, places, odd.v));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(even.v, _mm512_add_epi32(places, _mm512_set1_epi32(8)), odd.v));
  }

  // Subnormal numbers become zeros of their sign, as in the sums of the instructions.
  static V without_subnormals(V x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i exponent = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000));
    const __mmask16 tiny = _mm512_cmpeq_epi32_mask(exponent, _mm512_setzero_si512());
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    return {_mm512_castsi512_ps(_mm512_mask_and_epi32(bits, tiny, bits, sign))};
  }

  // 32 numbers rounded to nearest even, subnormal ones to zero, one after the other.
  static void narrow(V first, V second, bf16* to) {
#if defined(ATTN_EXT_EMULATE_AVX512)
    emulation::narrow(first.v, second.v, to);
#else
    const __m512bh both = _mm512_cvtne2ps_pbh(second.v, first.v);
    std::memcpy(to, &both, sizeof both);
#endif
  }

  // Numbers 0 to 3 of 16 rows: lane j of to[i] is number i of row j.
  static void turn_four(const float* from, int64_t stride, V (&to)[4]) {
    __m512 some[4];  // quarter n of some[i] is row 4n + i
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      some[i] = _mm512_castps128_ps512(_mm_loadu_ps(from + i * stride));
      some[i] = _mm512_mask_broadcast_f32x4(some[i], 0x00f0, _mm_loadu_ps(from + (i + 4) * stride));
      some[i] = _mm512_mask_broadcast_f32x4(some[i], 0x0f00, _mm_loadu_ps(from + (i + 8) * stride));
      some[i] = _mm512_mask_broadcast_f32x4(some[i], 0xf000, _mm_loadu_ps(from + (i + 12) * stride));
    }
    const __m512 a = _mm512_unpacklo_ps(some[0], some[1]), b = _mm512_unpackhi_ps(some[0], some[1]);
    const __m512 c = _mm512_unpacklo_ps(some[2], some[3]), d = _mm512_unpackhi_ps(some[2], some[3]);
    to[0].v = _mm512_shuffle_ps(a, c, 0x44);
    to[1].v = _mm512_shuffle_ps(a, c, 0xee);
    to[2].v = _mm512_shuffle_ps(b, d, 0x44);
    to[3].v = _mm512_shuffle_ps(b, d, 0xee);
  }

  // Both of a pair 0 where they are NaN or Inf.
  static V without_specials(V pairs) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80), bits = _mm512_castps_si512(pairs.v);
    const __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
    return {_mm512_castsi512_ps(_mm512_maskz_mov_epi16(finite, bits))};
  }
};

// Finds out whether any bf16 passed to see() was NaN or Inf.
class PairCheck {
 public:
  PairCheck() : largest_(_mm512_setzero_si512()) {}  // spelled out: an implicit one is not compiled for AVX-512
  void see(Vec<float> pairs) {
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi16(0x7fff));
    largest_ = _mm512_max_epu16(largest_, size);
  }
  bool all_finite() const { return _mm512_cmpgt_epu16_mask(largest_, _mm512_set1_epi16(0x7f7f)) == 0; }

 private:
  __m512i largest_;
};

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
