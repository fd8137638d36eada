#include "on_cuda/device.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>

#include "on_cuda/kernels.h"

namespace attn_ext {
namespace {

cuda::StreamHandle current_stream() {
#if defined(ATTN_EXT_CUDA_SIM)
  return nullptr;
#else
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index(), &stream));
  return stream;
#endif
}

cuda::IntegerView integers_of(const Tensor& t) {
  return {t.data_ptr(), t.scalar_type() == ScalarType::Long, t.stride(t.dim() - 1)};
}

Integers checked_lengths(const Tensor& t, int64_t most, cuda::Wrong wrong) {
  Integers lengths(t.size(0));
  kernels::check_lengths({wrong, integers_of(t), t.size(0), most, lengths.data()}, current_stream());
  return lengths;
}

template <class T>
Workspace<T> copied_numbers(const Tensor& t) {
  const bool is_table = t.dim() == 2;
  cuda::NumbersCopy copy;
  copy.rows = is_table ? t.size(0) : 1;
  copy.columns = t.size(t.dim() - 1);
  copy.from.data = t.data_ptr();
  copy.from.dtype = dtype_of(t.scalar_type());
  copy.from.stride_l = is_table ? t.stride(0) : 0;
  copy.from.stride_d = t.stride(t.dim() - 1);
  Workspace<T> numbers(copy.rows * copy.columns);
  copy.to = numbers.data();
  copy.to_double = std::is_same_v<T, double>;
  kernels::copy_numbers(copy, current_stream());
  return numbers;
}

}  // namespace

#if defined(ATTN_EXT_CUDA_SIM)
Device::Device(const Tensor&) {}
Device::~Device() = default;
int32_t device_type() { return aoti_torch_device_type_cpu(); }
int32_t device_index() { return 0; }

void expect_here(const char* op, const char* name, const Tensor& t) {
  ATTN_EXT_EXPECT(t.is_cpu(), op, name, " must be on the CPU, like the other tensors of this call");
}
#else
Device::Device(const Tensor& t) {
  if (!t.is_cuda()) return;  // refused in a moment
  CUDAGuardHandle guard = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(t.get_device_index(), &guard));
  guard_ = guard;
}
Device::~Device() {
  if (guard_ != nullptr) aoti_torch_delete_cuda_guard(static_cast<CUDAGuardHandle>(guard_));
}
int32_t device_type() { return aoti_torch_device_type_cuda(); }
int32_t device_index() { return torch::stable::accelerator::getCurrentDeviceIndex(); }

void expect_here(const char* op, const char* name, const Tensor& t) {
  ATTN_EXT_EXPECT(t.is_cuda() && t.get_device_index() == device_index(), op, name,
                  " must be on one GPU with the other tensors of this call");
}
#endif

void no_memory() {
  throw std::runtime_error(
      "attn_ext: the GPU gave no memory for an output or a workspace: it has too little left, or a kernel before "
      "failed");
}

void set_zero(Tensor& t) { torch::stable::zero_(t); }

Tensor contiguous_rows(const Tensor& t, int64_t rows) {
  Tensor all = t;
  return torch::stable::contiguous(torch::stable::narrow(all, 0, 0, rows));
}

// ---- The small tensors of a call ------------------------------------------------------------------------------------

Integers read_lengths(const char*, const Tensor& t, int64_t most) {
  return checked_lengths(t, most, cuda::Wrong::key_lengths);
}

Integers read_boundaries(const char*, const char*, const Tensor& t, const char*, int64_t total) {
  Integers cu(t.size(0));
  kernels::check_boundaries({integers_of(t), t.size(0) - 1, total, cu.data()}, current_stream());
  return cu;
}

Integers read_positions(const char*, const Tensor& t, int64_t end) {
  return checked_lengths(t, end - 1, cuda::Wrong::row_positions);
}

Floats read_slopes(const Tensor& t) { return copied_numbers<float>(t); }
Doubles read_sinks(const Tensor& t) { return copied_numbers<double>(t); }

void set_seed(const Tensor& seed, AttentionParams& p) {
  p.dropout_seed_at = static_cast<const uint64_t*>(seed.data_ptr());
}

void SinkGradients::store(Tensor& to) const { torch::stable::copy_(to, sums_); }

// ---- A call over a cache --------------------------------------------------------------------------------------------

void CacheValues::read_table(const Tensor& table, CacheLayout& layout) {
  check_.table = integers_of(table);
  check_.table_stride = table.stride(0);
  check_.blocks = table.size(1);
  table_ = Workspace<int32_t>(table.size(0) * table.size(1));
  check_.table_to = table_.data();
  layout.block_table = table_.data();
  layout.table_stride = table.size(1);
}

void CacheValues::read_lengths(const CacheShape& shape, const Tensor& t) {
  check_.batch = shape.batch;
  check_.capacity = shape.capacity;
  check_.page = shape.page;
  check_.pool = shape.pool;
  check_.ring = shape.ring;
  check_.lengths = integers_of(t);
  numbers_ = Workspace<int64_t>(3 * shape.batch);
  check_.totals = numbers_.data();
  check_.positions = numbers_.data() + shape.batch;
  check_.query_positions = numbers_.data() + 2 * shape.batch;
}

void CacheValues::read_boundaries(const CacheShape& shape, const Tensor& t) {
  cu_ = Workspace<int64_t>(shape.batch + 1);
  boundaries_.from = integers_of(t);
  boundaries_.sequences = shape.batch;
  boundaries_.to = cu_.data();
  check_.cu = cu_.data();
}

void CacheValues::expect_rows(const CacheShape& shape, const char* name, const Tensor& t) {
  ATTN_EXT_EXPECT(boundaries_.total == cuda::BoundariesCheck::kUnknown || t.size(0) == boundaries_.total, shape.op,
                  "packed q, k and v must have as many rows, but ", name, " has ", t.size(0), " beside ",
                  boundaries_.total);
  boundaries_.total = t.size(0);
}

void CacheValues::append(const CacheShape&, int64_t count) {
  check_.appends = true;
  check_.tokens = count;
}

int64_t CacheValues::turn(const CacheShape&, int64_t positions) {
  check_.rotary_positions = positions;
  return positions;
}

void CacheValues::attend(const CacheShape& shape, int64_t count, bool, ForwardParams& p) {
  check_.asks = true;
  check_.queries = count;
  check_.window_left = p.window_left;
  p.Lq = shape.packed ? boundaries_.total : count;
  p.Lk = shape.capacity;
}

void CacheValues::settle(const CacheShape& shape) {
  if (shape.packed) kernels::check_boundaries(boundaries_, current_stream());
  kernels::check_cache(check_, current_stream());
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

void run(const ForwardParams& p) {
  const int64_t bytes = cuda::forward_workspace_bytes(p);
  const auto memory = bytes > 0 ? Workspace<int64_t>((bytes + 7) / 8) : Workspace<int64_t>();
  kernels::forward(p, memory.data(), current_stream());
}

void run(const BackwardParams& p, const Tensor& q) {
  const int64_t rows = q.numel() / p.D;  // as row_max has them
  const Tensor delta = empty({rows}, statistics_dtype(q));
  kernels::backward(p, delta.data_ptr(), current_stream());
}

void run(const WeightsParams& p) { kernels::weights(p, current_stream()); }
void run(const AppendParams& p) { kernels::append(p, current_stream()); }

Tensor take_fault(Tensor place) {
  const Device device(place);
  Tensor fault = empty({1}, ScalarType::Long);
  kernels::take_fault(static_cast<int64_t*>(fault.data_ptr()), current_stream());
  return fault;
}

}  // namespace attn_ext
