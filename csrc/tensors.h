// Tensors through the stable ABI: made, looked at, turned into the plain views that kernels take.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "checks.h"
#include "params.h"

namespace attn_ext {

inline constexpr int kMaxRank = 5;

inline constexpr double kMaxElements = 35184372088832.0;  // 2^45: 128 TiB of float32

DType dtype_of(ScalarType type);

// Row statistics, and everything that is summed, are kept in this dtype.
ScalarType statistics_dtype(const Tensor& q);

// (…, H, L, D) as a view; a missing leading dim has stride 0.
TensorView view_of(const Tensor& t);

// A packed tensor (total, H, D).
TensorView packed_view_of(const Tensor& t);

Tensor empty(const std::vector<int64_t>& sizes, ScalarType type);
Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type);

// A dense tensor of `like`'s sizes, the last one replaced by `width`, whose dims lie in memory in the order in which
// like's do. A dim of size 1 or stride 0 says nothing about the order and stays left of its right neighbour.
// attn_ext/_fake.py has the same rule for fake tensors.
Tensor empty_in_order_of(const Tensor& like, int64_t width);
Tensor zeros_in_order_of(const Tensor& like, int64_t width);

// The memory from a tensor's first element to the end of its last. (Not empty tensors.)
struct Extent {
  const char *begin = nullptr, *end = nullptr;

  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};
Extent extent_of(const Tensor& t);

// Whether some byte belongs to an element of both, whose extents meet. (Where the strides are so odd that this takes long to find out: yes.)
bool share_memory(const Tensor& a, const Tensor& b);

std::vector<int64_t> sizes_of(const Tensor& t);

}  // namespace attn_ext
