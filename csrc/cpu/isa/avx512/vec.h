// Vec<float> and Vec<double> on 512-bit registers: AVX-512 F, BW, DQ, VL. What each member means: generic/vec_contract.md.
// Included inside the target region of kernels.cpp.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Where Ahead asks for memory: __builtin_prefetch's third argument. 2: into L2, and no further. On Sapphire Rapids requests
// into L1 hold one of its 16 fill buffers for as long as memory takes, and the loads of the products wait for one. One
// thread, share of the reading that memory gives beside it: fp32 77 → 92 %, bf16 65 → 79 %.
inline constexpr int kPrefetchLocality = 2;
// How far ahead of its use, in bytes. 32 KB and 128 KB are no better for fp32, and worse for bf16.
inline constexpr int64_t kPrefetchLead = 64 << 10;

template <class T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int N = 16;
  static constexpr int kTileRows = 12;  // 12 × 2 accumulators + 2 of B of 32 registers; A is broadcast from memory
  static constexpr float kExponentShift = 12582912.0f + 127.0f;  // 1.5·2^23 + bias, see exp2_nonpositive
  struct Mask {
    __mmask16 m;
  };
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vec broadcast_from(const float* p) { return {_mm512_set1_ps(*p)}; }
  static Vec iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  static Vec load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  static Vec low_bf16(Vec bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(bits.v), 16))}; }
  static Vec high_bf16(Vec bits) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(bits.v), high))};
  }
  template <int i>
  static Vec byte(Vec bits) {
    const __m512i at_top = _mm512_slli_epi32(_mm512_castps_si512(bits.v), 24 - 8 * i);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(at_top, 24))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i high = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
  }
  void store(f16* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  Vec operator+(Vec b) const { return {_mm512_add_ps(v, b.v)}; }
  Vec operator-(Vec b) const { return {_mm512_sub_ps(v, b.v)}; }
  Vec operator*(Vec b) const { return {_mm512_mul_ps(v, b.v)}; }
  Vec operator/(Vec b) const { return {_mm512_div_ps(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec abs(Vec a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
  }
  static Vec copysign(Vec magnitude, Vec sign) {
    const __m512i bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_andnot_si512(bit, _mm512_castps_si512(magnitude.v)),
                                                _mm512_and_si512(bit, _mm512_castps_si512(sign.v))))};
  }
  static Vec shift_into_exponent(Vec a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
  }

  static Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
  static Mask equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cmpneq_epi32_mask(wide, _mm512_setzero_si512())};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_mov_ps(no.v, m.m, yes.v)}; }

  float first() const { return _mm512_cvtss_f32(v); }
  // The halves are added and compared in a fixed order of our own: what _mm512_reduce_* does is the compiler's choice.
  __m256 upper() const { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
  float sum() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper());
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), upper());
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  template <class At>
  [[gnu::always_inline]] static void load_transposed(At at, Vec (&r)[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = load(at(i));
    __m512 t[16], u[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
      t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      const __m512 a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
      const __m512 c = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
      const __m512 d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
      r[i].v = _mm512_shuffle_f32x4(a, c, 0x88);
      r[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xdd);
      r[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88);
      r[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
};

template <>
struct Vec<double> {
  static constexpr int N = 8;
  static constexpr int kTileRows = 12;
  static constexpr double kExponentShift = 6755399441055744.0 + 1023.0;  // 1.5·2^52 + bias
  struct Mask {
    __mmask8 m;
  };
  __m512d v;

  static Vec zero() { return {_mm512_setzero_pd()}; }
  static Vec broadcast(double x) { return {_mm512_set1_pd(x)}; }
  static Vec broadcast_from(const double* p) { return {_mm512_set1_pd(*p)}; }
  static Vec iota() { return {_mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static Vec load(const double* p) { return {_mm512_loadu_pd(p)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }

  Vec operator+(Vec b) const { return {_mm512_add_pd(v, b.v)}; }
  Vec operator-(Vec b) const { return {_mm512_sub_pd(v, b.v)}; }
  Vec operator*(Vec b) const { return {_mm512_mul_pd(v, b.v)}; }
  Vec operator/(Vec b) const { return {_mm512_div_pd(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm512_max_pd(a.v, b.v)}; }
  static Vec abs(Vec a) {
    return {_mm512_castsi512_pd(_mm512_and_si512(_mm512_castpd_si512(a.v), _mm512_set1_epi64(0x7fffffffffffffffLL)))};
  }
  static Vec copysign(Vec magnitude, Vec sign) {
    const __m512i bit = _mm512_set1_epi64(static_cast<int64_t>(0x8000000000000000ULL));
    return {_mm512_castsi512_pd(_mm512_or_si512(_mm512_andnot_si512(bit, _mm512_castpd_si512(magnitude.v)),
                                                _mm512_and_si512(bit, _mm512_castpd_si512(sign.v))))};
  }
  static Vec shift_into_exponent(Vec a) {
    return {_mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a.v), 52))};
  }

  static Mask less(Vec a, Vec b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ)}; }
  static Mask equal(Vec a, Vec b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_EQ_OQ)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cmpneq_epi64_mask(wide, _mm512_setzero_si512())};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_mov_pd(no.v, m.m, yes.v)}; }

  double first() const { return _mm512_cvtsd_f64(v); }
  double sum() const {
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
  double largest() const {
    const __m256d four = _mm256_max_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
  }

  template <class At>
  [[gnu::always_inline]] static void load_transposed(At at, Vec (&r)[8]) {
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) r[i] = load(at(i));
    __m512d t[8];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i].v, r[i + 1].v);
      t[i + 1] = _mm512_unpackhi_pd(r[i].v, r[i + 1].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i) {
      const __m512d a = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88), b = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
      const __m512d c = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
      const __m512d d = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
      r[i].v = _mm512_shuffle_f64x2(a, c, 0x88);
      r[i + 4].v = _mm512_shuffle_f64x2(a, c, 0xdd);
      r[i + 2].v = _mm512_shuffle_f64x2(b, d, 0x88);
      r[i + 6].v = _mm512_shuffle_f64x2(b, d, 0xdd);
    }
  }
};

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
