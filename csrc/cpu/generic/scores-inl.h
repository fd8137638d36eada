// From q·k to the scores that the softmax sees: scale, softcap, biases, ALiBi, masks. Forward, backward and the weights
// all come through here, so the three see the same bits.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// A stretch of scores of one row: x[j − start] for keys j in [from, to), both multiples of the vector width from
// start on. Keys at and past `end` are padding.
struct Stretch {
  int64_t start = 0, from = 0, to = 0, end = 0;
};

// Room for one row of a converted mask or bias.
template <class T>
struct RowBuffers {
  T* numbers = nullptr;      // [key block]
  uint8_t* bytes = nullptr;  // [key block]
};

// Bytes the mask holds for keys [s.from, s.to), at [j − s.start]: in place where that reads nothing outside the tensor.
template <class T>
inline const uint8_t* mask_row(const AttentionParams& p, const ScoreRow& row, const Stretch& s, uint8_t* buffer) {
  const char* src = address(p.mask, p.batch_inner, row.b, row.h, row.i);
  const auto* bytes = reinterpret_cast<const uint8_t*>(src);
  if (p.mask.stride_d == 1 && s.to <= s.end) return bytes + s.start;
  for (int64_t j = s.from; j < std::min(s.to, s.end); ++j) buffer[j - s.start] = bytes[j * p.mask.stride_d];
  return buffer;
}

// Numbers the bias holds for keys [s.from, s.to), likewise.
template <class T>
inline const T* bias_row(const AttentionParams& p, const TensorView& bias, const ScoreRow& row, const Stretch& s,
                         T* buffer) {
  const char* src = address(bias, p.batch_inner, row.b, row.h, row.i);
  constexpr DType same = sizeof(T) == 4 ? DType::float32 : DType::float64;
  if (bias.dtype == same && bias.stride_d == 1 && s.to <= s.end) return reinterpret_cast<const T*>(src) + s.start;
  with_storage(bias.dtype, [&]<class Storage>(Storage*) {
    copy_row<T>(reinterpret_cast<const Storage*>(src) + s.from * bias.stride_d, bias.stride_d,
                std::min(s.to, s.end) - s.from, buffer + (s.from - s.start));
  });
  return buffer;
}

// Turns q·k of keys [s.from, s.to) into scores in place: x[j − s.start]. Hidden keys get −Inf whatever they held.
// Where cap_derivative is given it receives 1 − tanh², the softcap's derivative.
template <class T>
inline void finish_scores(const AttentionParams& p, const ScoreUnits<T>& units, const Sequence& sequence,
                          const ScoreRow& row, const Stretch& s, const RowBuffers<T>& buffers, T* x,
                          T* cap_derivative = nullptr) {
  using V = Vec<T>;
  const int64_t from = s.from - s.start, to = s.to - s.start;
  const V minus_infinity = V::broadcast(-kInfinity<T>);
  if (units.scaled) {
    const V scale = V::broadcast(units.scale);
    for (int64_t j = from; j < to; j += V::N) (V::load(x + j) * scale).store(x + j);
    if (p.softcap != 0.0) {
      const V cap = V::broadcast(static_cast<T>(p.softcap)), inverse = V::broadcast(static_cast<T>(1.0 / p.softcap));
      for (int64_t j = from; j < to; j += V::N) {
        const V t = tanh<T>(V::load(x + j) * inverse);
        (cap * t).store(x + j);
        if (cap_derivative) (V::broadcast(T(1)) - t * t).store(cap_derivative + j);
      }
    }
    // A bias of −Inf hides, even where q·k is NaN, and whatever else is added: with several things to add, in the end.
    const bool hide_at_end = p.bias[1] || p.alibi_slopes;
    for (const TensorView& bias : p.bias) {
      if (!bias) continue;
      const T* numbers = bias_row<T>(p, bias, row, s, buffers.numbers);
      for (int64_t j = from; j < to; j += V::N) {
        const V add = V::load(numbers + j);
        const V sum = V::load(x + j) + add;
        (hide_at_end ? sum : V::select(V::equal(add, minus_infinity), minus_infinity, sum)).store(x + j);
      }
    }
    if (p.alibi_slopes) {
      const V slope = V::broadcast(static_cast<T>(-p.alibi_slopes[row.b * p.alibi_stride_b + row.h]));
      V distance = V::iota() + V::broadcast(static_cast<T>(s.from - aligned_key(p, sequence, row.i)));
      for (int64_t j = from; j < to; j += V::N) {
        V::fma(slope, V::abs(distance), V::load(x + j)).store(x + j);
        distance = distance + V::broadcast(T(V::N));
      }
    }
    if (hide_at_end) {
      for (const TensorView& bias : p.bias) {
        if (!bias) continue;
        const T* numbers = bias_row<T>(p, bias, row, s, buffers.numbers);
        for (int64_t j = from; j < to; j += V::N) {
          V::select(V::equal(V::load(numbers + j), minus_infinity), minus_infinity, V::load(x + j)).store(x + j);
        }
      }
    }
  }
  if (p.mask) {
    const uint8_t* bytes = mask_row<T>(p, row, s, buffers.bytes);
    for (int64_t j = from; j < to; j += V::N) {
      V::select(V::nonzero_bytes(bytes + j), V::load(x + j), minus_infinity).store(x + j);
    }
  }
  const int64_t lo = std::clamp(row.keys.lo, s.from, s.to), hi = std::clamp(row.keys.hi, lo, s.to);
  std::fill(x + from, x + (lo - s.start), -kInfinity<T>);
  std::fill(x + (hi - s.start), x + to, -kInfinity<T>);
}

// Writes to keep[0 … count) whether the weights of keys first … of row (b, h, i) stay. `first` is a multiple of 8 and
// keep has room for count rounded up to 8.
inline void dropout_keep(uint64_t seed, uint32_t threshold, int64_t b, int64_t h, int64_t i, int64_t first,
                         int64_t count, uint8_t* keep) {
  for (int64_t j = 0; j < count; j += 8) {
    const uint32_t kept = dropout_kept(seed, threshold, b, h, i, first + j);
    for (int e = 0; e < 8; ++e) keep[j + e] = static_cast<uint8_t>(kept >> e & 1u);
  }
}

// Whether the mask hides every key of [first, first + count) from every row of batch entry b: only asked of masks that
// do not vary over heads and rows (padding masks), where the answer saves a whole key block.
inline bool padding_mask_hides_all(const AttentionParams& p, int64_t b, int64_t first, int64_t count) {
  if (!p.mask || p.mask.stride_h != 0 || p.mask.stride_l != 0) return false;
  const auto* bytes = reinterpret_cast<const uint8_t*>(address(p.mask, p.batch_inner, b, 0, 0));
  for (int64_t j = first; j < first + count; ++j) {
    if (bytes[j * p.mask.stride_d]) return false;
  }
  return true;
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
