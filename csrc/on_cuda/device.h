// A GPU as the place of a call (device.h). What the call says with numbers stays in device memory: kernels check it on the way
// to the others (cuda/checks.h), nothing waits for the device, and a call can be captured in a CUDA graph. Where the host
// needs a largest length it takes what the shapes allow.
//
// Where ATTN_EXT_CUDA_SIM is defined tensors on the CPU stand in for the GPU's, and tests/cuda_sim runs the kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cache_shape.h"
#include "checks.h"
#include "cuda/checks.h"
#include "params.h"
#include "tensors.h"

namespace attn_ext {

// Held while an op runs: the device of its tensors is the current one meanwhile.
class Device {
 public:
  explicit Device(const Tensor& t);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

 private:
  void* guard_ = nullptr;
};

int32_t device_type();
int32_t device_index();  // of the current device

// On the current device.
void expect_here(const char* op, const char* name, const Tensor& t);

// A failed allocation may also tell of what went wrong on the GPU before.
[[noreturn]] void no_memory();

void set_zero(Tensor& t);
Tensor contiguous_rows(const Tensor& t, int64_t rows);

// ---- The small tensors of a call ------------------------------------------------------------------------------------

// Device memory that is given back, in the order of the stream, when its owner ends.
template <class T>
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(int64_t count)
      : memory_(empty({std::max<int64_t>(count, 1)}, kType)), data_(static_cast<T*>(memory_.data_ptr())) {}
  T* data() const { return data_; }

 private:
  static constexpr ScalarType kType = std::is_same_v<T, double>    ? ScalarType::Double
                                      : std::is_same_v<T, float>   ? ScalarType::Float
                                      : std::is_same_v<T, int32_t> ? ScalarType::Int
                                                                   : ScalarType::Long;
  Tensor memory_;
  T* data_ = nullptr;
};

using Integers = Workspace<int64_t>;
using Floats = Workspace<float>;
using Doubles = Workspace<double>;

Integers read_lengths(const char* op, const Tensor& t, int64_t most);
Integers read_boundaries(const char* op, const char* name, const Tensor& t, const char* of, int64_t total);
inline int64_t longest(const Integers&, int64_t total) { return total; }
Integers read_positions(const char* op, const Tensor& t, int64_t end);
Floats read_slopes(const Tensor& t);
Doubles read_sinks(const Tensor& t);
void set_seed(const Tensor& seed, AttentionParams& p);

class SinkGradients {
 public:
  explicit SinkGradients(int64_t heads) : sums_(zeros({heads}, ScalarType::Double)) {}
  double* data() { return static_cast<double*>(sums_.data_ptr()); }
  void store(Tensor& to) const;

 private:
  Tensor sums_;
};

// Notes what a call over a cache says, and has it all checked at once when it is complete: settle().
class CacheValues {
 public:
  const int64_t* totals() const { return numbers_.data(); }
  const int64_t* positions() const { return numbers_.data() + check_.batch; }
  const int64_t* query_positions() const { return numbers_.data() + 2 * check_.batch; }
  const int64_t* boundaries() const { return cu_.data(); }

  void read_table(const Tensor& table, CacheLayout& layout);
  void read_lengths(const CacheShape& shape, const Tensor& t);
  void read_boundaries(const CacheShape& shape, const Tensor& t);
  void expect_rows(const CacheShape& shape, const char* name, const Tensor& t);
  void append(const CacheShape& shape, int64_t count);
  int64_t turn(const CacheShape& shape, int64_t positions);
  void attend(const CacheShape& shape, int64_t count, bool rotates, ForwardParams& p);
  void settle(const CacheShape& shape);
  int64_t most_rows() const { return boundaries_.total; }

 private:
  cuda::CacheCheck check_;
  cuda::BoundariesCheck boundaries_;
  Workspace<int64_t> numbers_;  // totals, positions, positions of queries
  Workspace<int64_t> cu_;
  Workspace<int32_t> table_;
};

// ---- Kernels --------------------------------------------------------------------------------------------------------

void run(const ForwardParams& p);
void run(const BackwardParams& p, const Tensor& q);
void run(const WeightsParams& p);
void run(const AppendParams& p);

// The fault that this device has noted since the last call, as one int64 there (cuda/checks.h).
Tensor take_fault(Tensor place);

}  // namespace attn_ext
