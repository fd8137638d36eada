// What the instructions for bf16 compute, in plain C++ and bit by bit: for machines without them, and for the sanitizers.
//
// Each product is one fused multiply-add, rounded to nearest even. Subnormal numbers count as zeros, and what would be one
// becomes a zero of its sign. (The instructions do so whatever the thread's state says; this code wants the usual one.)
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "storage.h"

namespace attn_ext::cpu::emulation {

inline constexpr float kSmallestNormal = std::numeric_limits<float>::min();

inline float without_subnormals(float x) { return std::fabs(x) < kSmallestNormal ? std::copysign(0.0f, x) : x; }

// a · b + c; a and b were bf16, and none of the three is subnormal.
inline float multiply_add(float a, float b, float c) {
  // A product of two numbers of 8 bits is exact, and so is rounded once with the sum, where its exponent fits: std::fma is
  // a call into the C library.
  const float product = a * b;
  const bool fits = std::fabs(product) > 0x1p-100f && std::fabs(product) < 0x1p+120f;
  const float sum = fits || a == 0.0f || b == 0.0f ? product + c : std::fma(a, b, c);
  if (!(std::fabs(sum) <= kSmallestNormal)) return sum;
  // What lies below the smallest normal number by less than fma can tell is zero as well. (Where the scaled numbers
  // overflow the sum is 0 exactly.)
  constexpr float kScale = 0x1p32f;
  const float scaled = std::fma(a * kScale, b, c * kScale);
  return std::fabs(scaled) < kScale * kSmallestNormal ? std::copysign(0.0f, sum) : sum;
}

inline float number(bf16 x) { return without_subnormals(to_float(x)); }

// A lane of VDPBF16PS: c + a · b, where a and b are pairs. The odd product first.
inline float dot(uint32_t a, uint32_t b, float c) {
  const auto odd = [](uint32_t pair) { return number(bf16{static_cast<uint16_t>(pair >> 16)}); };
  const auto even = [](uint32_t pair) { return number(bf16{static_cast<uint16_t>(pair)}); };
  return multiply_add(even(a), even(b), multiply_add(odd(a), odd(b), without_subnormals(c)));
}

}  // namespace attn_ext::cpu::emulation
