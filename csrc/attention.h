// The ops as C++ functions over tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace attn_ext {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor attention_inference(Tensor q, Tensor k, Tensor v, int64_t causal, std::optional<double> scale);

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
    OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed, int64_t causal, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, std::optional<double> scale, double softcap, double dropout_p);

// grads: which gradients to compute, 1 q, 2 k, 4 v, 8 bias, 16 bias2, 32 sinks; the others come back with no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, Tensor row_sum,
    OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2, OptionalTensor alibi_slopes, OptionalTensor sinks,
    OptionalTensor key_lengths, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, OptionalTensor dropout_seed,
    int64_t causal, std::optional<int64_t> window_left, std::optional<int64_t> window_right,
    std::optional<double> scale, double softcap, double dropout_p, int64_t grads);

Tensor attention_weights(Tensor q, Tensor k, OptionalTensor mask, OptionalTensor bias, OptionalTensor bias2,
                         OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor key_lengths,
                         OptionalTensor row_max, OptionalTensor row_sum, OptionalTensor row_positions,
                         int64_t num_queries, int64_t causal, std::optional<int64_t> window_left,
                         std::optional<int64_t> window_right, std::optional<double> scale, double softcap);

}  // namespace attn_ext
