#include "tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "device.h"
#include "positions.h"

namespace attn_ext {
namespace {

Tensor empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, ScalarType type) {
  AtenTensorHandle handle = nullptr;
  // The stable ABI's own number for the dtype.
  const StableIValue dtype = torch::stable::detail::from(type);
  const AOTITorchError error = aoti_torch_empty_strided(rank, sizes, strides, static_cast<int32_t>(dtype),
                                                        device_type(), device_index(), &handle);
  if (error != AOTI_TORCH_SUCCESS) no_memory();  // all else about the call is right
  return Tensor(handle);
}

// Steps of `stride` bytes, from `lo` to `hi` of them.
struct Steps {
  int64_t stride, lo, hi;
};

// Whether some numbers of steps lead exactly `distance` bytes far. Sorted by falling stride, nested as strides mostly are,
// only one or two numbers of each kind come into question.
bool reachable(const std::vector<Steps>& all, size_t from, int64_t distance, int& patience) {
  if (from == all.size()) return distance == 0;
  if (--patience < 0) return true;
  int64_t below = 0, above = 0;  // what the steps behind this kind can make up for
  for (size_t n = from + 1; n < all.size(); ++n) {
    below += all[n].lo * all[n].stride;
    above += all[n].hi * all[n].stride;
  }
  const auto [stride, lo, hi] = all[from];
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
  const int64_t first = std::max(lo, -floor_div(above - distance, stride));
  const int64_t last = std::min(hi, floor_div(distance - below, stride));
  for (int64_t n = first; n <= last; ++n) {
    if (reachable(all, from + 1, distance - n * stride, patience)) return true;
  }
  return false;
}

Tensor zeroed(Tensor t) {
  set_zero(t);
  return t;
}

}  // namespace

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
    case ScalarType::Char:
      return DType::int8;
    default:
      return DType::float32;
  }
}

ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

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

TensorView packed_view_of(const Tensor& t) {
  TensorView v;
  v.data = t.data_ptr();
  v.dtype = dtype_of(t.scalar_type());
  v.stride_l = t.stride(0);
  v.stride_h = t.stride(1);
  v.stride_d = t.stride(2);
  return v;
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

Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) { return zeroed(empty(sizes, type)); }

std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return sizes;
}

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

Extent extent_of(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) elements += (sizes[d] - 1) * strides[d];
  const auto* begin = static_cast<const char*>(t.data_ptr());
  return {begin, begin + elements * size_of(dtype_of(t.scalar_type()))};
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const int64_t distance = static_cast<const char*>(b.data_ptr()) - static_cast<const char*>(a.data_ptr());
  std::vector<Steps> all;  // those of a forward, and those of b back
  const auto add = [&](int64_t stride, int64_t lo, int64_t hi) {
    if (stride == 0 || lo == hi) return;
    for (Steps& steps : all) {
      if (steps.stride != stride) continue;
      steps.lo += lo;
      steps.hi += hi;
      return;
    }
    all.push_back({stride, lo, hi});
  };
  const int64_t a_bytes = size_of(dtype_of(a.scalar_type())), b_bytes = size_of(dtype_of(b.scalar_type()));
  for (int64_t d = 0; d < a.dim(); ++d) add(a.stride(d) * a_bytes, 0, a.size(d) - 1);
  for (int64_t d = 0; d < b.dim(); ++d) add(b.stride(d) * b_bytes, 1 - b.size(d), 0);
  add(1, 1 - b_bytes, a_bytes - 1);
  std::sort(all.begin(), all.end(), [](const Steps& x, const Steps& y) { return x.stride > y.stride; });
  int patience = 10000;
  return reachable(all, 0, distance, patience);
}

}  // namespace attn_ext
