// A call's shapes and options, read and checked before any kernel sees them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "checks.h"
#include "device.h"
#include "params.h"
#include "tensors.h"

namespace attn_ext {

struct Options {
  const OptionalTensor &mask, &bias, &bias2, &alibi_slopes, &sinks, &key_lengths, &cu_seqlens_q, &cu_seqlens_k,
      &dropout_seed;
  int64_t causal;
  std::optional<int64_t> window_left, window_right;
  std::optional<double> scale;
  double softcap, dropout_p;
};

// A call's shape and options, checked. Holds what the params point to.
class Call {
 public:
  const char* op;
  std::array<int64_t, 2> batch{1, 1};  // outer and inner batch dim
  int64_t rank = 0;
  bool packed = false;
  Integers key_lengths, cu_q, cu_k, positions;
  Floats slopes;
  Doubles sinks;

  // v may be null (the weights need none).
  Call(const char* name, const Tensor& q, const Tensor& k, const Tensor* v, AttentionParams& p, bool is_packed = false)
      : op(name), packed(is_packed) {
    check_dtypes(q, k, v);
    rank = q.dim();
    if (packed) {
      ATTN_EXT_EXPECT(rank == 3 && k.dim() == 3 && (!v || v->dim() == 3), op,
                      "packed q, k, v must be (total, H, D), not ", shapes(q, k, v));
    } else {
      ATTN_EXT_EXPECT(rank >= 3 && rank <= kMaxRank, op,
                      "q, k, v must be (H, L, D), (B, H, L, D) or (B1, B2, H, L, D), not ", shapes(q, k, v));
      ATTN_EXT_EXPECT(k.dim() == rank && (!v || v->dim() == rank), op,
                      "q, k, v must have the same number of dimensions, not ", shapes(q, k, v));
      for (int64_t d = 0; d < rank - 3; ++d) {
        ATTN_EXT_EXPECT(q.size(d) == k.size(d) && (!v || q.size(d) == v->size(d)), op,
                        "q, k, v must have the same batch sizes, not ", shapes(q, k, v));
      }
      if (rank > 3) batch[1] = q.size(rank - 4);
      if (rank > 4) batch[0] = q.size(rank - 5);
    }
    expect_addressable("q", q);
    expect_addressable("k", k);
    if (v) expect_addressable("v", *v);
    const int64_t heads = packed ? 1 : rank - 3, length = packed ? 0 : rank - 2, width = rank - 1;
    p.batch = batch[0] * batch[1];
    p.batch_inner = std::max<int64_t>(batch[1], 1);
    p.Hq = q.size(heads);
    p.Hkv = k.size(heads);
    p.Lq = q.size(length);
    p.Lk = k.size(length);
    p.D = q.size(width);
    p.Dv = v ? v->size(width) : 0;
    ATTN_EXT_EXPECT(k.size(width) == p.D, op, "q and k must have the same head dim, not ", p.D, " and ", k.size(width),
                    ": ", shapes(q, k, v));
    ATTN_EXT_EXPECT(p.D > 0, op, "the head dim of q and k must be at least 1: ", shapes(q, k, v));
    if (v) {
      ATTN_EXT_EXPECT(v->size(heads) == p.Hkv, op, "k and v must have the same number of heads, not ", p.Hkv, " and ",
                      v->size(heads), ": ", shapes(q, k, v));
      ATTN_EXT_EXPECT(v->size(length) == p.Lk, op, "k and v must have the same length, not ", p.Lk, " and ",
                      v->size(length), ": ", shapes(q, k, v));
    }
    ATTN_EXT_EXPECT(p.Hkv > 0 ? p.Hq % p.Hkv == 0 : p.Hq == 0, op, "the ", p.Hq,
                    " heads of q must be a multiple of the heads of k and v, which are ", p.Hkv, ": ", shapes(q, k, v));
    p.num_queries = p.Lq;
    p.q = view(q);
    p.k = view(k);
    if (v) p.v = view(*v);
    p.scale = 1.0 / std::sqrt(static_cast<double>(p.D));
  }

  TensorView view(const Tensor& t) const { return packed ? packed_view_of(t) : view_of(t); }

  void set_causal(int64_t causal, std::optional<double> scale, AttentionParams& p) const {
    ATTN_EXT_EXPECT(causal >= 0 && causal <= 2, op, "causal must be 0 (off), 1 (top-left) or 2 (bottom-right), not ",
                    causal);
    p.causal = static_cast<Causal>(causal);
    if (scale) {
      ATTN_EXT_EXPECT(std::isfinite(*scale), op, "scale must be finite, not ", *scale);
      ATTN_EXT_EXPECT(std::fabs(*scale) <= 0.5 * largest(p), op, "scale must fit the dtype of the scores, which ",
                      *scale, " does not");
      p.scale = *scale;
    }
  }

  void set_options(const Options& o, AttentionParams& p) {
    set_causal(o.causal, o.scale, p);
    if (packed) {
      ATTN_EXT_EXPECT(!o.mask && !o.bias && !o.bias2 && !o.key_lengths, op,
                      "packed sequences take no mask, bias or key_lengths");
      set_packed(o, p);
    } else {
      ATTN_EXT_EXPECT(!o.cu_seqlens_q && !o.cu_seqlens_k, op, "cu_seqlens_q and cu_seqlens_k must be given together");
    }
    set_scores(o, p);
    if (o.mask) {
      ATTN_EXT_EXPECT(o.mask->scalar_type() == ScalarType::Bool, op, "mask must be bool (True = attend), not ",
                      dtype_name(o.mask->scalar_type()));
      p.mask = broadcast_view("mask", *o.mask, p);
    }
    const OptionalTensor* biases[kMaxBiases] = {&o.bias, &o.bias2};
    for (int n = 0; n < kMaxBiases; ++n) {
      if (!*biases[n]) continue;
      ATTN_EXT_EXPECT(is_float((*biases[n])->scalar_type()), op, "bias must be a float tensor, not ",
                      dtype_name((*biases[n])->scalar_type()));
      p.bias[n] = broadcast_view("bias", **biases[n], p);
    }
    if (o.key_lengths) {
      expect_here(op, "key_lengths", *o.key_lengths);
      ATTN_EXT_EXPECT(o.key_lengths->dim() == 1 && o.key_lengths->size(0) == p.batch, op,
                      "key_lengths must have one entry for each of the ", p.batch, " batch entries, not shape ",
                      shape_string(*o.key_lengths));
      expect_integers(op, "key_lengths", *o.key_lengths);
      key_lengths = read_lengths(op, *o.key_lengths, p.Lk);
      p.key_lengths = key_lengths.data();
    }
    ATTN_EXT_EXPECT(o.dropout_p >= 0 && o.dropout_p <= 1, op, "dropout_p must lie between 0 and 1, not be ",
                    o.dropout_p);
    if (o.dropout_p > 0) set_dropout(o, p);
  }

  // What the scores go through, and the keys that are seen by position.
  void set_scores(const Options& o, AttentionParams& p) {
    p.window_left = window("window_left", o.window_left);
    p.window_right = window("window_right", o.window_right);
    ATTN_EXT_EXPECT(std::isfinite(o.softcap) && o.softcap >= 0, op,
                    "softcap must be 0 (off) or a positive number, not ", o.softcap);
    ATTN_EXT_EXPECT(o.softcap == 0 || (o.softcap <= largest(p) && 1.0 / o.softcap <= largest(p)), op,
                    "softcap and its inverse must fit the dtype of the scores, which ", o.softcap, " does not");
    p.softcap = o.softcap;
    if (o.alibi_slopes) set_slopes(*o.alibi_slopes, p);
    if (o.sinks) set_sinks(*o.sinks, p);
  }

  std::string target_shape(const AttentionParams& p) const {
    std::string text = "(";
    if (rank > 4) text += std::to_string(batch[0]) + ", ";
    if (rank > 3) text += std::to_string(batch[1]) + ", ";
    return text + std::to_string(p.Hq) + ", " + std::to_string(p.Lq) + ", " + std::to_string(p.Lk) + ")";
  }

  // The dims of a tensor that broadcasts to (B0, B1, Hq, Lq, Lk), with leading ones.
  static std::array<int64_t, 5> leading_ones(const Tensor& t) {
    std::array<int64_t, 5> sizes{1, 1, 1, 1, 1};
    for (int64_t d = 0; d < t.dim(); ++d) sizes[static_cast<size_t>(5 - t.dim() + d)] = t.size(d);
    return sizes;
  }

  static std::string shapes(const Tensor& q, const Tensor& k, const Tensor* v) {
    return "q " + shape_string(q) + ", k " + shape_string(k) + (v ? ", v " + shape_string(*v) : "");
  }

  // A tensor expanded with stride 0 may claim more elements than any memory holds. Bounded, no product of sizes that is
  // formed further down can overflow.
  void expect_addressable(const char* name, const Tensor& t) const {
    double elements = 1;
    for (int64_t d = 0; d < t.dim(); ++d) elements *= static_cast<double>(std::max<int64_t>(t.size(d), 1));
    ATTN_EXT_EXPECT(elements <= kMaxElements, op, name, " ", shape_string(t), " has more than 2^45 elements");
  }

 protected:
  explicit Call(const char* name) : op(name) {}

  void check_dtypes(const Tensor& q, const Tensor& k, const Tensor* v) const {
    expect_here(op, "q", q);
    expect_here(op, "k", k);
    if (v) expect_here(op, "v", *v);
    const ScalarType type = q.scalar_type();
    const bool same = type == k.scalar_type() && (!v || type == v->scalar_type());
    ATTN_EXT_EXPECT(same && is_float(type), op,
                    "q, k, v must have one dtype out of float32, bfloat16, float16 and float64, not ",
                    dtype_name(q.scalar_type()), ", ", dtype_name(k.scalar_type()), v ? ", " : "",
                    v ? dtype_name(v->scalar_type()) : "");
  }

  // Of the numbers that scores are held in.
  static double largest(const AttentionParams& p) {
    return p.q.dtype == DType::float64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  }

  int64_t window(const char* name, std::optional<int64_t> size) const {
    if (!size) return kUnbounded;
    ATTN_EXT_EXPECT(*size >= 0, op, name, " must be at least 0, or None for no bound, not ", *size);
    return std::min<int64_t>(*size, int64_t{1} << 40);
  }

  TensorView broadcast_view(const char* name, const Tensor& t, const AttentionParams& p) const {
    expect_here(op, name, t);
    ATTN_EXT_EXPECT(t.dim() <= rank, op, name, " ", shape_string(t), " must broadcast to ", target_shape(p));
    const std::array<int64_t, 5> sizes = leading_ones(t), target{batch[0], batch[1], p.Hq, p.Lq, p.Lk};
    std::array<int64_t, 5> strides{};
    for (size_t d = 0; d < 5; ++d) {
      ATTN_EXT_EXPECT(sizes[d] == target[d] || sizes[d] == 1, op, name, " ", shape_string(t), " must broadcast to ",
                      target_shape(p));
      const int64_t own = static_cast<int64_t>(d) - (5 - t.dim());
      if (own >= 0 && sizes[d] != 1) strides[d] = t.stride(own);
    }
    TensorView v;
    v.data = t.data_ptr();
    // An empty tensor has no data, and no element of it is read; the view must still count as given.
    static char nothing;
    if (v.data == nullptr) v.data = &nothing;
    v.dtype = dtype_of(t.scalar_type());
    v.stride_b0 = strides[0];
    v.stride_b1 = strides[1];
    v.stride_h = strides[2];
    v.stride_l = strides[3];
    v.stride_d = strides[4];
    return v;
  }

  void set_packed(const Options& o, AttentionParams& p) {
    const Tensor &of_q = *o.cu_seqlens_q, &of_k = *o.cu_seqlens_k;
    cu_q = boundaries("cu_seqlens_q", of_q, "q", p.Lq);
    cu_k = boundaries("cu_seqlens_k", of_k, "k", p.Lk);
    ATTN_EXT_EXPECT(of_q.size(0) == of_k.size(0), op,
                    "cu_seqlens_q and cu_seqlens_k must describe as many sequences, not ", of_q.size(0) - 1, " and ",
                    of_k.size(0) - 1);
    p.batch = of_q.size(0) - 1;
    p.batch_inner = std::max<int64_t>(p.batch, 1);
    p.total_q = p.Lq;
    p.total_k = p.Lk;
    p.Lq = longest(cu_q, p.total_q);
    p.Lk = longest(cu_k, p.total_k);
    p.cu_q = cu_q.data();
    p.cu_k = cu_k.data();
  }

  Integers boundaries(const char* name, const Tensor& t, const char* of, int64_t total) const {
    expect_here(op, name, t);
    expect_integers(op, name, t);
    ATTN_EXT_EXPECT(t.size(0) > 0, op, name, " must hold one more entry than there are sequences, not none");
    return read_boundaries(op, name, t, of, total);
  }

  void set_slopes(const Tensor& t, AttentionParams& p) {
    expect_here(op, "alibi_slopes", t);
    const bool each = t.dim() == 2;
    ATTN_EXT_EXPECT(t.scalar_type() == ScalarType::Float, op, "alibi_slopes must be float32, not ",
                    dtype_name(t.scalar_type()));
    ATTN_EXT_EXPECT((t.dim() == 1 || each) && t.size(t.dim() - 1) == p.Hq && (!each || t.size(0) == p.batch), op,
                    "alibi_slopes must be (", p.Hq, ",) or (", p.batch, ", ", p.Hq, "), one slope a head, not ",
                    shape_string(t));
    slopes = read_slopes(t);
    p.alibi_slopes = slopes.data();
    p.alibi_stride_b = each ? p.Hq : 0;
  }

  void set_sinks(const Tensor& t, AttentionParams& p) {
    expect_here(op, "sinks", t);
    ATTN_EXT_EXPECT(is_float(t.scalar_type()), op, "sinks must be a float tensor, not ", dtype_name(t.scalar_type()));
    ATTN_EXT_EXPECT(t.dim() == 1 && t.size(0) == p.Hq, op, "sinks must be (", p.Hq, ",), one logit a head, not ",
                    shape_string(t));
    sinks = read_sinks(t);
    p.sinks = sinks.data();
  }

  void set_dropout(const Options& o, AttentionParams& p) const {
    ATTN_EXT_EXPECT(o.dropout_seed.has_value(), op, "dropout_p > 0 needs a dropout_seed");
    const Tensor& seed = *o.dropout_seed;
    expect_here(op, "dropout_seed", seed);
    ATTN_EXT_EXPECT(seed.numel() == 1 && seed.scalar_type() == ScalarType::Long, op,
                    "dropout_seed must be one int64 number, not ", dtype_name(seed.scalar_type()), " ",
                    shape_string(seed));
    p.dropout = true;
    set_seed(seed, p);
    p.dropout_threshold = static_cast<uint32_t>(std::nearbyint(o.dropout_p * 65536.0));
    p.dropout_scale = p.dropout_threshold == 65536 ? 0.0 : 65536.0 / (65536.0 - p.dropout_threshold);
  }
};

}  // namespace attn_ext
