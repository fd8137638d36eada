// The KV-cache ops as C++ functions over tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "attention.h"

namespace attn_ext {

void kv_cache_append(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cache_lengths,
                     OptionalTensor block_table, OptionalTensor k_scales, OptionalTensor v_scales,
                     OptionalTensor cu_seqlens, OptionalTensor cos, OptionalTensor sin, bool ring, bool interleaved);

std::tuple<Tensor, Tensor> attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_lengths,
                                                   OptionalTensor block_table, OptionalTensor k_scales,
                                                   OptionalTensor v_scales, OptionalTensor cu_seqlens,
                                                   OptionalTensor cos, OptionalTensor sin, bool ring, bool interleaved,
                                                   OptionalTensor alibi_slopes, OptionalTensor sinks, int64_t causal,
                                                   std::optional<int64_t> window_left,
                                                   std::optional<int64_t> window_right, std::optional<double> scale,
                                                   double softcap);

// Both in one: nothing is written unless the whole call is right.
std::tuple<Tensor, Tensor> attention_with_kv_cache_append(
    Tensor q, Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cache_lengths, OptionalTensor block_table,
    OptionalTensor k_scales, OptionalTensor v_scales, OptionalTensor cu_seqlens, OptionalTensor cos, OptionalTensor sin,
    bool ring, bool interleaved, OptionalTensor alibi_slopes, OptionalTensor sinks, int64_t causal,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right, std::optional<double> scale,
    double softcap);

}  // namespace attn_ext
