// Where things are: element addresses inside a TensorView, the lengths of one sequence, the keys that a row may see by
// position. Plain scalar code, the same for every ISA.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace attn_ext::cpu {

inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::boolean:
      return 1;
    default:
      return 2;
  }
}

inline int64_t batch_offset(const TensorView& t, int64_t batch_inner, int64_t b) {
  if (b < batch_inner) return b * t.stride_b1;  // spares two divisions a row in all but 5-D calls
  return b / batch_inner * t.stride_b0 + b % batch_inner * t.stride_b1;
}

// The address of element (b, h, l, d).
inline char* address(const TensorView& t, int64_t batch_inner, int64_t b, int64_t h, int64_t l, int64_t d = 0) {
  const int64_t offset = batch_offset(t, batch_inner, b) + h * t.stride_h + l * t.stride_l + d * t.stride_d;
  return static_cast<char*>(t.data) + offset * size_of(t.dtype);
}

template <class T>
inline T* row_address(const RowView& rows, int64_t b, int64_t h) {
  return static_cast<T*>(rows.data) + b * rows.stride_b + h * rows.stride_h;
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
inline Sequence sequence_of(const AttentionParams& p, int64_t b) {
  Sequence s;
  s.b = b;
  s.Lq = p.cu_q ? p.cu_q[b + 1] - p.cu_q[b] : p.Lq;
  s.Lk = p.cu_k ? p.cu_k[b + 1] - p.cu_k[b] : p.Lk;
  s.q_row = p.cu_q ? p.cu_q[b] : 0;
  s.k_row = p.cu_k ? p.cu_k[b] : 0;
  s.visible_length = p.key_lengths ? std::min(p.key_lengths[b], s.Lk) : s.Lk;
  const int64_t queries = p.row_positions ? p.num_queries : s.Lq;
  s.diagonal = p.causal == Causal::top_left ? 0 : s.Lk - queries;
  return s;
}

// The key that query row i is aligned with.
inline int64_t aligned_key(const AttentionParams& p, const Sequence& s, int64_t i) {
  return (p.row_positions ? p.row_positions[i] : i) + s.diagonal;
}

// Keys lo ≤ j < hi; empty is lo == hi.
struct KeyRange {
  int64_t lo = 0, hi = 0;

  bool empty() const { return lo >= hi; }
};

// What causal, window and key length let row i see. Masks and biases hide more, later.
inline KeyRange visible_keys(const AttentionParams& p, const Sequence& s, int64_t i) {
  const int64_t center = aligned_key(p, s, i);
  KeyRange r{0, s.visible_length};
  if (p.causal != Causal::none) r.hi = std::min(r.hi, center + 1);
  if (p.window_left != kUnbounded) r.lo = std::max(r.lo, center - p.window_left);
  if (p.window_right != kUnbounded) r.hi = std::min(r.hi, center + p.window_right + 1);
  if (r.hi <= r.lo) r = {0, 0};
  return r;
}

}  // namespace attn_ext::cpu
