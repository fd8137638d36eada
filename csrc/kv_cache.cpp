// KV caches: tensors → params → kernel table. Everything about a call is checked before anything is written.
#include "kv_cache.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache_shape.h"
#include "call.h"
#include "checks.h"
#include "device.h"
#include "params.h"
#include "tensors.h"

namespace attn_ext {
namespace {

struct CacheTensors {
  const Tensor &k, &v, &lengths;
  const OptionalTensor &block_table, &k_scales, &v_scales, &cu_seqlens, &cos, &sin;
  bool ring, interleaved;
};

// A cache as it came in, checked: shapes, lengths, scales. Holds what the params point to.
class Cache : public Call {
 public:
  int64_t heads = 0, D = 0, Dv = 0;

  Cache(const char* name, const CacheTensors& t) : Call(name), tensors_(t), shape_{.op = name} {
    packed = t.cu_seqlens.has_value();
    const Tensor *k = &t.k, *v = &t.v;
    expect_here(op, "k_cache", *k);
    expect_here(op, "v_cache", *v);
    ATTN_EXT_EXPECT(k->dim() == 4 && v->dim() == 4, op, "k_cache and v_cache must be ", expected(), ", not ", came());
    for (int64_t d = 0; d < 3; ++d) {
      ATTN_EXT_EXPECT(k->size(d) == v->size(d), op,
                      "k_cache and v_cache must have the same sizes but for the last, not ", came());
    }
    const ScalarType type = k->scalar_type();
    ATTN_EXT_EXPECT(type == v->scalar_type() && (is_float(type) || type == ScalarType::Char), op,
                    "k_cache and v_cache must have one dtype out of float32, bfloat16, float16, float64 and int8, not ",
                    dtype_name(type), " and ", dtype_name(v->scalar_type()));
    heads = k->size(1);
    D = k->size(3);
    Dv = v->size(3);
    ATTN_EXT_EXPECT(D > 0, op, "the head dim of k_cache must be at least 1: ", came());
    expect_addressable("k_cache", *k);
    expect_addressable("v_cache", *v);
    expect_here(op, "cache_lengths", t.lengths);
    ATTN_EXT_EXPECT(t.lengths.dim() == 1, op, "cache_lengths must be (B,), one number a sequence, not shape ",
                    shape_string(t.lengths));
    batch[1] = t.lengths.size(0);
    shape_.batch = batch[1];
    shape_.capacity = k->size(2);
    shape_.ring = t.ring;
    shape_.packed = packed;
    if (t.block_table) {
      read_table(*t.block_table);
    } else {
      ATTN_EXT_EXPECT(k->size(0) == batch[1], op, "cache_lengths must be (", k->size(0),
                      ",), one number for each of the cache's sequences, not ", shape_string(t.lengths));
      if (t.ring) layout_.ring = shape_.capacity;
    }
    expect_integers(op, "cache_lengths", t.lengths);
    values_.read_lengths(shape_, t.lengths);
    read_scales();
    if (packed) {
      expect_here(op, "cu_seqlens", *t.cu_seqlens);
      ATTN_EXT_EXPECT(t.cu_seqlens->dim() == 1 && t.cu_seqlens->size(0) == batch[1] + 1, op, "cu_seqlens must be (",
                      batch[1] + 1, ",), one more than the sequences of cache_lengths, not ",
                      shape_string(*t.cu_seqlens));
      expect_integers(op, "cu_seqlens", *t.cu_seqlens);
      values_.read_boundaries(shape_, *t.cu_seqlens);
    }
  }

  // Checks new tokens, and moves the totals along. Nothing is written yet.
  void read_new(const Tensor& k, const Tensor& v) {
    expect_tokens("k", k, heads, D);
    expect_tokens("v", v, heads, Dv);
    ATTN_EXT_EXPECT(k.scalar_type() == v.scalar_type(), op, "k and v must have one dtype, not ",
                    dtype_name(k.scalar_type()), " and ", dtype_name(v.scalar_type()));
    for (int64_t d = 0; d < k.dim() - 1; ++d) {
      ATTN_EXT_EXPECT(k.size(d) == v.size(d), op, "k and v must have the same sizes but for the last, not ",
                      shape_string(k), " and ", shape_string(v));
    }
    expect_writable("k_cache", tensors_.k);
    expect_writable("v_cache", tensors_.v);
    if (tensors_.k_scales) {
      expect_writable("k_scales", *tensors_.k_scales);
      expect_writable("v_scales", *tensors_.v_scales);
    }
    values_.append(shape_, packed ? 0 : k.size(2));
    read_rotary(k);
    appended_ = &k;
  }

  // That nothing which is written lies in the memory of anything else: neither what is read meanwhile, nor one another.
  void expect_apart(const Tensor& k, const Tensor& v, const Tensor* q) const {
    struct Place {
      const char* name;
      const Tensor* tensor;
      Extent extent;
    };
    std::array<Place, 10> places;
    size_t count = 0;
    const auto add = [&](const char* name, const Tensor* t) {
      if (t && t->numel() > 0) places[count++] = {name, t, extent_of(*t)};
    };
    add("k_cache", &tensors_.k);
    add("v_cache", &tensors_.v);
    add("k_scales", pointer(tensors_.k_scales));
    add("v_scales", pointer(tensors_.v_scales));
    const size_t written = count;
    add("k", &k);
    add("v", &v);
    add("q", q);
    add("rotary cos", pointer(tensors_.cos));
    add("rotary sin", pointer(tensors_.sin));
    add("block_table", pointer(tensors_.block_table));
    for (size_t w = 0; w < written; ++w) {
      for (size_t other = w + 1; other < count; ++other) {
        const Place &a = places[w], &b = places[other];
        ATTN_EXT_EXPECT(!a.extent.meets(b.extent) || !share_memory(*a.tensor, *b.tensor), op, b.name, " ",
                        shape_string(*b.tensor), " lies in the memory of ", a.name, " ", shape_string(*a.tensor),
                        ", which is written to; give a copy");
      }
    }
  }

  // Checks queries and fills what the kernel reads of them and of the cache.
  void read_queries(const Tensor& q, const Options& options, ForwardParams& p) {
    ATTN_EXT_EXPECT(q.dim() == (packed ? 3 : 4), op, "q must be ", packed ? "(total, Hq, D)" : "(B, Hq, Lq, D)",
                    ", not ", shape_string(q));
    p.Hq = q.size(1);
    expect_tokens("q", q, p.Hq, D);
    ATTN_EXT_EXPECT(!appended_ || q.scalar_type() == appended_->scalar_type(), op,
                    "q, k and v must have one dtype, not ", dtype_name(q.scalar_type()), " beside ",
                    dtype_name(appended_->scalar_type()));
    ATTN_EXT_EXPECT(heads > 0 ? p.Hq % heads == 0 : p.Hq == 0, op, "the ", p.Hq,
                    " heads of q must be a multiple of the heads of the cache, which are ", heads);
    p.batch = batch[1];
    p.batch_inner = std::max<int64_t>(batch[1], 1);
    p.Hkv = heads;
    p.D = D;
    p.Dv = Dv;
    p.q = view(q);
    p.k = view_of(tensors_.k);
    p.v = view_of(tensors_.v);
    p.scale = 1.0 / std::sqrt(static_cast<double>(D));
    p.total_lengths = values_.totals();
    p.layout = layout_;
    p.scales = scales_;
    if (packed) {
      p.cu_q = values_.boundaries();
      p.total_q = q.size(0);
    }
    set_causal(options.causal, options.scale, p);
    ATTN_EXT_EXPECT(p.causal != Causal::top_left, op, "causal must be 0 (off) or 2 (bottom-right) here, not 1");
    set_scores(options, p);
    if (!appended_) read_rotary(q);
    values_.attend(shape_, packed ? 0 : q.size(2), rotates(), p);
    p.num_queries = p.Lq;
  }

  // Everything has been looked at: what follows is run.
  void settle() { values_.settle(shape_); }

  bool rotates() const { return rotary_dim_ > 0; }

  // New tokens on their way to their places.
  void append(const Tensor& from, const Tensor& to, const TensorView& scale, bool turned) const {
    AppendParams p = rows_of(from, values_.positions(), turned);
    p.to = view_of(to);
    p.scale = scale;
    p.layout = layout_;
    run_rows(p);
  }
  void append_both(const Tensor& k, const Tensor& v) const {
    append(k, tensors_.k, scales_.k, true);
    append(v, tensors_.v, scales_.v, false);
  }

  // q turned by the positions of its rows.
  Tensor turned_queries(const Tensor& q) const {
    Tensor turned = empty_in_order_of(q, D);
    AppendParams p = rows_of(q, values_.query_positions(), true);
    p.to = view(turned);
    p.to_packed = true;
    run_rows(p);
    return turned;
  }

 private:
  static const Tensor* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

  const char* expected() const {
    return tensors_.block_table ? "(blocks, Hkv, page, D) with a block_table" : "(B, Hkv, capacity, D)";
  }

  std::string came() const { return "k_cache " + shape_string(tensors_.k) + ", v_cache " + shape_string(tensors_.v); }

  void expect_tokens(const char* name, const Tensor& t, int64_t count, int64_t width) {
    expect_here(op, name, t);
    const ScalarType cached = tensors_.k.scalar_type(), type = t.scalar_type();
    ATTN_EXT_EXPECT(cached == ScalarType::Char ? is_float(type) : type == cached, op, name, " must be ",
                    cached == ScalarType::Char ? "a float tensor" : dtype_name(cached), " for a cache of ",
                    dtype_name(cached), ", not ", dtype_name(type));
    const bool shaped = packed ? t.dim() == 3 : t.dim() == 4 && t.size(0) == batch[1];
    ATTN_EXT_EXPECT(shaped && t.size(1) == count && t.size(t.dim() - 1) == width, op, name, " must be ",
                    packed ? "packed, (total, " : "(" + std::to_string(batch[1]) + ", ", count,
                    packed ? ", " : ", tokens, ", width, ") for ", came(), ", not ", shape_string(t));
    if (packed) values_.expect_rows(shape_, name, t);
    expect_addressable(name, t);
  }

  // Two elements at one address cannot both be written.
  void expect_writable(const char* name, const Tensor& t) const {
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
    }
    std::sort(dims.begin(), dims.end());
    int64_t reach = 0;  // of the dims so far
    for (const auto& [stride, size] : dims) {
      ATTN_EXT_EXPECT(stride > reach, op, name, " ", shape_string(t),
                      " holds several elements in the same memory (it was expanded), and cannot be written to");
      reach += stride * (size - 1);
    }
  }

  void read_table(const Tensor& table) {
    ATTN_EXT_EXPECT(!tensors_.ring, op, "a paged cache is no ring");
    expect_here(op, "block_table", table);
    ATTN_EXT_EXPECT(table.scalar_type() == ScalarType::Int, op, "block_table must be int32, not ",
                    dtype_name(table.scalar_type()));
    ATTN_EXT_EXPECT(table.dim() == 2 && table.size(0) == batch[1], op, "block_table must be (", batch[1],
                    ", blocks per sequence) for the ", batch[1], " numbers of cache_lengths, not ",
                    shape_string(table));
    ATTN_EXT_EXPECT(shape_.capacity > 0, op, "the pages of the cache must have at least one place: ", came());
    const int64_t blocks = table.size(1);
    expect_addressable("block_table", table);
    layout_.page_size = shape_.page = shape_.capacity;
    shape_.pool = tensors_.k.size(0);
    shape_.capacity = blocks > kLongest / shape_.page ? kLongest : shape_.page * blocks;  // which no length is above
    values_.read_table(table, layout_);
  }

  void read_scales() {
    const bool wanted = tensors_.k.scalar_type() == ScalarType::Char;
    ATTN_EXT_EXPECT(
        tensors_.k_scales.has_value() == wanted && tensors_.v_scales.has_value() == wanted, op,
        wanted ? "an int8 cache needs k_scales and v_scales" : "k_scales and v_scales belong to int8 caches");
    if (!wanted) return;
    scales_.k = scale_view("k_scales", *tensors_.k_scales);
    scales_.v = scale_view("v_scales", *tensors_.v_scales);
  }

  TensorView scale_view(const char* name, const Tensor& t) const {
    expect_here(op, name, t);
    ATTN_EXT_EXPECT(t.scalar_type() == ScalarType::Float, op, name, " must be float32, not ",
                    dtype_name(t.scalar_type()));
    bool fits = t.dim() == 3;
    for (int64_t d = 0; fits && d < 3; ++d) fits = t.size(d) == tensors_.k.size(d);
    ATTN_EXT_EXPECT(fits, op, name, " must have the sizes of the caches but for the last, ", came(), ", not ",
                    shape_string(t));
    TensorView v;
    v.data = t.data_ptr();
    v.stride_b1 = t.stride(0);
    v.stride_h = t.stride(1);
    v.stride_l = t.stride(2);
    return v;
  }

  // The tables of cosines and sines, for tokens of the dtype of `like` up to the last position.
  void read_rotary(const Tensor& like) {
    ATTN_EXT_EXPECT(tensors_.cos.has_value() == tensors_.sin.has_value(), op, "rotary needs cos and sin together");
    if (!tensors_.cos) return;
    cos_ = *tensors_.cos;
    sin_ = *tensors_.sin;
    for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"rotary cos", cos_}, {"rotary sin", sin_}}) {
      expect_here(op, name, t);
      ATTN_EXT_EXPECT(t.scalar_type() == statistics_dtype(like), op, name, " must be ",
                      dtype_name(statistics_dtype(like)), ", not ", dtype_name(t.scalar_type()));
      ATTN_EXT_EXPECT(t.dim() == 2 && t.size(1) >= 1 && 2 * t.size(1) <= D, op, name,
                      " must be (positions, rotary_dim / 2) with rotary_dim at most the head dim ", D, ", not ",
                      shape_string(t));
    }
    ATTN_EXT_EXPECT(cos_.size(0) == sin_.size(0) && cos_.size(1) == sin_.size(1), op,
                    "rotary cos and sin must have one shape, not ", shape_string(cos_), " and ", shape_string(sin_));
    const int64_t positions = values_.turn(shape_, cos_.size(0));
    if (cos_.stride(1) != 1) cos_ = contiguous_rows(cos_, positions);
    if (sin_.stride(1) != 1) sin_ = contiguous_rows(sin_, positions);
    rotary_dim_ = 2 * cos_.size(1);
  }

  AppendParams rows_of(const Tensor& from, const int64_t* positions, bool turned) const {
    AppendParams p;
    p.batch = batch[1];
    p.heads = from.size(1);
    p.n = packed ? values_.most_rows() : from.size(2);
    p.D = from.size(from.dim() - 1);
    p.from = view(from);
    p.positions = positions;
    if (packed) {
      p.cu = values_.boundaries();
      p.total = from.size(0);
    }
    if (turned && rotates()) {
      p.cos = cos_.data_ptr();
      p.sin = sin_.data_ptr();
      p.cos_stride = cos_.stride(0);
      p.sin_stride = sin_.stride(0);
      p.rotary_dim = rotary_dim_;
      p.interleaved = tensors_.interleaved;
    }
    return p;
  }

  static void run_rows(const AppendParams& p) {
    if (p.batch > 0 && p.heads > 0 && p.n > 0 && p.D > 0) run(p);
  }

  const CacheTensors& tensors_;
  CacheShape shape_;
  CacheValues values_;
  CacheLayout layout_;
  CacheScales scales_;
  Tensor cos_, sin_;
  int64_t rotary_dim_ = 0;
  const Tensor* appended_ = nullptr;  // the new k
};

std::tuple<Tensor, Tensor> attend(Cache& cache, const Tensor& q, const Tensor* k, const Tensor* v,
                                  const Options& options) {
  if (k) cache.read_new(*k, *v);
  ForwardParams p;
  cache.read_queries(q, options, p);
  if (k) cache.expect_apart(*k, *v, &q);
  cache.settle();
  Tensor out = empty_in_order_of(q, p.Dv);
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.pop_back();
  if (cache.packed) std::swap(sizes[0], sizes[1]);
  Tensor lse = empty(sizes, statistics_dtype(q));
  p.out = cache.view(out);
  p.lse.data = lse.data_ptr();
  p.lse.stride_h = cache.packed ? q.size(0) : p.Lq;
  p.lse.stride_b = cache.packed ? 0 : p.Hq * p.Lq;
  Tensor turned;
  if (cache.rotates() && q.numel() > 0) {
    turned = cache.turned_queries(q);
    p.q = cache.view(turned);
  }
  if (k) cache.append_both(*k, *v);
  if (p.has_rows()) run(p);
  return {out, lse};
}

}  // namespace

void kv_cache_append(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cache_lengths,
                     OptionalTensor block_table, OptionalTensor k_scales, OptionalTensor v_scales,
                     OptionalTensor cu_seqlens, OptionalTensor cos, OptionalTensor sin, bool ring, bool interleaved) {
  const Device device(k_cache);
  const CacheTensors tensors{k_cache,    v_cache, cache_lengths, block_table, k_scales,   v_scales,
                             cu_seqlens, cos,     sin,           ring,        interleaved};
  Cache cache("kv_cache_append_", tensors);
  cache.read_new(k, v);
  cache.expect_apart(k, v, nullptr);
  cache.settle();
  cache.append_both(k, v);
}

std::tuple<Tensor, Tensor> attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_lengths,
                                                   OptionalTensor block_table, OptionalTensor k_scales,
                                                   OptionalTensor v_scales, OptionalTensor cu_seqlens,
                                                   OptionalTensor cos, OptionalTensor sin, bool ring, bool interleaved,
                                                   OptionalTensor alibi_slopes, OptionalTensor sinks, int64_t causal,
                                                   std::optional<int64_t> window_left,
                                                   std::optional<int64_t> window_right, std::optional<double> scale,
                                                   double softcap) {
  const Device device(k_cache);
  const CacheTensors tensors{k_cache,    v_cache, cache_lengths, block_table, k_scales,   v_scales,
                             cu_seqlens, cos,     sin,           ring,        interleaved};
  Cache cache("attention_with_kv_cache", tensors);
  const OptionalTensor none;
  return attend(cache, q, nullptr, nullptr,
                {none, none, none, alibi_slopes, sinks, none, none, none, none, causal, window_left, window_right,
                 scale, softcap, 0.0});
}

std::tuple<Tensor, Tensor> attention_with_kv_cache_append(
    Tensor q, Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cache_lengths, OptionalTensor block_table,
    OptionalTensor k_scales, OptionalTensor v_scales, OptionalTensor cu_seqlens, OptionalTensor cos, OptionalTensor sin,
    bool ring, bool interleaved, OptionalTensor alibi_slopes, OptionalTensor sinks, int64_t causal,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right, std::optional<double> scale,
    double softcap) {
  const Device device(k_cache);
  const CacheTensors tensors{k_cache,    v_cache, cache_lengths, block_table, k_scales,   v_scales,
                             cu_seqlens, cos,     sin,           ring,        interleaved};
  Cache cache("attention_with_kv_cache", tensors);
  const OptionalTensor none;
  return attend(cache, q, &k, &v,
                {none, none, none, alibi_slopes, sinks, none, none, none, none, causal, window_left, window_right,
                 scale, softcap, 0.0});
}

}  // namespace attn_ext
