// A row's keys in segments, by position: each has a max, a sum and sums of v of its own, and these are joined left to right.
// Every forward does that, whether a block walks over all segments of its rows or each has a block of its own: so who
// computes a segment changes no bit. What a segment is depends on how many keys the call's tensors have room for (in packed calls:
// on the sequence's own keys), never on lengths that only the device knows.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/primitives.cuh"
#include "cuda/scores.cuh"

namespace attn_ext::cuda {

// Keys of a segment of the sequence.
ATTN_EXT_DEVICE int64_t segment_keys(const AttentionParams& p, const Sequence& s) {
  return segment_keys_of(p.cu_k ? s.Lk : p.Lk);
}

// ---- Joining -------------------------------------------------------------------------------------------------------

// What two neighbouring stretches of a row's keys make together, and of their sums of v.
template <class T>
struct Joint {
  T max, sum, left_factor, right_factor;

  ATTN_EXT_DEVICE T operator()(T left, T right) const { return fma_of(right, right_factor, left * left_factor); }
};

template <class T>
ATTN_EXT_DEVICE Joint<T> join_segments(const ScoreUnits<T>& units, T left_max, T left_sum, T right_max, T right_sum) {
  const T now = Largest()(left_max, right_max);
  const T left = left_max == now ? T(1) : exp2_of((left_max - now) * units.c);
  const T right = right_max == now ? T(1) : exp2_of((right_max - now) * units.c);
  return {now, left_sum * left + right_sum * right, left, right};
}

// ---- Blocks that share a row's keys --------------------------------------------------------------------------------

// The segment of a block: number `place` of its rows' partials, where rows see keys from `first_key` on. Segments take the
// places in turn, for in a ring positions go on and on. It may lie behind all keys.
ATTN_EXT_DEVICE int64_t segment_at(const Split& split, int64_t place, int64_t first_key, int64_t keys) {
  const int64_t first = first_key / keys, segment = first / split.places * split.places + place;
  return segment < first ? segment + split.places : segment;
}

// What one segment has come to for the rows that share a key/value head: numbers that only blocks which have seen a key have
// written.
template <class T>
class Partial {
 public:
  // `number`: of the place, counted over all batch entries and key/value heads.
  ATTN_EXT_DEVICE Partial(const AttentionParams& p, const Split& split, int64_t number)
      : rows_(p.Hq / p.Hkv * p.Lq),
        width_(p.Dv),
        max_(static_cast<T*>(split.partials) + number * rows_ * (width_ + 2)) {}

  ATTN_EXT_DEVICE T* max(int64_t r) const { return max_ + r; }
  ATTN_EXT_DEVICE T* sum(int64_t r) const { return max_ + rows_ + r; }
  ATTN_EXT_DEVICE T* columns(int64_t r) const { return max_ + 2 * rows_ + r * width_; }

 private:
  int64_t rows_, width_;
  T* max_;
};

}  // namespace attn_ext::cuda
