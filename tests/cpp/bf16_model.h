// What the instructions for bf16 compute, by exact sums that are rounded once; and numbers that are hard on them.
#pragma once

#include <cstdint>
#include <vector>

#include "storage.h"
#include "testing.h"

namespace attn_ext::test {

// a · b + c with subnormal numbers as zeros, rounded to nearest even; what is smaller than the smallest normal number, as
// rounded by 24 bits, is a zero of its sign.
float flushed_multiply_add(float a, float b, float c);

// Equal to the last bit; all NaNs are alike.
bool same_bits(float a, float b);

// What numbers of a matrix are like. All moods have zeros of both signs.
enum class Mood {
  plain,      // around 1
  sizes,      // of very different sizes
  smallest,   // whose products lie around the smallest normal number
  cancels,    // few numbers, of both signs
  subnormal,  // subnormal ones, and others whose products are
  special     // all bits there are: NaN and Inf among them
};
inline constexpr Mood kMoods[] = {Mood::plain,   Mood::sizes,     Mood::smallest,
                                  Mood::cancels, Mood::subnormal, Mood::special};

bf16 random_bf16(Random& random, Mood mood);
// To be added to products of such numbers.
float random_sum(Random& random, Mood mood);

}  // namespace attn_ext::test
