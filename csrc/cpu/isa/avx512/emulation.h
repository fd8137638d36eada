// AVX-512 for machines without it, so that the kernels for it, with and without bf16, can be tested everywhere: SIMDe's
// portable functions under the names of the intrinsics, and, lane by lane, those that vec.h, pairs.h and pair_tile.h use
// and SIMDe 0.7.4 does not have.
#pragma once

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // 512-bit arguments of functions that are not compiled for AVX-512
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>
#include <functional>

#include "cpu/isa/avx512_bf16/emulation.h"

namespace attn_ext::cpu::emulation {

// Every lane of a vector as another integer type; `a` may have more lanes than the result.
template <class Result, class To, class From, class Vector>
inline Result convert(Vector a) {
  constexpr int lanes = sizeof(Result) / sizeof(To);
  From from[lanes];
  To to[lanes];
  std::memcpy(from, &a, sizeof from);
  for (int i = 0; i < lanes; ++i) to[i] = static_cast<To>(from[i]);
  Result result;
  std::memcpy(&result, to, sizeof result);
  return result;
}

// Every 32-bit lane shifted right, the sign kept.
inline __m512i shift_right(__m512i a, int bits) {
  int32_t lanes[16];
  std::memcpy(lanes, &a, sizeof lanes);
  for (int32_t& x : lanes) x >>= bits;
  std::memcpy(&a, lanes, sizeof lanes);
  return a;
}

// Two of a's four 128-bit quarters, then two of b's.
template <class Vector>
inline Vector shuffle_quarters(Vector a, Vector b, int choice) {
  char to[64];
  for (int i = 0; i < 4; ++i) {
    const char* from = reinterpret_cast<const char*>(i < 2 ? &a : &b);
    std::memcpy(to + 16 * i, from + 16 * ((choice >> (2 * i)) & 3), 16);
  }
  Vector result;
  std::memcpy(&result, to, sizeof result);
  return result;
}

// Lane 0.
template <class T, class Vector>
inline T first(Vector a) {
  T x;
  std::memcpy(&x, &a, sizeof x);
  return x;
}

inline __m512 from_half(__m256i a) {
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                            _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  __m512 result;
  std::memcpy(&result, halves, sizeof result);
  return result;
}

inline __m256i to_half(__m512 a) {
  __m256 halves[2];
  std::memcpy(halves, &a, sizeof a);
  const __m128i low = _mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128i high = _mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Of each lane of 16 bits whether `holds(a, b)`.
template <class F>
inline __mmask32 compare(__m512i a, __m512i b, F holds) {
  uint16_t x[32], y[32];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(holds(x[i], y[i])) << i;
  return mask;
}

// VDPBF16PS. The pairs come as bits.
inline __m512 dot(__m512 sums, __m512 a, __m512 b) {
  float to[16];
  uint32_t x[16], y[16];
  std::memcpy(to, &sums, sizeof to);
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 16; ++i) to[i] = dot(x[i], y[i], to[i]);
  std::memcpy(&sums, to, sizeof to);
  return sums;
}

// VCVTNE2PS2BF16.
inline void narrow(__m512 first, __m512 second, bf16* to) {
  float from[32];
  std::memcpy(from, &first, sizeof first);
  std::memcpy(from + 16, &second, sizeof second);
  for (int i = 0; i < 32; ++i) to[i] = to_bf16(without_subnormals(from[i]));
}

}  // namespace attn_ext::cpu::emulation

#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_srai_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu8_epi64
#undef _mm512_cvtepi32_epi16
#undef _mm512_cmpneq_epi32_mask
#undef _mm512_cmpneq_epi64_mask
#undef _mm512_cmpneq_epi16_mask
#undef _mm512_cmpgt_epu16_mask
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtss_f32
#undef _mm512_cvtsd_f64
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_f64x2
#define _mm512_cvtepu16_epi32(a) (emulation::convert<__m512i, int32_t, uint16_t>(a))
#define _mm512_cvtepu8_epi32(a) (emulation::convert<__m512i, int32_t, uint8_t>(a))
#define _mm512_srai_epi32(a, bits) (emulation::shift_right(a, bits))
#define _mm512_cvtepi8_epi32(a) (emulation::convert<__m512i, int32_t, int8_t>(a))
#define _mm512_cvtepi32_ps(a) (emulation::convert<__m512, float, int32_t>(a))
#define _mm512_cvtepu8_epi64(a) (emulation::convert<__m512i, int64_t, uint8_t>(a))
#define _mm512_cvtepi32_epi16(a) (emulation::convert<__m256i, uint16_t, uint32_t>(a))
#define _mm512_cmpneq_epi32_mask(a, b) static_cast<__mmask16>(~_mm512_cmpeq_epi32_mask(a, b))
#define _mm512_cmpneq_epi64_mask(a, b) static_cast<__mmask8>(~_mm512_cmpeq_epi64_mask(a, b))
#define _mm512_cmpneq_epi16_mask(a, b) (emulation::compare(a, b, std::not_equal_to<>()))
#define _mm512_cmpgt_epu16_mask(a, b) (emulation::compare(a, b, std::greater<>()))
#define _mm512_cvtph_ps(a) (emulation::from_half(a))
#define _mm512_cvtps_ph(a, to_nearest) (emulation::to_half(a))
#define _mm512_cvtss_f32(a) (emulation::first<float>(a))
#define _mm512_cvtsd_f64(a) (emulation::first<double>(a))
#define _mm512_shuffle_f32x4(a, b, choice) (emulation::shuffle_quarters(a, b, choice))
#define _mm512_shuffle_f64x2(a, b, choice) (emulation::shuffle_quarters(a, b, choice))
