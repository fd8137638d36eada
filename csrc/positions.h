// Where things are: element addresses inside a TensorView, the lengths of one sequence, the keys that a row may see by
// position. Plain scalar code, the same for every ISA and on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace attn_ext {

ATTN_EXT_SHARED inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::boolean:
    case DType::int8:
      return 1;
    default:
      return 2;
  }
}

ATTN_EXT_SHARED inline int64_t batch_offset(const TensorView& t, int64_t batch_inner, int64_t b) {
  if (b < batch_inner) return b * t.stride_b1;  // spares two divisions a row in all but 5-D calls
  return b / batch_inner * t.stride_b0 + b % batch_inner * t.stride_b1;
}

// The address of element (b, h, l, d).
ATTN_EXT_SHARED inline char* address(const TensorView& t, int64_t batch_inner, int64_t b, int64_t h, int64_t l,
                                     int64_t d = 0) {
  const int64_t offset = batch_offset(t, batch_inner, b) + h * t.stride_h + l * t.stride_l + d * t.stride_d;
  return static_cast<char*>(t.data) + offset * size_of(t.dtype);
}

template <class T>
ATTN_EXT_SHARED inline T* row_address(const RowView& rows, int64_t b, int64_t h) {
  return static_cast<T*>(rows.data) + b * rows.stride_b + h * rows.stride_h;
}

// A length, position or table entry of a call.
template <class T>
ATTN_EXT_SHARED inline T entry(const T* at) {
  ATTN_EXT_WATCH_READ(at, sizeof(T));
  return *at;
}

ATTN_EXT_SHARED inline uint64_t dropout_seed_of(const AttentionParams& p) {
  return p.dropout_seed_at ? entry(p.dropout_seed_at) : p.dropout_seed;
}

// One entry of the batch: a slice of padded tensors or a packed sequence.
struct Sequence {
  int64_t b = 0;
  int64_t Lq = 0, Lk = 0;
  int64_t q_row = 0, k_row = 0;  // where it starts along L
  int64_t visible_length = 0;    // keys at and past it are hidden
  int64_t diagonal = 0;          // query i is aligned with key i + diagonal
};

// Packed tensors have no batch dim: their view's batch strides are 0 and q_row, k_row do the work.
ATTN_EXT_SHARED inline Sequence sequence_of(const AttentionParams& p, int64_t b) {
  Sequence s;
  s.b = b;
  s.Lq = p.cu_q ? entry(p.cu_q + b + 1) - entry(p.cu_q + b) : p.Lq;
  s.Lk = p.cu_k ? entry(p.cu_k + b + 1) - entry(p.cu_k + b) : p.total_lengths ? entry(p.total_lengths + b) : p.Lk;
  s.q_row = p.cu_q ? entry(p.cu_q + b) : 0;
  s.k_row = p.cu_k ? entry(p.cu_k + b) : 0;
  s.visible_length = p.key_lengths ? std::min(entry(p.key_lengths + b), s.Lk) : s.Lk;
  const int64_t queries = p.row_positions ? p.num_queries : s.Lq;
  s.diagonal = p.causal == Causal::top_left ? 0 : s.Lk - queries;
  return s;
}

// The row of position j of sequence b in a cache (or plain tensor), for one head.
ATTN_EXT_SHARED inline char* cache_row(const CacheLayout& layout, const TensorView& view, int64_t batch_inner,
                                       int64_t b, int64_t h, int64_t j) {
  if (layout.block_table != nullptr) {
    const int64_t block = entry(layout.block_table + b * layout.table_stride + j / layout.page_size);
    const int64_t offset = block * view.stride_b1 + h * view.stride_h + j % layout.page_size * view.stride_l;
    return static_cast<char*>(view.data) + offset * size_of(view.dtype);
  }
  return address(view, batch_inner, b, h, layout.ring > 0 ? j % layout.ring : j);
}

// Calls f(j, count, row) for each run of positions j, j + 1 … of [begin, end) whose rows lie stride_l apart.
template <class F>
ATTN_EXT_SHARED inline void for_each_run(const CacheLayout& layout, const TensorView& view, int64_t batch_inner,
                                         int64_t b, int64_t h, int64_t begin, int64_t end, F&& f) {
  const int64_t period = layout.block_table != nullptr ? layout.page_size : layout.ring;
  for (int64_t j = begin; j < end;) {
    const int64_t stop = period > 0 ? std::min(end, (j / period + 1) * period) : end;
    f(j, stop - j, cache_row(layout, view, batch_inner, b, h, j));
    j = stop;
  }
}

// rows[j - begin] = the row of position j, for j in [begin, end).
ATTN_EXT_SHARED inline void cache_rows(const CacheLayout& layout, const TensorView& view, int64_t batch_inner,
                                       int64_t b, int64_t h, int64_t begin, int64_t end, const char** rows) {
  const int64_t stride = view.stride_l * size_of(view.dtype);
  for_each_run(layout, view, batch_inner, b, h, begin, end, [&](int64_t j, int64_t count, const char* row) {
    for (const int64_t stop = j + count; j < stop; ++j, row += stride) rows[j - begin] = row;
  });
}

// The key that query row i is aligned with.
ATTN_EXT_SHARED inline int64_t aligned_key(const AttentionParams& p, const Sequence& s, int64_t i) {
  return (p.row_positions ? entry(p.row_positions + i) : i) + s.diagonal;
}

// Keys lo ≤ j < hi; empty is lo == hi.
struct KeyRange {
  int64_t lo = 0, hi = 0;

  ATTN_EXT_SHARED bool empty() const { return lo >= hi; }
};

// What causal, window and key length let row i see. Masks and biases hide more, later.
ATTN_EXT_SHARED inline KeyRange visible_keys(const AttentionParams& p, const Sequence& s, int64_t i) {
  const int64_t center = aligned_key(p, s, i);
  KeyRange r{0, s.visible_length};
  if (p.causal != Causal::none) r.hi = std::min(r.hi, center + 1);
  if (p.window_left != kUnbounded) r.lo = std::max(r.lo, center - p.window_left);
  if (p.window_right != kUnbounded) r.hi = std::min(r.hi, center + p.window_right + 1);
  if (r.hi <= r.lo) r = {0, 0};
  return r;
}

}  // namespace attn_ext
