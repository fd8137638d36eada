// From q·k to the score that the softmax sees, one number at a time: what csrc/cpu/generic/scores-inl.h does with vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/primitives.cuh"
#include "params.h"
#include "positions.h"
#include "scores.h"
#include "storage.h"

namespace attn_ext::cuda {

// The storage type of a tensor whose dtype is looked at as it is read.
struct AnyStorage {};

// The number at `at` as T.
template <class T, class Storage>
ATTN_EXT_DEVICE T load_number(const char* at, DType dtype) {
  if constexpr (std::is_same_v<Storage, AnyStorage>) {
    switch (dtype) {
      case DType::bfloat16:
        return convert_from<T>(load_global(reinterpret_cast<const bf16*>(at)));
      case DType::float16:
        return convert_from<T>(load_global(reinterpret_cast<const f16*>(at)));
      case DType::float64:
        return convert_from<T>(load_global(reinterpret_cast<const double*>(at)));
      case DType::int8:
        return convert_from<T>(load_global(reinterpret_cast<const int8_t*>(at)));
      default:
        return convert_from<T>(load_global(reinterpret_cast<const float*>(at)));
    }
  } else {
    return convert_from<T>(load_global(reinterpret_cast<const Storage*>(at)));
  }
}

template <class T>
ATTN_EXT_DEVICE void store_number(char* at, DType dtype, T x) {
  switch (dtype) {
    case DType::bfloat16:
      return store_global(reinterpret_cast<bf16*>(at), convert_to<bf16>(x));
    case DType::float16:
      return store_global(reinterpret_cast<f16*>(at), convert_to<f16>(x));
    case DType::float64:
      return store_global(reinterpret_cast<double*>(at), static_cast<double>(x));
    default:
      return store_global(reinterpret_cast<float*>(at), static_cast<float>(x));
  }
}

// Row r of those that share key/value head hkv: head r / Lq of the group, query r % Lq.
ATTN_EXT_DEVICE ScoreRow stacked_row(const AttentionParams& p, const Sequence& s, int64_t hkv, int64_t r) {
  const int64_t i = r % s.Lq;
  return {s.b, hkv * (p.Hq / p.Hkv) + r / s.Lq, i, visible_keys(p, s, i)};
}

// Where the row of key j lies. Keys outside `seen` are not touched (they may have been overwritten in a ring, or lie in a page
// that was given back): the nearest one inside stands in for them.
ATTN_EXT_DEVICE const char* key_row(const AttentionParams& p, const TensorView& view, const Sequence& s, int64_t hkv,
                                    const KeyRange& seen, int64_t j) {
  j = j < seen.lo ? seen.lo : j >= seen.hi ? seen.hi - 1 : j;
  return cache_row(p.layout, view, p.batch_inner, s.b, hkv, s.k_row + j);
}

// q·k of row and key j, in the units that it is held in. A hidden key gets −Inf whatever q·k was. Where cap_derivative is
// given it receives 1 − tanh², the softcap's derivative, of keys that are seen.
template <class T>
ATTN_EXT_DEVICE T finish_score(const AttentionParams& p, const ScoreUnits<T>& units, const Sequence& sequence,
                               const ScoreRow& row, int64_t j, T x, T* cap_derivative = nullptr) {
  if (j < row.keys.lo || j >= row.keys.hi) return -kInfinity<T>;
  if (p.mask) {
    const char* at = address(p.mask, p.batch_inner, row.b, row.h, row.i, j);
    if (load_global(reinterpret_cast<const uint8_t*>(at)) == 0) return -kInfinity<T>;
  }
  if (!units.scaled) return x;
  x *= units.scale;
  if (p.softcap != 0.0) {
    const T t = std::tanh(x * static_cast<T>(1.0 / p.softcap));
    x = static_cast<T>(p.softcap) * t;
    if (cap_derivative) *cap_derivative = T(1) - t * t;
  }
  for (const TensorView& bias : p.bias) {
    if (!bias) continue;
    const T add = load_number<T, AnyStorage>(address(bias, p.batch_inner, row.b, row.h, row.i, j), bias.dtype);
    if (add == -kInfinity<T>) return -kInfinity<T>;  // hides, even where q·k is NaN, and whatever else is added
    x += add;
  }
  if (p.alibi_slopes) {
    const T slope = static_cast<T>(-load_global(p.alibi_slopes + row.b * p.alibi_stride_b + row.h));
    const int64_t distance = j - aligned_key(p, sequence, row.i);
    x = fma_of(slope, static_cast<T>(distance < 0 ? -distance : distance), x);
  }
  return x;
}

// What a row has come to: out = acc · by.
template <class T>
struct RowEnd {
  T max, sum, by;
};

// Adds the sink to a row's max and sum over its keys.
template <class T>
ATTN_EXT_DEVICE RowEnd<T> end_row(const AttentionParams& p, const ScoreUnits<T>& units, int64_t h, T max, T sum) {
  const T sink = p.sinks ? static_cast<T>(load_global(p.sinks + h)) : -kInfinity<T>;
  const bool without_keys = sum == T(0);
  T factor = 1;
  if (sink != -kInfinity<T>) {
    const T now = Largest()(max, sink);
    factor = max == now ? T(1) : exp2_of((max - now) * units.c);
    sum = sum * factor + (sink == now ? T(1) : exp2_of((sink - now) * units.c));
    max = now;
  }
  // A row without a key stays 0 whatever its sink, a NaN included.
  return {max, sum, without_keys ? T(0) : factor * (T(1) / sum)};
}

// Stores what was asked for of the statistics of row `at` of head h.
template <class T>
ATTN_EXT_DEVICE void store_statistics(const ForwardParams& p, const ScoreUnits<T>& units, int64_t b, int64_t h,
                                      int64_t at, const RowEnd<T>& end) {
  if (p.row_max) store_global(row_address<T>(p.row_max, b, h) + at, end.max);
  if (p.row_sum) store_global(row_address<T>(p.row_sum, b, h) + at, end.sum);
  if (p.lse) {
    const T lse = end.sum == T(0) ? -kInfinity<T> : static_cast<T>(end.max * units.unit + std::log(end.sum));
    store_global(row_address<T>(p.lse, b, h) + at, lse);
  }
}

}  // namespace attn_ext::cuda
