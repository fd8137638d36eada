#include "problem.h"

#include <algorithm>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/plan.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return "float64";
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
    default:
      return "bool";
  }
}

Tensor::Index sizes_of_pattern(const char* pattern, const Case& c) {
  const int64_t full[5] = {c.B0, c.B1, c.Hq, c.Lq, c.Lk};
  Tensor::Index sizes{1, 1, 1, 1, 1};
  for (size_t d = 0; d < 5; ++d) {
    if (std::strchr(pattern, "ABhij"[d])) sizes[d] = full[d];
  }
  return sizes;
}

void randomize(Tensor& t, Random& random, double magnitude) {
  t.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
    t.set(b0, b1, h, l, d, random.uniform(-magnitude, magnitude));
  });
}

// Element (b, h, l, d) of a tensor that is packed or not: `starts` are the sequences' first rows.
double at(const Tensor& t, const Case& c, const std::vector<int64_t>& starts, int64_t b, int64_t h, int64_t l,
          int64_t d) {
  return starts.empty() ? t.get(b / c.B1, b % c.B1, h, l, d) : t.get(0, 0, h, starts[static_cast<size_t>(b)] + l, d);
}

void put(Tensor& t, const Case& c, const std::vector<int64_t>& starts, int64_t b, int64_t h, int64_t l, int64_t d,
         double x) {
  starts.empty() ? t.set(b / c.B1, b % c.B1, h, l, d, x) : t.set(0, 0, h, starts[static_cast<size_t>(b)] + l, d, x);
}

// Row numbers: (1, B, H, L, 1), packed (1, 1, H, total, 1).
double row_at(const Tensor& t, const Case& c, int64_t b, int64_t h, int64_t i) {
  return c.cu_q.empty() ? t.get(0, b, h, i, 0) : t.get(0, 0, h, c.cu_q[static_cast<size_t>(b)] + i, 0);
}

void put_row(Tensor& t, const Case& c, int64_t b, int64_t h, int64_t i, double x) {
  c.cu_q.empty() ? t.set(0, b, h, i, 0, x) : t.set(0, 0, h, c.cu_q[static_cast<size_t>(b)] + i, 0, x);
}

RowView row_view(const Problem& problem, const Tensor& t) {
  const TensorView v = t.view();
  RowView rows;
  rows.data = v.data;
  // As the op has them: contiguous, also where a size is 1.
  rows.stride_h = t.sizes()[3];
  rows.stride_b = problem.packed() ? 0 : t.sizes()[2] * t.sizes()[3];
  return rows;
}

DType statistics(const Case& c) { return c.dtype == DType::float64 ? DType::float64 : DType::float32; }

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

}  // namespace

std::string Case::text() const {
  std::string s = std::string(name) + " " + name_of(dtype);
  const auto add = [&](const char* label, double x) {
    char number[64];
    std::snprintf(number, sizeof number, "%s%g", label, x);
    s += number;
  };
  add(" B ", static_cast<double>(B0));
  add("x", static_cast<double>(B1));
  add(" Hq ", static_cast<double>(Hq));
  add(" Hkv ", static_cast<double>(Hkv));
  add(" Lq ", static_cast<double>(Lq));
  add(" Lk ", static_cast<double>(Lk));
  add(" D ", static_cast<double>(D));
  add(" Dv ", static_cast<double>(Dv));
  add(" layout ", static_cast<double>(layout));
  if (mask) s += std::string(" mask '") + mask + "'";
  for (const char* b : bias) {
    if (b) s += std::string(" bias '") + b + "'";
  }
  if (mask || bias[0] || bias[1]) add(" their layout ", static_cast<double>(options_layout));
  if (bias_hides != 0) add(" bias hides ", bias_hides);
  if (alibi) add(" alibi ", alibi);
  if (sinks) s += " sinks";
  if (!key_lengths.empty()) s += " key_lengths";
  for (const int64_t n : key_lengths) add(" ", static_cast<double>(n));
  if (!cu_q.empty()) s += " packed";
  if (causal != Causal::none) s += causal == Causal::top_left ? " top_left" : " bottom_right";
  if (window_left != kUnbounded) add(" left ", static_cast<double>(window_left));
  if (window_right != kUnbounded) add(" right ", static_cast<double>(window_right));
  if (!std::isnan(scale)) add(" scale ", scale);
  if (softcap != 0) add(" softcap ", softcap);
  if (dropout_p != 0) add(" dropout ", dropout_p);
  if (grad_lse) s += " grad_lse";
  if (poison_hidden) s += " poison_hidden";
  add(" seed ", static_cast<double>(seed));
  return s;
}

Problem::Problem(Case description) : c(std::move(description)) {
  if (packed()) {
    c.Lq = c.Lk = 0;
    batch = static_cast<int64_t>(c.cu_q.size()) - 1;
    c.B0 = 1;
    c.B1 = std::max<int64_t>(batch, 1);
    for (int64_t b = 0; b < batch; ++b) {
      c.Lq = std::max(c.Lq, Lq(b));
      c.Lk = std::max(c.Lk, Lk(b));
    }
  } else {
    batch = c.B0 * c.B1;
  }
  scale = std::isnan(c.scale) ? 1.0 / std::sqrt(static_cast<double>(c.D)) : c.scale;
  Random random(c.seed);
  q = like_queries(c.D, 0);
  k = like_keys(c.D, 0);
  v = like_keys(c.Dv, 0);
  grad_out = like_queries(c.Dv, 0);
  randomize(q, random, c.magnitude);
  randomize(k, random, c.magnitude);
  randomize(v, random, 1);
  randomize(grad_out, random, 1);
  if (c.grad_lse) {
    grad_lse = like_rows(0);
    randomize(grad_lse, random, 1);
  }
  if (c.mask) {
    mask = Tensor(DType::boolean, sizes_of_pattern(c.mask, c), c.options_layout);
    mask.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
      mask.set(b0, b1, h, l, d, random.chance(c.hidden_share) ? 0 : 1);
    });
  }
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!c.bias[n]) continue;
    bias[n] = Tensor(c.bias_dtype, sizes_of_pattern(c.bias[n], c), c.options_layout);
    randomize(bias[n], random, 2);
    if (n > 0 || c.bias_hides == 0) continue;
    bias[n].for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
      if (random.chance(c.bias_hides)) bias[n].set(b0, b1, h, l, d, -kInf);
    });
  }
  for (int64_t n = 0; c.alibi && n < (c.alibi == 2 ? batch : 1) * c.Hq; ++n) {
    slopes.push_back(static_cast<float>(random.uniform(0, 0.5)));
  }
  for (int64_t h = 0; c.sinks && h < c.Hq; ++h) {
    // As the op hands them over: numbers that were fp32 where the call is.
    const double sink = random.uniform(-2, 2);
    sinks.push_back(c.dtype == DType::float64 ? sink : static_cast<double>(static_cast<float>(sink)));
  }
  if (!c.poison_hidden) return;
  const int64_t group = c.Hq / c.Hkv;
  const auto poison = [&](int64_t n) { return n % 3 == 0 ? kNaN : (n % 3 == 1 ? kInf : -kInf); };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < c.Hq; ++h) {
      for (int64_t i = 0; i < Lq(b); ++i) {
        bool sees = false;
        for (int64_t j = 0; j < Lk(b); ++j) sees |= visible(b, h, i, j);
        if (sees) continue;
        for (int64_t d = 0; d < c.D; ++d) put(q, c, c.cu_q, b, h, i, d, poison(i + d));
        for (int64_t d = 0; d < c.Dv; ++d) put(grad_out, c, c.cu_q, b, h, i, d, poison(i + d));
      }
    }
    for (int64_t hkv = 0; hkv < c.Hkv; ++hkv) {
      for (int64_t j = 0; j < Lk(b); ++j) {
        bool seen = false;
        for (int64_t h = hkv * group; h < (hkv + 1) * group; ++h) {
          for (int64_t i = 0; i < Lq(b); ++i) seen |= visible(b, h, i, j);
        }
        if (seen) continue;
        for (int64_t d = 0; d < c.D; ++d) put(k, c, c.cu_k, b, hkv, j, d, poison(j + d));
        for (int64_t d = 0; d < c.Dv; ++d) put(v, c, c.cu_k, b, hkv, j, d, poison(j + d));
      }
    }
  }
}

Tensor Problem::like_queries(int64_t width, double fill) const {
  Tensor t(c.dtype,
           packed() ? Tensor::Index{1, 1, c.Hq, c.cu_q.back(), width} : Tensor::Index{c.B0, c.B1, c.Hq, c.Lq, width},
           c.layout);
  t.fill(fill);
  return t;
}

Tensor Problem::like_keys(int64_t width, double fill) const {
  Tensor t(c.dtype,
           packed() ? Tensor::Index{1, 1, c.Hkv, c.cu_k.back(), width} : Tensor::Index{c.B0, c.B1, c.Hkv, c.Lk, width},
           c.layout);
  t.fill(fill);
  return t;
}

Tensor Problem::like_rows(double fill) const {
  Tensor t(statistics(c),
           packed() ? Tensor::Index{1, 1, c.Hq, c.cu_q.back(), 1} : Tensor::Index{1, batch, c.Hq, c.Lq, 1});
  t.fill(fill);
  return t;
}

bool Problem::visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const int64_t b0 = b / c.B1, b1 = b % c.B1;
  if (mask && mask.get(b0, b1, h, i, j) == 0) return false;
  for (const Tensor& t : bias) {
    if (t && t.get(b0, b1, h, i, j) == -kInf) return false;
  }
  if (!c.key_lengths.empty() && j >= c.key_lengths[static_cast<size_t>(b)]) return false;
  const bool chosen = !c.row_positions.empty();
  const int64_t position = chosen ? c.row_positions[static_cast<size_t>(i)] : i;
  const int64_t queries = chosen ? c.num_queries : Lq(b);
  const int64_t center = c.causal == Causal::top_left ? position : position + Lk(b) - queries;
  if (c.causal != Causal::none && j > center) return false;
  if (c.window_left != kUnbounded && j < center - c.window_left) return false;
  return c.window_right == kUnbounded || j <= center + c.window_right;
}

AttentionParams Problem::params() const {
  AttentionParams p;
  p.batch = batch;
  p.batch_inner = c.B1;
  p.Hq = c.Hq;
  p.Hkv = c.Hkv;
  p.Lq = c.Lq;
  p.Lk = c.Lk;
  p.D = c.D;
  p.Dv = c.Dv;
  p.q = q.view();
  p.k = k.view();
  p.v = v.view();
  static char nothing;  // an empty mask or bias still counts as given
  const auto given = [](const Tensor& t) {
    TensorView v = t.view();
    if (t && v.data == nullptr) v.data = &nothing;
    return v;
  };
  p.mask = given(mask);
  for (int n = 0; n < kMaxBiases; ++n) p.bias[n] = given(bias[n]);
  if (c.alibi) {
    p.alibi_slopes = slopes.data();
    p.alibi_stride_b = c.alibi == 2 ? c.Hq : 0;
  }
  if (c.sinks) p.sinks = sinks.data();
  if (!c.key_lengths.empty()) p.key_lengths = c.key_lengths.data();
  if (packed()) {
    p.cu_q = c.cu_q.data();
    p.cu_k = c.cu_k.data();
    p.total_q = c.cu_q.back();
    p.total_k = c.cu_k.back();
  }
  p.num_queries = c.Lq;
  if (!c.row_positions.empty()) {
    p.row_positions = c.row_positions.data();
    p.num_queries = c.num_queries;
  }
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.scale = scale;
  p.softcap = c.softcap;
  if (c.dropout_p > 0) {
    p.dropout = true;
    p.dropout_seed = c.dropout_seed;
    p.dropout_threshold = static_cast<uint32_t>(std::nearbyint(c.dropout_p * 65536));
    p.dropout_scale = p.dropout_threshold == 65536 ? 0.0 : 65536.0 / (65536.0 - p.dropout_threshold);
  }
  return p;
}

Forward run_forward(const Problem& problem, int thread_count) {
  Forward f{problem.like_queries(problem.c.Dv, kNaN), problem.like_rows(kNaN), problem.like_rows(kNaN),
            problem.like_rows(kNaN)};
  ForwardParams p;
  static_cast<AttentionParams&>(p) = problem.params();
  p.out = f.out.view();
  p.lse = row_view(problem, f.lse);
  p.row_max = row_view(problem, f.row_max);
  p.row_sum = row_view(problem, f.row_sum);
  if (p.has_rows()) cpu::kernels().forward(p, threads(thread_count));
  return f;
}

Gradients run_backward(const Problem& problem, const Forward& forward, int thread_count, unsigned wanted) {
  const Case& c = problem.c;
  BackwardParams p;
  static_cast<AttentionParams&>(p) = problem.params();
  p.out = forward.out.view();
  p.grad_out = problem.grad_out.view();
  if (problem.grad_lse) p.grad_lse = row_view(problem, problem.grad_lse);
  p.row_max = row_view(problem, forward.row_max);
  p.row_sum = row_view(problem, forward.row_sum);
  Gradients g;
  if (wanted & want_q) p.dq = (g.dq = problem.like_queries(c.D, 0)).view();
  if (wanted & want_k) p.dk = (g.dk = problem.like_keys(c.D, 0)).view();
  if (wanted & want_v) p.dv = (g.dv = problem.like_keys(c.Dv, 0)).view();
  const int64_t full[5] = {c.B0, c.B1, c.Hq, c.Lq, c.Lk};
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!problem.bias[n] || !(wanted & (want_bias << n))) continue;
    g.dbias[n] = Tensor(c.bias_dtype, problem.bias[n].sizes());
    g.dbias[n].fill(0);
    p.dbias[n] = g.dbias[n].view();
    for (size_t d = 0; d < 5; ++d) p.bias_varies[n][d] = problem.bias[n].sizes()[d] == full[d];
  }
  if (c.sinks && (wanted & want_sinks)) {
    g.dsinks = Tensor(DType::float64, {1, 1, c.Hq, 1, 1});
    g.dsinks.fill(0);
    p.dsinks = static_cast<double*>(g.dsinks.view().data);
  }
  if (p.has_rows() && p.Lk > 0) cpu::kernels().backward(p, threads(thread_count));
  return g;
}

Tensor run_weights(const Problem& problem, const Forward& forward, int thread_count) {
  const Case& c = problem.c;
  Tensor weights(c.dtype, {c.B0, c.B1, c.Hq, c.Lq, c.Lk});
  weights.fill(0);
  WeightsParams p;
  static_cast<AttentionParams&>(p) = problem.params();
  p.v = {};
  p.Dv = 0;
  p.dropout = false;
  p.weights = weights.view();
  p.row_max = row_view(problem, forward.row_max);
  p.row_sum = row_view(problem, forward.row_sum);
  if (weights.elements() > 0) cpu::kernels().weights(p, threads(thread_count));
  return weights;
}

void philox(const uint32_t (&counter)[4], const uint32_t (&key)[2], uint32_t (&result)[4]) {
  std::copy(counter, counter + 4, result);
  for (uint32_t round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * result[0], b = uint64_t{0xCD9E8D57u} * result[2];
    const uint32_t k0 = key[0] + round * 0x9E3779B9u, k1 = key[1] + round * 0xBB67AE85u;
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ result[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ result[3] ^ k1, static_cast<uint32_t>(a)};
    std::copy(next, next + 4, result);
  }
}

namespace {

// Everything that the definition says of one row.
struct ReferenceRow {
  std::vector<bool> visible;
  std::vector<double> weight;      // before dropout
  std::vector<double> kept;        // what dropout multiplies it by
  std::vector<double> derivative;  // of the softcap
  double lse = -kInf;
  bool dead = true;  // sees no key
};

ReferenceRow reference_row(const Problem& problem, int64_t b, int64_t h, int64_t i) {
  const Case& c = problem.c;
  const int64_t hkv = h / (c.Hq / c.Hkv), Lk = problem.Lk(b);
  const auto count = static_cast<size_t>(Lk);
  ReferenceRow row{std::vector<bool>(count), std::vector<double>(count), std::vector<double>(count, 1.0),
                   std::vector<double>(count, 1.0)};
  std::vector<double> query(static_cast<size_t>(c.D));
  for (int64_t d = 0; d < c.D; ++d) query[static_cast<size_t>(d)] = at(problem.q, c, c.cu_q, b, h, i, d);
  double max = c.sinks ? problem.sinks[static_cast<size_t>(h)] : -kInf;
  bool nan = false;
  for (int64_t j = 0; j < Lk; ++j) {
    const auto n = static_cast<size_t>(j);
    row.visible[n] = problem.visible(b, h, i, j);
    if (!row.visible[n]) continue;
    row.dead = false;
    double x = 0;
    for (int64_t d = 0; d < c.D; ++d) x += query[static_cast<size_t>(d)] * at(problem.k, c, c.cu_k, b, hkv, j, d);
    x *= problem.scale;
    if (c.softcap != 0) {
      const double t = std::tanh(x / c.softcap);
      x = c.softcap * t;
      row.derivative[n] = 1 - t * t;
    }
    for (const Tensor& bias : problem.bias) {
      if (bias) x += bias.get(b / c.B1, b % c.B1, h, i, j);
    }
    if (c.alibi) {
      const bool chosen = !c.row_positions.empty();
      const int64_t position = chosen ? c.row_positions[static_cast<size_t>(i)] : i;
      const int64_t queries = chosen ? c.num_queries : problem.Lq(b);
      const int64_t center = c.causal == Causal::top_left ? position : position + Lk - queries;
      const float slope = problem.slopes[static_cast<size_t>((c.alibi == 2 ? b * c.Hq : 0) + h)];
      x -= static_cast<double>(slope) * static_cast<double>(std::abs(j - center));
    }
    row.weight[n] = x;
    nan |= std::isnan(x);
    max = std::max(max, x);
  }
  if (row.dead && !c.sinks) return row;
  double sum = c.sinks ? std::exp(problem.sinks[static_cast<size_t>(h)] - max) : 0;
  for (size_t n = 0; n < count; ++n) {
    if (!row.visible[n]) continue;
    row.weight[n] = nan ? kNaN : std::exp(row.weight[n] - max);
    sum += row.weight[n];
  }
  row.lse = max + std::log(sum);
  for (double& w : row.weight) w /= sum;
  if (c.dropout_p > 0) {
    const auto threshold = static_cast<uint32_t>(std::nearbyint(c.dropout_p * 65536));
    for (size_t n = 0; n < count; ++n) {
      uint32_t words[4];
      philox(
          {static_cast<uint32_t>(b), static_cast<uint32_t>(h), static_cast<uint32_t>(i), static_cast<uint32_t>(n / 8)},
          {static_cast<uint32_t>(c.dropout_seed), static_cast<uint32_t>(c.dropout_seed >> 32)}, words);
      const uint32_t bits = words[n % 8 / 2] >> (16 * (n % 2)) & 0xffffu;
      row.kept[n] = bits < threshold ? 0 : 65536.0 / (65536.0 - threshold);
    }
  }
  return row;
}

// The rounding of one number as it is stored.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 0x1p-53;
    case DType::float32:
      return 0x1p-24;
    case DType::bfloat16:
      return 0x1p-8;
    default:
      return 0x1p-11;
  }
}

// What sums and scores on the way may be off by.
double computing(DType dtype) { return dtype == DType::float64 ? 2e-14 : 1e-5; }

// What weights are off by on the way to their product with v: tensor cores multiply 16-bit numbers, and so do CPUs with
// instructions for bf16.
double rounding_of_weights(const Case& c) {
  const std::string isa = cpu::active_isa();
  const bool in_16_bits = c.dtype == DType::bfloat16 || c.dtype == DType::float16;
  const bool on_tensor_cores = isa == "cuda_sim" && std::max(c.D, c.Dv) <= 256 && in_16_bits;
  const bool in_pairs = (isa == "avx512_bf16" || isa == "amx_bf16") && c.dtype == DType::bfloat16;
  return on_tensor_cores || in_pairs ? rounding(c.dtype) : 0;
}

// fp16's steps are 2^-24 below this: what is rounded there is off by as much as a weight of this size.
constexpr double kSmallestNormalWeight = 0x1p-14;

// The smallest weight that is not 0.
double smallest(DType dtype) { return dtype == DType::float64 ? 0x1p-1022 : 0x1p-126; }

}  // namespace

Forward reference_forward(const Problem& problem, Tensor* sums) {
  const Case& c = problem.c;
  Forward f;
  const Tensor::Index out_sizes = problem.grad_out.sizes();
  f.out = Tensor(DType::float64, out_sizes);
  f.out.fill(0);
  if (sums) {
    *sums = Tensor(DType::float64, out_sizes);
    sums->fill(0);
  }
  f.lse = Tensor(DType::float64, problem.like_rows(0).sizes());
  f.lse.fill(-kInf);
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < c.Hq; ++h) {
      for (int64_t i = 0; i < problem.Lq(b); ++i) {
        const ReferenceRow row = reference_row(problem, b, h, i);
        put_row(f.lse, c, b, h, i, row.lse);
        if (row.dead) continue;
        std::vector<double> out(static_cast<size_t>(c.Dv)), sizes(static_cast<size_t>(c.Dv));
        for (int64_t j = 0; j < problem.Lk(b); ++j) {
          const auto n = static_cast<size_t>(j);
          if (!row.visible[n] || row.kept[n] == 0) continue;
          for (int64_t d = 0; d < c.Dv; ++d) {
            const double number = at(problem.v, c, c.cu_k, b, h / (c.Hq / c.Hkv), j, d);
            out[static_cast<size_t>(d)] += row.weight[n] * row.kept[n] * number;
            const double size = (row.weight[n] + kSmallestNormalWeight) * row.kept[n] * std::fabs(number);
            sizes[static_cast<size_t>(d)] += size;
          }
        }
        for (int64_t d = 0; d < c.Dv; ++d) {
          put(f.out, c, c.cu_q, b, h, i, d, out[static_cast<size_t>(d)]);
          if (sums) put(*sums, c, c.cu_q, b, h, i, d, sizes[static_cast<size_t>(d)]);
        }
      }
    }
  }
  return f;
}

Tensor reference_weights(const Problem& problem) {
  const Case& c = problem.c;
  Tensor weights(DType::float64, {c.B0, c.B1, c.Hq, c.Lq, c.Lk});
  weights.fill(0);
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < c.Hq; ++h) {
      for (int64_t i = 0; i < c.Lq; ++i) {
        const ReferenceRow row = reference_row(problem, b, h, i);
        for (int64_t j = 0; j < c.Lk; ++j) {
          if (row.visible[static_cast<size_t>(j)]) {
            weights.set(b / c.B1, b % c.B1, h, i, j, row.weight[static_cast<size_t>(j)]);
          }
        }
      }
    }
  }
  return weights;
}

Gradients reference_backward(const Problem& problem, const Tensor& out, Gradients& sums) {
  const Case& c = problem.c;
  Gradients g;
  for (Gradients* each : {&g, &sums}) {
    const auto zeros = [](const Tensor::Index& sizes) {
      Tensor t(DType::float64, sizes);
      t.fill(0);
      return t;
    };
    each->dq = zeros(problem.q.sizes());
    each->dk = zeros(problem.k.sizes());
    each->dv = zeros(problem.v.sizes());
    for (int n = 0; n < kMaxBiases; ++n) {
      if (problem.bias[n]) each->dbias[n] = zeros(problem.bias[n].sizes());
    }
    if (c.sinks) each->dsinks = zeros({1, 1, c.Hq, 1, 1});
  }
  // Weights below the smallest normal number become 0.
  const double least = smallest(c.dtype) / computing(c.dtype);
  // What is rounded to fp16 has one size of step below its normal numbers.
  const double step = rounding_of_weights(c) > 0 && c.dtype == DType::float16 ? kSmallestNormalWeight : 0;
  // A term and its size.
  struct Term {
    double x, size;
  };
  const auto add = [&](Tensor Gradients::*which, const std::vector<int64_t>& starts, int64_t b, int64_t h, int64_t l,
                       int64_t d, Term term) {
    put(g.*which, c, starts, b, h, l, d, at(g.*which, c, starts, b, h, l, d) + term.x);
    put(sums.*which, c, starts, b, h, l, d, at(sums.*which, c, starts, b, h, l, d) + term.size);
  };
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int64_t b0 = b / c.B1, b1 = b % c.B1;
    for (int64_t h = 0; h < c.Hq; ++h) {
      const int64_t hkv = h / (c.Hq / c.Hkv);
      for (int64_t i = 0; i < problem.Lq(b); ++i) {
        const ReferenceRow row = reference_row(problem, b, h, i);
        if (row.dead && !c.sinks) continue;
        std::vector<double> go(static_cast<size_t>(c.Dv));
        Term delta{0, 0};
        for (int64_t d = 0; d < c.Dv; ++d) {
          go[static_cast<size_t>(d)] = at(problem.grad_out, c, c.cu_q, b, h, i, d);
          if (row.dead) continue;
          const double x = go[static_cast<size_t>(d)] * at(out, c, c.cu_q, b, h, i, d);
          delta.x += x;
          delta.size += std::fabs(x);
        }
        if (problem.grad_lse) {
          const double x = row_at(problem.grad_lse, c, b, h, i);
          delta.x -= x;
          delta.size += std::fabs(x);
        }
        if (c.sinks) {
          const double weight = std::exp(problem.sinks[static_cast<size_t>(h)] - row.lse);
          g.dsinks.set(0, 0, h, 0, 0, g.dsinks.get(0, 0, h, 0, 0) - weight * delta.x);
          sums.dsinks.set(0, 0, h, 0, 0, sums.dsinks.get(0, 0, h, 0, 0) + weight * delta.size);
        }
        for (int64_t j = 0; j < problem.Lk(b); ++j) {
          const auto n = static_cast<size_t>(j);
          if (!row.visible[n]) continue;
          Term dp{0, 0};
          for (int64_t d = 0; d < c.Dv; ++d) {
            const double x = go[static_cast<size_t>(d)] * at(problem.v, c, c.cu_k, b, hkv, j, d);
            dp.x += x;
            dp.size += std::fabs(x);
            const double term = row.weight[n] * row.kept[n] * go[static_cast<size_t>(d)];
            const double size = (row.weight[n] + least + step) * row.kept[n] * std::fabs(go[static_cast<size_t>(d)]);
            add(&Gradients::dv, c.cu_k, b, hkv, j, d, {term, size});
          }
          if (row.kept[n] == 0) dp = {0, 0};  // whatever it was
          const Term ds{row.weight[n] * (dp.x * row.kept[n] - delta.x),
                        (row.weight[n] + least) * (dp.size * row.kept[n] + delta.size)};
          for (int m = 0; m < kMaxBiases; ++m) {
            if (!g.dbias[m]) continue;
            g.dbias[m].set(b0, b1, h, i, j, g.dbias[m].get(b0, b1, h, i, j) + ds.x);
            sums.dbias[m].set(b0, b1, h, i, j, sums.dbias[m].get(b0, b1, h, i, j) + ds.size);
          }
          for (int64_t d = 0; d < c.D; ++d) {
            const double by_k = problem.scale * at(problem.k, c, c.cu_k, b, hkv, j, d);
            const double by_q = problem.scale * at(problem.q, c, c.cu_q, b, h, i, d);
            const double dx = ds.x * row.derivative[n];  // which is a difference itself: 1 - tanh²
            add(&Gradients::dq, c.cu_q, b, h, i, d, {dx * by_k, (ds.size + step) * std::fabs(by_k)});
            add(&Gradients::dk, c.cu_k, b, hkv, j, d, {dx * by_q, (ds.size + step) * std::fabs(by_q)});
          }
        }
      }
    }
  }
  return g;
}

namespace {

// Below this a number may be stored as a subnormal, or as 0.
double coarse_below(DType stored) {
  switch (stored) {
    case DType::float64:
      return 0;
    case DType::float16:
      return 0x1p-25;
    default:
      return 0x1p-126;
  }
}

Tolerance tolerance_of(DType stored, DType computed) {
  return {1.01 * rounding(stored), computing(computed), std::max(coarse_below(stored), 4 * smallest(computed))};
}

}  // namespace

void check_gradients(const Problem& problem, const Gradients& got, const Gradients& want, const Gradients& sums) {
  const DType dtype = problem.c.dtype;
  Tolerance tolerance = tolerance_of(dtype, dtype);
  tolerance.of_sum += 1.01 * rounding_of_weights(problem.c);
  check_close("dq", got.dq, want.dq, tolerance, &sums.dq);
  check_close("dk", got.dk, want.dk, tolerance, &sums.dk);
  check_close("dv", got.dv, want.dv, tolerance, &sums.dv);
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!got.dbias[n]) continue;
    check_close(n == 0 ? "dbias" : "dbias2", got.dbias[n], want.dbias[n], tolerance_of(problem.c.bias_dtype, dtype),
                &sums.dbias[n]);
  }
  if (got.dsinks) check_close("dsinks", got.dsinks, want.dsinks, {0, computing(dtype)}, &sums.dsinks);
}

void check_case(const Case& c, int thread_count) {
  const Problem problem(c);
  const Context context(c.text());
  check_problem(problem, thread_count);
}

void check_problem(const Problem& problem, int thread_count) {
  const DType dtype = problem.c.dtype;
  Tensor out_sums;
  const Forward want = reference_forward(problem, &out_sums);
  const bool weights_too = !problem.packed();
  const Tensor want_weights = weights_too ? reference_weights(problem) : Tensor();
  const Tolerance tolerance = tolerance_of(dtype, dtype);
  Gradients want_gradients, sums;
  for_each_isa([&] {
    if (given_up()) return;
    const Forward got = run_forward(problem, thread_count);
    const double rounding_on_the_way = rounding_of_weights(problem.c);
    if (rounding_on_the_way > 0) {
      const double of_sum = 1.01 * rounding_on_the_way + computing(dtype);
      check_close("out", got.out, want.out, {tolerance.relative, of_sum, tolerance.absolute}, &out_sums);
    } else {
      check_close("out", got.out, want.out, tolerance);
    }
    check_close("lse", got.lse, want.lse, {computing(dtype), computing(dtype)});
    CHECK(got.row_max.poison_intact() && got.row_sum.poison_intact(), "written outside row_max, row_sum");
    if (weights_too) check_close("weights", run_weights(problem, got, thread_count), want_weights, tolerance);
    // The gradients are those of `out` as it was stored. Where that is a coarse format it may differ between ISAs.
    const bool coarse = dtype == DType::bfloat16 || dtype == DType::float16;
    if (coarse || !want_gradients.dq) want_gradients = reference_backward(problem, got.out, sums);
    check_gradients(problem, run_backward(problem, got, thread_count), want_gradients, sums);
  });
  for (const Tensor* t : {&problem.q, &problem.k, &problem.v, &problem.grad_out, &problem.mask, &problem.bias[0]}) {
    CHECK(t->poison_intact(), "something was written around an input");
  }
}

void check_same_bits(const Forward& got, const Forward& want) {
  check_same_bits("out", got.out, want.out);
  check_same_bits("lse", got.lse, want.lse);
  check_same_bits("row_max", got.row_max, want.row_max);
  check_same_bits("row_sum", got.row_sum, want.row_sum);
}

void check_same_bits(const Gradients& got, const Gradients& want) {
  check_same_bits("dq", got.dq, want.dq);
  check_same_bits("dk", got.dk, want.dk);
  check_same_bits("dv", got.dv, want.dv);
  for (int n = 0; n < kMaxBiases; ++n) {
    if (got.dbias[n]) check_same_bits(n == 0 ? "dbias" : "dbias2", got.dbias[n], want.dbias[n]);
  }
  if (got.dsinks) check_same_bits("dsinks", got.dsinks, want.dsinks);
}

}  // namespace attn_ext::test
