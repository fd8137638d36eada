// The dropout mask: Philox 4×32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the
// call's seed, at counter (b, h, i, j / 8): 128 bits for eight neighbouring keys, 16 a key. The same on a CPU and a GPU.
#pragma once

#include <cstdint>

#include "params.h"

namespace attn_ext {

// Bit e of the result: whether the weight of key 8 · (j / 8) + e of row (b, h, i) stays.
ATTN_EXT_SHARED inline uint32_t dropout_kept(uint64_t seed, uint32_t threshold, int64_t b, int64_t h, int64_t i,
                                             int64_t j) {
  constexpr uint32_t multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  constexpr uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
  uint32_t c0 = static_cast<uint32_t>(b), c1 = static_cast<uint32_t>(h), c2 = static_cast<uint32_t>(i);
  uint32_t c3 = static_cast<uint32_t>(j / 8);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(multiplier0) * c0;
    const uint64_t product1 = static_cast<uint64_t>(multiplier1) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += weyl0;
    key1 += weyl1;
  }
  const uint32_t words[4] = {c0, c1, c2, c3};
  uint32_t kept = 0;
  for (int e = 0; e < 8; ++e) {
    const uint32_t bits = (words[e / 2] >> (16 * (e % 2))) & 0xffffu;
    kept |= static_cast<uint32_t>(bits >= threshold) << e;
  }
  return kept;
}

}  // namespace attn_ext
