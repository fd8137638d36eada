// Tensor → params → kernel table: checks what came, allocates what goes back, fills the plain structs.
#include "attention.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/problem.h"
#include "cpu/storage.h"
#include "params.h"
#include "torch_parallel.h"

namespace attn_ext {
namespace {

constexpr int kMaxRank = 5;

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return DType::bfloat16;
    case ScalarType::Half:
      return DType::float16;
    case ScalarType::Double:
      return DType::float64;
    case ScalarType::Bool:
      return DType::boolean;
    default:
      return DType::float32;
  }
}

// Row statistics, and everything that is summed, are kept in this dtype.
ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// (…, H, L, D) as a view; `rank` is that of the call's q, so that missing leading dims are broadcast.
TensorView view_of(const Tensor& t) {
  TensorView v;
  const auto strides = t.strides();
  const size_t rank = strides.size();
  v.data = t.data_ptr();
  v.dtype = dtype_of(t.scalar_type());
  v.stride_d = strides[rank - 1];
  v.stride_l = strides[rank - 2];
  v.stride_h = strides[rank - 3];
  if (rank > 3) v.stride_b1 = strides[rank - 4];
  if (rank > 4) v.stride_b0 = strides[rank - 5];
  return v;
}

// A packed tensor (total, H, D).
TensorView packed_view_of(const Tensor& t) {
  TensorView v;
  v.data = t.data_ptr();
  v.dtype = dtype_of(t.scalar_type());
  v.stride_l = t.stride(0);
  v.stride_h = t.stride(1);
  v.stride_d = t.stride(2);
  return v;
}

constexpr double kMaxElements = 35184372088832.0;  // 2^45: 128 TiB of float32

// The numbers of a small integer tensor.
std::vector<int64_t> integers(const char* op, const char* name, const Tensor& t) {
  expect_cpu(op, name, t);
  ATTN_EXT_EXPECT(t.dim() == 1, op, name, " must have one dimension, not shape ", shape_string(t));
  const ScalarType type = t.scalar_type();
  ATTN_EXT_EXPECT(type == ScalarType::Int || type == ScalarType::Long, op, name, " must be int32 or int64, not ",
                  dtype_name(type));
  std::vector<int64_t> numbers(static_cast<size_t>(t.size(0)));
  const int64_t stride = t.stride(0);
  const void* data = t.data_ptr();
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * stride;
    numbers[i] =
        type == ScalarType::Int ? static_cast<const int32_t*>(data)[at] : static_cast<const int64_t*>(data)[at];
  }
  return numbers;
}

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
  std::vector<int64_t> key_lengths, cu_q, cu_k, positions;
  std::vector<float> slopes;
  std::vector<double> sinks;

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
    p.window_left = window("window_left", o.window_left);
    p.window_right = window("window_right", o.window_right);
    ATTN_EXT_EXPECT(std::isfinite(o.softcap) && o.softcap >= 0, op,
                    "softcap must be 0 (off) or a positive number, not ", o.softcap);
    ATTN_EXT_EXPECT(o.softcap == 0 || (o.softcap <= largest(p) && 1.0 / o.softcap <= largest(p)), op,
                    "softcap and its inverse must fit the dtype of the scores, which ", o.softcap, " does not");
    p.softcap = o.softcap;
    if (packed) {
      ATTN_EXT_EXPECT(!o.mask && !o.bias && !o.bias2 && !o.key_lengths, op,
                      "packed sequences take no mask, bias or key_lengths");
      set_packed(o, p);
    } else {
      ATTN_EXT_EXPECT(!o.cu_seqlens_q && !o.cu_seqlens_k, op, "cu_seqlens_q and cu_seqlens_k must be given together");
    }
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
    if (o.alibi_slopes) set_slopes(*o.alibi_slopes, p);
    if (o.sinks) set_sinks(*o.sinks, p);
    if (o.key_lengths) {
      ATTN_EXT_EXPECT(o.key_lengths->dim() == 1 && o.key_lengths->size(0) == p.batch, op,
                      "key_lengths must have one entry for each of the ", p.batch, " batch entries, not shape ",
                      shape_string(*o.key_lengths));
      key_lengths = integers(op, "key_lengths", *o.key_lengths);
      for (size_t b = 0; b < key_lengths.size(); ++b) {
        ATTN_EXT_EXPECT(key_lengths[b] >= 0 && key_lengths[b] <= p.Lk, op, "key_lengths[", b,
                        "] must lie between 0 and the ", p.Lk, " keys, not be ", key_lengths[b]);
      }
      p.key_lengths = key_lengths.data();
    }
    ATTN_EXT_EXPECT(o.dropout_p >= 0 && o.dropout_p <= 1, op, "dropout_p must lie between 0 and 1, not be ",
                    o.dropout_p);
    if (o.dropout_p > 0) set_dropout(o, p);
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

 private:
  void check_dtypes(const Tensor& q, const Tensor& k, const Tensor* v) const {
    expect_cpu(op, "q", q);
    expect_cpu(op, "k", k);
    if (v) expect_cpu(op, "v", *v);
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
    expect_cpu(op, name, t);
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
    cu_q = boundaries("cu_seqlens_q", *o.cu_seqlens_q, "q", p.Lq);
    cu_k = boundaries("cu_seqlens_k", *o.cu_seqlens_k, "k", p.Lk);
    ATTN_EXT_EXPECT(cu_q.size() == cu_k.size(), op,
                    "cu_seqlens_q and cu_seqlens_k must describe as many sequences, not ", cu_q.size() - 1, " and ",
                    cu_k.size() - 1);
    p.batch = static_cast<int64_t>(cu_q.size()) - 1;
    p.batch_inner = std::max<int64_t>(p.batch, 1);
    p.Lq = longest(cu_q);
    p.Lk = longest(cu_k);
    p.cu_q = cu_q.data();
    p.cu_k = cu_k.data();
  }

  std::vector<int64_t> boundaries(const char* name, const Tensor& t, const char* of, int64_t total) const {
    std::vector<int64_t> cu = integers(op, name, t);
    ATTN_EXT_EXPECT(!cu.empty(), op, name, " must hold one more entry than there are sequences, not none");
    ATTN_EXT_EXPECT(cu.front() == 0, op, name, " must start with 0, not with ", cu.front());
    for (size_t b = 1; b < cu.size(); ++b) {
      ATTN_EXT_EXPECT(cu[b] >= cu[b - 1], op, name, " must not fall, but entry ", b, " is ", cu[b], " after ",
                      cu[b - 1]);
    }
    ATTN_EXT_EXPECT(cu.back() == total, op, name, " must end with the ", total, " rows of ", of, ", not with ",
                    cu.back());
    return cu;
  }

  static int64_t longest(const std::vector<int64_t>& cu) {
    int64_t length = 0;
    for (size_t b = 1; b < cu.size(); ++b) length = std::max(length, cu[b] - cu[b - 1]);
    return length;
  }

  void set_slopes(const Tensor& t, AttentionParams& p) {
    expect_cpu(op, "alibi_slopes", t);
    const bool each = t.dim() == 2;
    ATTN_EXT_EXPECT(t.scalar_type() == ScalarType::Float, op, "alibi_slopes must be float32, not ",
                    dtype_name(t.scalar_type()));
    ATTN_EXT_EXPECT((t.dim() == 1 || each) && t.size(t.dim() - 1) == p.Hq && (!each || t.size(0) == p.batch), op,
                    "alibi_slopes must be (", p.Hq, ",) or (", p.batch, ", ", p.Hq, "), one slope a head, not ",
                    shape_string(t));
    const int64_t rows = each ? p.batch : 1;
    const auto* data = static_cast<const float*>(t.data_ptr());
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t h = 0; h < p.Hq; ++h) {
        slopes.push_back(data[(each ? b * t.stride(0) : 0) + h * t.stride(t.dim() - 1)]);
      }
    }
    p.alibi_slopes = slopes.data();
    p.alibi_stride_b = each ? p.Hq : 0;
  }

  void set_sinks(const Tensor& t, AttentionParams& p) {
    expect_cpu(op, "sinks", t);
    ATTN_EXT_EXPECT(is_float(t.scalar_type()), op, "sinks must be a float tensor, not ", dtype_name(t.scalar_type()));
    ATTN_EXT_EXPECT(t.dim() == 1 && t.size(0) == p.Hq, op, "sinks must be (", p.Hq, ",), one logit a head, not ",
                    shape_string(t));
    for (int64_t h = 0; h < p.Hq; ++h) sinks.push_back(number_at(t, h * t.stride(0)));
    p.sinks = sinks.data();
  }

  static double number_at(const Tensor& t, int64_t offset) {
    switch (t.scalar_type()) {
      case ScalarType::Double:
        return static_cast<const double*>(t.data_ptr())[offset];
      case ScalarType::BFloat16:
        return to_float(static_cast<const cpu::bf16*>(t.data_ptr())[offset]);
      case ScalarType::Half:
        return to_float(static_cast<const cpu::f16*>(t.data_ptr())[offset]);
      default:
        return static_cast<const float*>(t.data_ptr())[offset];
    }
  }

  void set_dropout(const Options& o, AttentionParams& p) const {
    ATTN_EXT_EXPECT(o.dropout_seed.has_value(), op, "dropout_p > 0 needs a dropout_seed");
    const Tensor& seed = *o.dropout_seed;
    expect_cpu(op, "dropout_seed", seed);
    ATTN_EXT_EXPECT(seed.numel() == 1 && seed.scalar_type() == ScalarType::Long, op,
                    "dropout_seed must be one int64 number, not ", dtype_name(seed.scalar_type()), " ",
                    shape_string(seed));
    p.dropout = true;
    p.dropout_seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.data_ptr()));
    p.dropout_threshold = static_cast<uint32_t>(std::nearbyint(o.dropout_p * 65536.0));
    p.dropout_scale = p.dropout_threshold == 65536 ? 0.0 : 65536.0 / (65536.0 - p.dropout_threshold);
  }
};

Tensor empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, ScalarType type) {
  AtenTensorHandle handle = nullptr;
  // The stable ABI's own number for the dtype.
  const StableIValue dtype = torch::stable::detail::from(type);
  const AOTITorchError error = aoti_torch_empty_strided(rank, sizes, strides, static_cast<int32_t>(dtype),
                                                        aoti_torch_device_type_cpu(), 0, &handle);
  if (error != AOTI_TORCH_SUCCESS) throw std::bad_alloc();  // all else about the call is right
  return Tensor(handle);
}

void set_number(const Tensor& t, int64_t offset, double x) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      static_cast<double*>(t.data_ptr())[offset] = x;
      break;
    case ScalarType::BFloat16:
      static_cast<cpu::bf16*>(t.data_ptr())[offset] = cpu::to_bf16(static_cast<float>(x));
      break;
    case ScalarType::Half:
      static_cast<cpu::f16*>(t.data_ptr())[offset] = cpu::to_f16(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(t.data_ptr())[offset] = static_cast<float>(x);
  }
}

Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), type);
}

// Fills a dense tensor with zeros, without torch's thread pool: that one hangs in a forked child.
Tensor zeroed(Tensor t) {
  if (t.numel() > 0)
    std::memset(t.data_ptr(), 0, static_cast<size_t>(t.numel() * cpu::size_of(dtype_of(t.scalar_type()))));
  return t;
}

Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) { return zeroed(empty(sizes, type)); }

std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return sizes;
}

// A dense tensor of `like`'s sizes, the last one replaced by `width`, whose dims lie in memory in the order in which
// like's do. A dim of size 1 or stride 0 says nothing about the order and stays left of its right neighbour.
// ops.py has the same rule for fake tensors.
Tensor empty_in_order_of(const Tensor& like, int64_t width) {
  const auto like_sizes = like.sizes(), like_strides = like.strides();
  const size_t rank = like_sizes.size();
  std::array<int64_t, kMaxRank> sizes{}, strides{}, key{};
  std::array<size_t, kMaxRank> order{};  // innermost first
  for (size_t n = 0; n < rank; ++n) {
    const size_t d = rank - 1 - n;
    const bool tells = like_sizes[d] > 1 && like_strides[d] != 0;
    key[d] = tells ? like_strides[d] : (n > 0 ? key[d + 1] : 0);
    sizes[d] = n > 0 ? like_sizes[d] : width;
    size_t at = n;  // insertion: behind all with a key no larger
    for (; at > 0 && key[order[at - 1]] > key[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t stride = 1;
  for (size_t n = 0; n < rank; ++n) {
    strides[order[n]] = stride;
    stride *= std::max<int64_t>(sizes[order[n]], 1);
  }
  return empty_strided(static_cast<int64_t>(rank), sizes.data(), strides.data(), like.scalar_type());
}

Tensor zeros_in_order_of(const Tensor& like, int64_t width) { return zeroed(empty_in_order_of(like, width)); }

// (…, Hq, Lq), or (Hq, total) for packed calls.
std::vector<int64_t> statistics_sizes(const Call& call, const Tensor& q) {
  if (call.packed) return {q.size(1), q.size(0)};
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.pop_back();
  return sizes;
}

RowView row_view_of(const Call& call, const AttentionParams& p, const Tensor& t) {
  RowView rows;
  rows.data = t.data_ptr();
  rows.stride_h = call.packed ? t.size(1) : p.Lq;
  rows.stride_b = call.packed ? 0 : p.Hq * p.Lq;
  return rows;
}

// A contiguous copy, likewise without torch's thread pool.
Tensor contiguous_rows(const Tensor& t) {
  const std::vector<int64_t> sizes = sizes_of(t);
  Tensor copy = empty(sizes, t.scalar_type());
  const auto element = static_cast<size_t>(cpu::size_of(dtype_of(t.scalar_type())));
  const auto* from = static_cast<const char*>(t.data_ptr());
  auto* to = static_cast<char*>(copy.data_ptr());
  std::vector<int64_t> index(sizes.size());
  for (int64_t n = 0, total = copy.numel(); n < total; ++n, to += element) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * t.stride(static_cast<int64_t>(d));
    std::memcpy(to, from + offset * static_cast<int64_t>(element), element);
    for (size_t d = index.size(); d-- > 0 && ++index[d] == sizes[d];) index[d] = 0;
  }
  return copy;
}

// Statistics that came in: of the right dtype and shape, contiguous.
Tensor checked_statistics(const Call& call, const Tensor& q, const char* name, const Tensor& t) {
  expect_cpu(call.op, name, t);
  ATTN_EXT_EXPECT(t.scalar_type() == statistics_dtype(q), call.op, name, " must be ", dtype_name(statistics_dtype(q)),
                  ", not ", dtype_name(t.scalar_type()));
  const std::vector<int64_t> sizes = statistics_sizes(call, q);
  ATTN_EXT_EXPECT(sizes_of(t) == sizes, call.op, name, " must have one number a row of q ", shape_string(q),
                  ", not shape ", shape_string(t));
  return t.is_contiguous() ? t : contiguous_rows(t);
}

// Whether there is any row to compute.
bool has_rows(const AttentionParams& p) { return p.batch > 0 && p.Hq > 0 && p.Lq > 0; }

void check_like(const Call& call, const char* name, const Tensor& t, const Tensor& q, int64_t width) {
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.back() = width;
  expect_cpu(call.op, name, t);
  ATTN_EXT_EXPECT(sizes_of(t) == sizes, call.op, name, " must have the shape of the output for q ", shape_string(q),
                  " and a value head dim of ", width, ", not ", shape_string(t));
  ATTN_EXT_EXPECT(t.scalar_type() == q.scalar_type(), call.op, name, " must be ", dtype_name(q.scalar_type()), ", not ",
                  dtype_name(t.scalar_type()));
}

}  // namespace

Tensor attention_inference(Tensor q, Tensor k, Tensor v, int64_t causal, std::optional<double> scale) {
  ForwardParams p;
  const Call call("attention_inference", q, k, &v, p);
  call.set_causal(causal, scale, p);
  Tensor out = empty_in_order_of(q, p.Dv);
  p.out = call.view(out);
  if (has_rows(p) && p.Dv > 0) {
    const FloatEnvironment environment;
    cpu::kernels().forward(p, torch_parallel());
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
    OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed, int64_t causal, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, std::optional<double> scale, double softcap, double dropout_p) {
  ForwardParams p;
  Call call("attention_forward", q, k, &v, p, cu_seqlens_q && cu_seqlens_k);
  call.set_options({mask, bias, bias2, alibi_slopes, sinks, key_lengths, cu_seqlens_q, cu_seqlens_k, dropout_seed,
                    causal, window_left, window_right, scale, softcap, dropout_p},
                   p);
  Tensor out = empty_in_order_of(q, p.Dv);
  const std::vector<int64_t> sizes = statistics_sizes(call, q);
  const ScalarType type = statistics_dtype(q);
  Tensor lse = empty(sizes, type), row_max = empty(sizes, type), row_sum = empty(sizes, type);
  p.out = call.view(out);
  p.lse = row_view_of(call, p, lse);
  p.row_max = row_view_of(call, p, row_max);
  p.row_sum = row_view_of(call, p, row_sum);
  if (has_rows(p)) {
    const FloatEnvironment environment;
    cpu::kernels().forward(p, torch_parallel());
  }
  return {out, lse, row_max, row_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, Tensor row_sum,
    OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2, OptionalTensor alibi_slopes, OptionalTensor sinks,
    OptionalTensor key_lengths, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed,
    int64_t causal, std::optional<int64_t> window_left, std::optional<int64_t> window_right,
    std::optional<double> scale, double softcap, double dropout_p, int64_t grads) {
  BackwardParams p;
  Call call("attention_backward", q, k, &v, p, cu_seqlens_q && cu_seqlens_k);
  call.set_options({mask, bias, bias2, alibi_slopes, sinks, key_lengths, cu_seqlens_q, cu_seqlens_k, dropout_seed,
                    causal, window_left, window_right, scale, softcap, dropout_p},
                   p);
  check_like(call, "grad_out", grad_out, q, p.Dv);
  check_like(call, "out", out, q, p.Dv);
  row_max = checked_statistics(call, q, "row_max", row_max);
  row_sum = checked_statistics(call, q, "row_sum", row_sum);
  p.grad_out = call.view(grad_out);
  p.out = call.view(out);
  p.row_max = row_view_of(call, p, row_max);
  p.row_sum = row_view_of(call, p, row_sum);
  Tensor lse_gradient;
  if (grad_lse) {
    lse_gradient = checked_statistics(call, q, "grad_lse", *grad_lse);
    p.grad_lse = row_view_of(call, p, lse_gradient);
  }

  enum : int64_t { of_q = 1, of_k = 2, of_v = 4, of_bias = 8, of_bias2 = 16, of_sinks = 32 };
  ATTN_EXT_EXPECT(grads >= 0 && grads < 64, call.op, "grads must be a bit mask below 64, not ", grads);
  ATTN_EXT_EXPECT(!(grads & of_bias) || bias, call.op, "grads asks for the gradient of a bias that is not given");
  ATTN_EXT_EXPECT(!(grads & of_bias2) || bias2, call.op, "grads asks for the gradient of a bias2 that is not given");
  ATTN_EXT_EXPECT(!(grads & of_sinks) || sinks, call.op, "grads asks for the gradient of sinks that are not given");
  std::array<Tensor, 6> result;
  for (size_t n = 0; n < result.size(); ++n) {  // tensors of their own: outputs must not alias
    if (!(grads >> n & 1)) result[n] = empty({0}, q.scalar_type());
  }
  if (grads & of_q) p.dq = call.view(result[0] = zeros_in_order_of(q, p.D));
  if (grads & of_k) p.dk = call.view(result[1] = zeros_in_order_of(k, p.D));
  if (grads & of_v) p.dv = call.view(result[2] = zeros_in_order_of(v, p.Dv));
  const OptionalTensor* biases[kMaxBiases] = {&bias, &bias2};
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!(grads & (of_bias << n))) continue;
    const Tensor& given = **biases[n];
    Tensor& gradient = result[static_cast<size_t>(3 + n)];
    gradient = zeros(sizes_of(given), given.scalar_type());
    if (gradient.numel() == 0) continue;
    const std::array<int64_t, 5> own = Call::leading_ones(given);
    const std::array<int64_t, 5> target{call.batch[0], call.batch[1], p.Hq, p.Lq, p.Lk};
    TensorView& view = p.dbias[n];
    view.data = gradient.data_ptr();
    view.dtype = dtype_of(gradient.scalar_type());
    int64_t* strides[5] = {&view.stride_b0, &view.stride_b1, &view.stride_h, &view.stride_l, &view.stride_d};
    int64_t stride = 1;
    for (size_t d = 5; d-- > 0;) {
      p.bias_varies[n][d] = own[d] == target[d];
      *strides[d] = own[d] > 1 ? stride : 0;
      stride *= own[d];
    }
  }
  std::vector<double> sink_gradients(static_cast<size_t>(p.Hq));
  if (grads & of_sinks) {
    p.dsinks = sink_gradients.data();
    result[5] = zeros({p.Hq}, sinks->scalar_type());
  }
  if (grads != 0 && has_rows(p) && p.Lk > 0) {
    const FloatEnvironment environment;
    cpu::kernels().backward(p, torch_parallel());
  }
  if (grads & of_sinks) {
    for (int64_t h = 0; h < p.Hq; ++h) set_number(result[5], h, sink_gradients[static_cast<size_t>(h)]);
  }
  return {result[0], result[1], result[2], result[3], result[4], result[5]};
}

Tensor attention_weights(Tensor q, Tensor k, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
                         OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths,
                         OptionalTensor row_max, OptionalTensor row_sum, OptionalTensor row_positions,
                         int64_t num_queries, int64_t causal, std::optional<int64_t> window_left,
                         std::optional<int64_t> window_right, std::optional<double> scale, double softcap) {
  WeightsParams p;
  Call call("attention_weights", q, k, nullptr, p);
  const OptionalTensor none;
  call.set_options({mask, bias, bias2, alibi_slopes, sinks, key_lengths, none, none, none, causal, window_left,
                    window_right, scale, softcap, 0.0},
                   p);
  ATTN_EXT_EXPECT(row_positions || num_queries == p.Lq, call.op, "num_queries must be the ", p.Lq,
                  " rows of q where no row_positions are given, not ", num_queries);
  if (row_positions) {
    call.positions = integers(call.op, "row_positions", *row_positions);
    ATTN_EXT_EXPECT(static_cast<int64_t>(call.positions.size()) == p.Lq, call.op,
                    "row_positions must have one entry for each of the ", p.Lq, " rows of q, not shape ",
                    shape_string(*row_positions));
    for (const int64_t position : call.positions) {
      ATTN_EXT_EXPECT(position >= 0 && position < num_queries, call.op, "row_positions must lie in [0, ", num_queries,
                      "), not be ", position);
    }
    p.row_positions = call.positions.data();
    p.num_queries = num_queries;
  }
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.back() = p.Lk;
  double elements = 1;
  for (const int64_t size : sizes) elements *= static_cast<double>(size);
  ATTN_EXT_EXPECT(elements <= kMaxElements, "attention_weights",
                  "the weights would have more than 2^45 elements: ", Call::shapes(q, k, nullptr));
  Tensor weights = zeros(sizes, q.scalar_type());
  if (!has_rows(p) || p.Lk == 0) return weights;
  p.weights = view_of(weights);

  const FloatEnvironment environment;
  ATTN_EXT_EXPECT(row_max.has_value() == row_sum.has_value(), call.op, "row_max and row_sum must be given together");
  Tensor max, sum;
  if (row_max) {
    max = checked_statistics(call, q, "row_max", *row_max);
    sum = checked_statistics(call, q, "row_sum", *row_sum);
  } else {  // a forward pass without values
    max = empty(statistics_sizes(call, q), statistics_dtype(q));
    sum = empty(statistics_sizes(call, q), statistics_dtype(q));
    ForwardParams statistics;
    static_cast<AttentionParams&>(statistics) = p;
    statistics.row_max = row_view_of(call, p, max);
    statistics.row_sum = row_view_of(call, p, sum);
    cpu::kernels().forward(statistics, torch_parallel());
  }
  p.row_max = row_view_of(call, p, max);
  p.row_sum = row_view_of(call, p, sum);
  cpu::kernels().weights(p, torch_parallel());
  return weights;
}

}  // namespace attn_ext
