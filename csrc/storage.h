// The 16-bit number formats as stored in memory, and their scalar conversions (round to nearest even, NaN kept).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "params.h"

namespace attn_ext {

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

ATTN_EXT_SHARED inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

ATTN_EXT_SHARED inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) {  // Inf, NaN (made quiet, as hardware does)
    return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x00400000u : 0u));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

ATTN_EXT_SHARED inline bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

ATTN_EXT_SHARED inline f16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more: Inf
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the bottom
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

ATTN_EXT_SHARED inline float to_float(int8_t x) { return x; }
ATTN_EXT_SHARED inline float to_float(float x) { return x; }
ATTN_EXT_SHARED inline double to_float(double x) { return x; }

// A finite double beyond float's range becomes float's largest number: as a bias it must stay huge and finite, for −Inf
// means hidden.
template <class Compute, class Storage>
ATTN_EXT_SHARED inline Compute convert_from(Storage x) {
  if constexpr (std::is_same_v<Compute, float> && std::is_same_v<Storage, double>) {
    constexpr double largest = std::numeric_limits<float>::max();
    if (x > largest && x <= std::numeric_limits<double>::max()) return std::numeric_limits<float>::max();
    if (x < -largest && x >= -std::numeric_limits<double>::max()) return -std::numeric_limits<float>::max();
  }
  return static_cast<Compute>(to_float(x));
}

template <class Storage, class Compute>
ATTN_EXT_SHARED inline Storage convert_to(Compute x) {
  if constexpr (sizeof(Storage) > 2) {
    return static_cast<Storage>(x);
  } else if constexpr (std::is_same_v<Storage, bf16>) {
    return to_bf16(static_cast<float>(x));
  } else {
    return to_f16(static_cast<float>(x));
  }
}

}  // namespace attn_ext
