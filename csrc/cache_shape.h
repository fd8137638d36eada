// What the shapes of a call over a KV cache say, as its numbers are checked against them.
#pragma once

#include <cstdint>

namespace attn_ext {

inline constexpr int64_t kLongest = int64_t{1} << 40;  // no sequence is that long

struct CacheShape {
  const char* op;
  int64_t batch = 0;
  int64_t capacity = 0;        // places of one sequence
  int64_t page = 0, pool = 0;  // places of a block, and how many blocks there are; no pages: 0
  bool ring = false, packed = false;
};

}  // namespace attn_ext
