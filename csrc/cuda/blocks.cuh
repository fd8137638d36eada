// Which rows, or keys, a block has, and of which sequence.
//
// Tasks of a kernel are numbered by (batch entry, key/value head, block of rows or keys), the last one running fastest. Of
// packed sequences only the device knows how long they are, so that the host launches what their total takes however it is
// divided, for each head: with `group` rows a token and `size` rows a block the blocks of sequence b begin at
//
//   first(b) = ⌊group · cu[b] / size⌋ + b
//
// They are enough, and at most one of them finds nothing to do: with x = group · cu[b] / size and d the same of the
// sequence's own length, first(b + 1) − first(b) = ⌊x + d⌋ − ⌊x⌋ + 1, and ⌊d⌋ ≤ ⌊x + d⌋ − ⌊x⌋ ≤ ⌈d⌉ where ⌈d⌉ are needed.
// All sequences have first(batch) ≤ ⌊group · total / size⌋ + batch blocks, which the host knows. first grows with every
// sequence, so that a block finds its own by halving: log2(batch) looks at cu[1 … batch], and nowhere else whatever it finds
// there. cu itself never falls and stays within the rows, also where the caller's did not (checks.cu).
//
// Rows behind cu[batch], which are there where the caller's boundaries were wrong, are those of one sequence more, number
// `batch`, which has no keys.
#pragma once

#include <cstdint>

#include "cuda/primitives.cuh"
#include "params.h"
#include "positions.h"

namespace attn_ext::cuda {

// The last n of 0 … count with first(n) ≤ x. first never falls, and first(0) ≤ x.
template <class First>
ATTN_EXT_DEVICE int64_t last_before(int64_t count, int64_t x, const First& first) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (first(middle) <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// What sequence_of says, also of the sequence behind the last packed one.
ATTN_EXT_DEVICE Sequence sequence_at(const AttentionParams& p, int64_t b) {
  if (p.cu_q == nullptr || b < p.batch) return sequence_of(p, b);
  Sequence rest;
  rest.q_row = entry(p.cu_q + p.batch);
  rest.Lq = p.total_q - rest.q_row;
  return rest;
}

// ---- Blocks of rows, of keys -----------------------------------------------------------------------------------------

// A block's sequence and key/value head, and the first of its rows (of those that share the head) or keys.
struct BlockPlace {
  int64_t b, hkv, begin;
};

// A block of packed sequences: its own, and how many blocks that one has before this one and behind it.
struct PackedBlock {
  int64_t b, before, behind;
};

// Block number `block` of `blocks`.
template <int size>
ATTN_EXT_DEVICE PackedBlock packed_block(const int64_t* cu, int64_t batch, int64_t group, int64_t blocks,
                                         int64_t block) {
  const auto first = [&](int64_t b) { return group * entry(cu + b) / size + b; };
  const int64_t b = last_before(batch, block, first);
  return {b, block - first(b), (b < batch ? first(b + 1) : blocks) - 1 - block};
}

// Blocks of `size` rows for one head: of a batch entry, or of all packed sequences (and of the rows behind them).
template <int size>
int64_t row_blocks_of(const AttentionParams& p, bool with_rest = false) {
  const int64_t group = p.Hq / p.Hkv;
  if (p.cu_q == nullptr) return pieces(group * p.Lq, size);
  return group * p.total_q / size + p.batch + (with_rest ? 1 : 0);
}

// The same of keys.
template <int size>
int64_t key_blocks_of(const AttentionParams& p) {
  return p.cu_k == nullptr ? pieces(p.Lk, size) : p.total_k / size + p.batch;
}

// Heads that have so many blocks each, of rows or of keys: boundaries of keys never come without those of rows.
inline int64_t heads_of_blocks(const AttentionParams& p) { return p.cu_q == nullptr ? p.batch * p.Hkv : p.Hkv; }

// Where block `task` of those stands. Long rows first: with causal masks later rows see more keys.
template <int size>
ATTN_EXT_DEVICE BlockPlace place_of_rows(const AttentionParams& p, int64_t row_blocks, int64_t task) {
  const int64_t unit = task / row_blocks, block = task % row_blocks;
  if (p.cu_q == nullptr) return {unit / p.Hkv, unit % p.Hkv, (row_blocks - 1 - block) * size};
  const PackedBlock at = packed_block<size>(p.cu_q, p.batch, p.Hq / p.Hkv, row_blocks, block);
  return {at.b, unit, at.behind * size};
}

template <int size>
ATTN_EXT_DEVICE BlockPlace place_of_keys(const AttentionParams& p, int64_t key_blocks, int64_t task) {
  const int64_t unit = task / key_blocks, block = task % key_blocks;
  if (p.cu_k == nullptr) return {unit / p.Hkv, unit % p.Hkv, block * size};
  const PackedBlock at = packed_block<size>(p.cu_k, p.batch, 1, key_blocks, block);
  return {at.b, unit, at.before * size};
}

}  // namespace attn_ext::cuda
