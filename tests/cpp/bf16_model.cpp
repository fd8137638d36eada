#include "bf16_model.h"

#include <bit>
#include <cmath>
#include <limits>

namespace attn_ext::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

float as_read(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

float flushed_multiply_add(float a, float b, float c) {
  const double product = static_cast<double>(as_read(a)) * static_cast<double>(as_read(b));  // exact
  const double addend = static_cast<double>(as_read(c));
  double sum = product + addend;
  if (!std::isfinite(sum) || sum == 0) return static_cast<float>(sum);
  // What the addition lost makes the last bit odd: rounding to 24 bits then goes where the exact sum would.
  const double rest = sum - product;
  const double lost = (product - (sum - rest)) + (addend - rest);
  if (lost != 0 && (std::bit_cast<uint64_t>(sum) & 1) == 0) sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
  int exponent = 0;
  const double fraction = std::frexp(sum, &exponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(fraction, 24)), exponent - 24);
  if (std::fabs(rounded) < 0x1p-126) return std::copysign(0.0f, static_cast<float>(fraction));
  if (std::fabs(rounded) >= 0x1p128) return std::copysign(kInf, static_cast<float>(fraction));
  return static_cast<float>(rounded);
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

bf16 random_bf16(Random& random, Mood mood) {
  const auto sign = static_cast<uint32_t>(random.below(2)) << 15;
  const auto fraction = static_cast<uint32_t>(random.below(128));
  const auto with_exponent = [&](int64_t exponent) {
    return bf16{static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 127) << 7 | fraction)};
  };
  if (random.chance(0.05)) return bf16{static_cast<uint16_t>(sign)};
  switch (mood) {
    case Mood::plain:
      return with_exponent(random.below(6) - 3);
    case Mood::sizes:
      return with_exponent(random.below(120) - 60);
    case Mood::smallest:
      return with_exponent(-61 - random.below(16));
    case Mood::cancels:
      return to_bf16(random.one_of({1.0f, -1.0f, 1.5f, -1.5f, 0x1p12f, -0x1p12f, 0x1p-13f}));
    case Mood::subnormal:
      return random.chance(0.5) ? bf16{static_cast<uint16_t>(sign | fraction)} : with_exponent(random.below(150) - 126);
    default:
      return bf16{static_cast<uint16_t>(random.below(65536))};
  }
}

float random_sum(Random& random, Mood mood) {
  const float product = to_float(random_bf16(random, mood)) * to_float(random_bf16(random, mood));
  switch (random.below(4)) {
    case 0:
      return product;
    case 1:
      return product * static_cast<float>(random.uniform(0.9, 1.1));
    case 2:
      return static_cast<float>(random.uniform(-1, 1)) * 0x1p-125f;
    default:
      return mood == Mood::special ? std::bit_cast<float>(static_cast<uint32_t>(random.bits())) : 0.0f;
  }
}

}  // namespace attn_ext::test
