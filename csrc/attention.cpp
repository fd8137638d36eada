// Tensor → params → kernel table: checks what came, allocates what goes back, fills the plain structs.
#include "attention.h"

#include <array>
#include <vector>

#include "call.h"
#include "checks.h"
#include "device.h"
#include "params.h"
#include "tensors.h"

namespace attn_ext {
namespace {

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

// Statistics that came in: of the right dtype and shape, contiguous.
Tensor checked_statistics(const Call& call, const Tensor& q, const char* name, const Tensor& t) {
  expect_here(call.op, name, t);
  ATTN_EXT_EXPECT(t.scalar_type() == statistics_dtype(q), call.op, name, " must be ", dtype_name(statistics_dtype(q)),
                  ", not ", dtype_name(t.scalar_type()));
  const std::vector<int64_t> sizes = statistics_sizes(call, q);
  ATTN_EXT_EXPECT(sizes_of(t) == sizes, call.op, name, " must have one number a row of q ", shape_string(q),
                  ", not shape ", shape_string(t));
  return t.is_contiguous() ? t : contiguous_rows(t, t.size(0));
}

void check_like(const Call& call, const char* name, const Tensor& t, const Tensor& q, int64_t width) {
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.back() = width;
  expect_here(call.op, name, t);
  ATTN_EXT_EXPECT(sizes_of(t) == sizes, call.op, name, " must have the shape of the output for q ", shape_string(q),
                  " and a value head dim of ", width, ", not ", shape_string(t));
  ATTN_EXT_EXPECT(t.scalar_type() == q.scalar_type(), call.op, name, " must be ", dtype_name(q.scalar_type()), ", not ",
                  dtype_name(t.scalar_type()));
}

}  // namespace

Tensor attention_inference(Tensor q, Tensor k, Tensor v, int64_t causal, std::optional<double> scale) {
  const Device device(q);
  ForwardParams p;
  const Call call("attention_inference", q, k, &v, p);
  call.set_causal(causal, scale, p);
  Tensor out = empty_in_order_of(q, p.Dv);
  p.out = call.view(out);
  if (p.has_rows() && p.Dv > 0) run(p);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
    OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed, int64_t causal, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, std::optional<double> scale, double softcap, double dropout_p) {
  const Device device(q);
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
  if (p.has_rows()) run(p);
  return {out, lse, row_max, row_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, Tensor row_sum,
    OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2, OptionalTensor alibi_slopes, OptionalTensor sinks,
    OptionalTensor key_lengths, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed,
    int64_t causal, std::optional<int64_t> window_left, std::optional<int64_t> window_right,
    std::optional<double> scale, double softcap, double dropout_p, int64_t grads) {
  const Device device(q);
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
  SinkGradients sink_gradients(grads & of_sinks ? p.Hq : 0);
  if (grads & of_sinks) {
    p.dsinks = sink_gradients.data();
    result[5] = zeros({p.Hq}, sinks->scalar_type());
  }
  if (grads != 0 && p.has_rows()) run(p, q);  // also without keys: a sink's logit is the lse then
  if (grads & of_sinks) sink_gradients.store(result[5]);
  return {result[0], result[1], result[2], result[3], result[4], result[5]};
}

Tensor attention_weights(Tensor q, Tensor k, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
                         OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths,
                         OptionalTensor row_max, OptionalTensor row_sum, OptionalTensor row_positions,
                         int64_t num_queries, int64_t causal, std::optional<int64_t> window_left,
                         std::optional<int64_t> window_right, std::optional<double> scale, double softcap) {
  const Device device(q);
  WeightsParams p;
  Call call("attention_weights", q, k, nullptr, p);
  const OptionalTensor none;
  call.set_options({mask, bias, bias2, alibi_slopes, sinks, key_lengths, none, none, none, causal, window_left,
                    window_right, scale, softcap, 0.0},
                   p);
  ATTN_EXT_EXPECT(row_positions || num_queries == p.Lq, call.op, "num_queries must be the ", p.Lq,
                  " rows of q where no row_positions are given, not ", num_queries);
  if (row_positions) {
    expect_here(call.op, "row_positions", *row_positions);
    expect_integers(call.op, "row_positions", *row_positions);
    ATTN_EXT_EXPECT(row_positions->size(0) == p.Lq, call.op, "row_positions must have one entry for each of the ", p.Lq,
                    " rows of q, not shape ", shape_string(*row_positions));
    constexpr int64_t most = int64_t{1} << 40;
    ATTN_EXT_EXPECT(num_queries >= 0 && num_queries <= most, call.op,
                    "num_queries must lie between 0 and 2^40, not be ", num_queries);
    call.positions = read_positions(call.op, *row_positions, num_queries);
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
  if (!p.has_rows() || p.Lk == 0) return weights;
  p.weights = view_of(weights);

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
    run(statistics);
  }
  p.row_max = row_view_of(call, p, max);
  p.row_sum = row_view_of(call, p, sum);
  run(p);
  return weights;
}

}  // namespace attn_ext
