// Vec<float> and Vec<double> on 256-bit registers: AVX2, FMA and F16C. What each member means: generic/vec_contract.md.
// Included inside the target region of kernels.cpp.
#pragma once

namespace attn_ext::cpu::avx2 {
namespace {

// Where Ahead asks for memory: __builtin_prefetch's third argument. 3: into L1.
inline constexpr int kPrefetchLocality = 3;
// How far ahead of its use, in bytes.
inline constexpr int64_t kPrefetchLead = 16 << 10;

template <class T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int N = 8;
  static constexpr int kTileRows = 6;  // 6 × 2 accumulators + 2 of B + 1 of A = 15 of 16 registers
  static constexpr float kExponentShift = 12582912.0f + 127.0f;  // 1.5·2^23 + bias, see exp2_nonpositive
  struct Mask {
    __m256 m;
  };
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vec broadcast_from(const float* p) { return {_mm256_broadcast_ss(p)}; }
  static Vec iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  static Vec load(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  static Vec low_bf16(Vec bits) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(bits.v), 16))}; }
  static Vec high_bf16(Vec bits) {
    return {_mm256_and_ps(bits.v, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  template <int i>
  static Vec byte(Vec bits) {
    const __m256i at_top = _mm256_slli_epi32(_mm256_castps_si256(bits.v), 24 - 8 * i);
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(at_top, 24))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_packus_epi32(high, high);
    const __m128i low = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low);
  }
  void store(f16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  Vec operator+(Vec b) const { return {_mm256_add_ps(v, b.v)}; }
  Vec operator-(Vec b) const { return {_mm256_sub_ps(v, b.v)}; }
  Vec operator*(Vec b) const { return {_mm256_mul_ps(v, b.v)}; }
  Vec operator/(Vec b) const { return {_mm256_div_ps(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static Vec copysign(Vec magnitude, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.v), _mm256_and_ps(bit, sign.v))};
  }
  static Vec shift_into_exponent(Vec a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 23))};
  }

  static Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
  static Mask equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()))};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, m.m)}; }

  float first() const { return _mm256_cvtss_f32(v); }
  float sum() const {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  float largest() const {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // Four rows' halves at a time: the two halves of a register come from rows r and r + 4, so that no shuffle has to cross.
  template <class At>
  [[gnu::always_inline]] static void load_transposed(At at, Vec (&r)[8]) {
    const __m256 a0 = load_halves(at(0), at(4)), b0 = load_halves(at(0) + 4, at(4) + 4);
    const __m256 a1 = load_halves(at(1), at(5)), b1 = load_halves(at(1) + 4, at(5) + 4);
    const __m256 a2 = load_halves(at(2), at(6)), b2 = load_halves(at(2) + 4, at(6) + 4);
    const __m256 a3 = load_halves(at(3), at(7)), b3 = load_halves(at(3) + 4, at(7) + 4);
    transpose_quarters(a0, a1, a2, a3, r[0], r[1], r[2], r[3]);
    transpose_quarters(b0, b1, b2, b3, r[4], r[5], r[6], r[7]);
  }

  // What a shuffle would join comes joined from memory: shuffles have two ports, and loads three.
  static __m256 load_halves(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
  }
  static __m256 load_halves(const f16* low, const f16* high) {
    const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
    return _mm256_cvtph_ps(both);
  }

  // 4 × 4 in each half.
  [[gnu::always_inline]] static void transpose_quarters(__m256 a, __m256 b, __m256 c, __m256 d, Vec& r0, Vec& r1,
                                                        Vec& r2, Vec& r3) {
    const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
    const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
    r0.v = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
    r1.v = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
    r2.v = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
    r3.v = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
  }
};

template <>
struct Vec<double> {
  static constexpr int N = 4;
  static constexpr int kTileRows = 6;
  static constexpr double kExponentShift = 6755399441055744.0 + 1023.0;  // 1.5·2^52 + bias
  struct Mask {
    __m256d m;
  };
  __m256d v;

  static Vec zero() { return {_mm256_setzero_pd()}; }
  static Vec broadcast(double x) { return {_mm256_set1_pd(x)}; }
  static Vec broadcast_from(const double* p) { return {_mm256_broadcast_sd(p)}; }
  static Vec iota() { return {_mm256_setr_pd(0, 1, 2, 3)}; }
  static Vec load(const double* p) { return {_mm256_loadu_pd(p)}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }

  Vec operator+(Vec b) const { return {_mm256_add_pd(v, b.v)}; }
  Vec operator-(Vec b) const { return {_mm256_sub_pd(v, b.v)}; }
  Vec operator*(Vec b) const { return {_mm256_mul_pd(v, b.v)}; }
  Vec operator/(Vec b) const { return {_mm256_div_pd(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm256_max_pd(a.v, b.v)}; }
  static Vec abs(Vec a) { return {_mm256_andnot_pd(_mm256_set1_pd(-0.0), a.v)}; }
  static Vec copysign(Vec magnitude, Vec sign) {
    const __m256d bit = _mm256_set1_pd(-0.0);
    return {_mm256_or_pd(_mm256_andnot_pd(bit, magnitude.v), _mm256_and_pd(bit, sign.v))};
  }
  static Vec shift_into_exponent(Vec a) {
    return {_mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a.v), 52))};
  }

  static Mask less(Vec a, Vec b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ)}; }
  static Mask equal(Vec a, Vec b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_EQ_OQ)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    const __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    return {_mm256_castsi256_pd(_mm256_cmpgt_epi64(wide, _mm256_setzero_si256()))};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_pd(no.v, yes.v, m.m)}; }

  double first() const { return _mm256_cvtsd_f64(v); }
  double sum() const {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
  double largest() const {
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
  }

  template <class At>
  [[gnu::always_inline]] static void load_transposed(At at, Vec (&r)[4]) {
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) r[i] = load(at(i));
    const __m256d a = _mm256_unpacklo_pd(r[0].v, r[1].v), b = _mm256_unpackhi_pd(r[0].v, r[1].v);
    const __m256d c = _mm256_unpacklo_pd(r[2].v, r[3].v), d = _mm256_unpackhi_pd(r[2].v, r[3].v);
    r[0].v = _mm256_permute2f128_pd(a, c, 0x20);
    r[1].v = _mm256_permute2f128_pd(b, d, 0x20);
    r[2].v = _mm256_permute2f128_pd(a, c, 0x31);
    r[3].v = _mm256_permute2f128_pd(b, d, 0x31);
  }
};

}  // namespace
}  // namespace attn_ext::cpu::avx2
