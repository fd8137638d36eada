// The scalar conversions of the 16-bit formats, for all 65536 values and around every rounding boundary.
#include "storage.h"

#include <bit>
#include <cmath>
#include <limits>

#include "testing.h"

namespace attn_ext::test {
namespace {

struct Format {
  const char* name;
  int exponent_bits, fraction_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
};

const Format kFormats[] = {
    {"bfloat16", 8, 7, [](uint16_t x) { return to_float(bf16{x}); }, [](float x) { return to_bf16(x).bits; }},
    {"float16", 5, 10, [](uint16_t x) { return to_float(f16{x}); }, [](float x) { return to_f16(x).bits; }},
};

// The value of a non-negative finite pattern, and of the pattern one past the largest finite one (where Inf begins to
// be nearer).
double value_of(const Format& f, int bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = bits >> f.fraction_bits, fraction = bits & ((1 << f.fraction_bits) - 1);
  if (exponent == 0) return std::ldexp(fraction, 1 - bias - f.fraction_bits);
  return std::ldexp(fraction + (1 << f.fraction_bits), exponent - bias - f.fraction_bits);
}

int infinity_of(const Format& f) { return ((1 << f.exponent_bits) - 1) << f.fraction_bits; }

TEST(storage, every_16_bit_value) {
  for (const Format& f : kFormats) {
    const Context context(f.name);
    const int infinity = infinity_of(f);
    for (int bits = 0; bits < 65536; ++bits) {
      const int magnitude = bits & 0x7fff;
      const bool negative = bits > 0x7fff;
      const float got = f.to_float(static_cast<uint16_t>(bits));
      CHECK(std::signbit(got) == negative, "0x%04x has the wrong sign: %g", bits, got);
      if (magnitude > infinity) {
        CHECK(std::isnan(got), "0x%04x is NaN, not %g", bits, got);
        const int back = f.from_float(got);
        const int quiet = bits | 1 << (f.fraction_bits - 1);
        CHECK(back == quiet, "NaN 0x%04x comes back as 0x%04x, not 0x%04x", bits, back, quiet);
        continue;
      }
      const double want = magnitude == infinity ? std::numeric_limits<double>::infinity() : value_of(f, magnitude);
      CHECK(std::fabs(static_cast<double>(got)) == want, "0x%04x is %g, not %g", bits, got, want);
      const int back = f.from_float(got);
      CHECK(back == bits, "0x%04x comes back as 0x%04x", bits, back);
    }
  }
}

TEST(storage, rounds_to_nearest_even) {
  for (const Format& f : kFormats) {
    const Context context(f.name);
    for (int low = 0; low < infinity_of(f); ++low) {
      const int high = low + 1;
      // Exact in fp32: one bit more than the format has.
      const auto middle = static_cast<float>((value_of(f, low) + value_of(f, high)) / 2);
      const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, HUGE_VALF);
      for (const int sign : {0, 0x8000}) {
        const float s = sign ? -1.0f : 1.0f;
        const int even = (low % 2 == 0 ? low : high) | sign;
        CHECK(f.from_float(s * middle) == even, "%a rounds to 0x%04x, not to 0x%04x", s * middle,
              f.from_float(s * middle), even);
        CHECK(f.from_float(s * below) == (low | sign), "%a rounds to 0x%04x, not to 0x%04x", s * below,
              f.from_float(s * below), low | sign);
        CHECK(f.from_float(s * above) == (high | sign), "%a rounds to 0x%04x, not to 0x%04x", s * above,
              f.from_float(s * above), high | sign);
      }
    }
  }
}

TEST(storage, beyond_the_range) {
  for (const Format& f : kFormats) {
    const Context context(f.name);
    const int infinity = infinity_of(f);
    const float largest = std::numeric_limits<float>::max(), tiny = std::numeric_limits<float>::denorm_min();
    CHECK(f.from_float(largest) == infinity, "the largest float becomes 0x%04x", f.from_float(largest));
    CHECK(f.from_float(-largest) == (infinity | 0x8000), "its negative becomes 0x%04x", f.from_float(-largest));
    CHECK(f.from_float(tiny) == 0 && f.from_float(-tiny) == 0x8000, "the smallest float becomes 0x%04x",
          f.from_float(tiny));
    for (uint32_t payload : {1u, 0x1fffu, 0x2000u, 0x3fffffu, 0x400000u, 0x7fffffu}) {
      for (const uint32_t sign : {0u, 0x80000000u}) {
        const uint16_t got = f.from_float(std::bit_cast<float>(sign | 0x7f800000u | payload));
        CHECK((got & 0x7fff) > infinity && (got >> 15) == (sign >> 31), "NaN with payload 0x%x becomes 0x%04x", payload,
              got);
      }
    }
  }
}

TEST(storage, convert) {
  CHECK((convert_to<bf16>(1.0).bits == 0x3f80), "1.0 as bfloat16");
  CHECK((convert_to<f16>(1.0f).bits == 0x3c00), "1.0 as float16");
  CHECK((convert_to<float>(0.1) == 0.1f), "0.1 as float32");
  CHECK((convert_to<double>(0.1) == 0.1), "0.1 as float64");
  CHECK((convert_from<double>(f16{0x3555}) == 0.333251953125), "a float16 as double");
  CHECK((convert_from<float>(0.1) == 0.1f), "a double as float");
}

}  // namespace
}  // namespace attn_ext::test
