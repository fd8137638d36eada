// The CPU as the place of a call (device.h): lengths, tables and numbers are read and checked at once, and a bad one is
// refused before anything runs.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <new>
#include <vector>

#include "cache_shape.h"
#include "checks.h"
#include "cpu/dispatch.h"
#include "params.h"
#include "torch_parallel.h"

namespace attn_ext {

// Held while an op runs: on a GPU, the device of its tensors is the current one meanwhile.
struct Device {
  explicit Device(const Tensor&) {}
};

inline int32_t device_type() { return aoti_torch_device_type_cpu(); }
inline int32_t device_index() { return 0; }

inline void expect_here(const char* op, const char* name, const Tensor& t) {
  ATTN_EXT_EXPECT(t.is_cpu(), op, name, " must be on the CPU, like the other tensors of this call");
}

[[noreturn]] inline void no_memory() { throw std::bad_alloc(); }

// Fills a dense tensor with zeros. (Neither this nor the next uses torch's thread pool: that one hangs in a forked child.)
void set_zero(Tensor& t);

// A contiguous copy of the first `rows` rows.
Tensor contiguous_rows(const Tensor& t, int64_t rows);

// ---- The small tensors of a call ------------------------------------------------------------------------------------

using Integers = std::vector<int64_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

// key_lengths, each in [0, most].
Integers read_lengths(const char* op, const Tensor& t, int64_t most);

// cu_seqlens: from 0 to `total`, never falling. And the longest of its sequences.
Integers read_boundaries(const char* op, const char* name, const Tensor& t, const char* of, int64_t total);
int64_t longest(const Integers& cu, int64_t total);

// row_positions, each in [0, end).
Integers read_positions(const char* op, const Tensor& t, int64_t end);

// (rows, heads) or (heads,) of float32; (heads,) of any float dtype.
Floats read_slopes(const Tensor& t);
Doubles read_sinks(const Tensor& t);

// One int64.
void set_seed(const Tensor& seed, AttentionParams& p);

// The gradients of sinks on their way to a tensor of the sinks' dtype.
class SinkGradients {
 public:
  explicit SinkGradients(int64_t heads) : sums_(static_cast<size_t>(heads)) {}
  double* data() { return sums_.data(); }
  void store(Tensor& to) const;

 private:
  Doubles sums_;
};

// What a call over a cache says with numbers: lengths, boundaries, the block table. Everything is checked in the order in
// which the shapes are.
class CacheValues {
 public:
  const int64_t* totals() const { return totals_.data(); }      // positions held with what this call appends
  const int64_t* boundaries() const { return cu_.data(); }      // packed calls
  const int64_t* positions() const { return lengths_.data(); }  // of the first new token
  const int64_t* query_positions() const { return query_positions_.data(); }

  // The table, (sequences, blocks).
  void read_table(const Tensor& table, CacheLayout& layout);
  void read_lengths(const CacheShape& shape, const Tensor& t);
  void read_boundaries(const CacheShape& shape, const Tensor& t);

  // Packed calls: a tensor of tokens has the rows that the boundaries end with.
  void expect_rows(const CacheShape& shape, const char* name, const Tensor& t) const;

  // New tokens come, `count` a sequence where they are not packed. Nothing is written yet.
  void append(const CacheShape& shape, int64_t count);

  // Rotary tables have `positions` rows. Returns how many of them the call needs.
  int64_t turn(const CacheShape& shape, int64_t positions);

  // Queries come, `count` a sequence where they are not packed; fills the longest numbers of queries and keys.
  void attend(const CacheShape& shape, int64_t count, bool rotates, ForwardParams& p);

  // All is known. (Here it has been looked at.)
  void settle(const CacheShape&) const {}

  // The most rows that a sequence has of packed tokens.
  int64_t most_rows() const { return longest(cu_, 0); }

 private:
  int64_t tokens(const CacheShape& shape, size_t b, int64_t count) const {
    return shape.packed ? cu_[b + 1] - cu_[b] : count;
  }
  int32_t block_of(size_t b, int64_t n) const { return table_[static_cast<int64_t>(b) * table_stride_ + n]; }
  void expect_room(const CacheShape& shape, size_t b, int64_t position, int64_t count) const;
  void expect_blocks(const CacheShape& shape, size_t b, int64_t begin, int64_t end) const;
  void expect_places_apart(const CacheShape& shape) const;

  Integers lengths_, totals_, cu_, query_positions_;
  Tensor table_memory_;
  const int32_t* table_ = nullptr;
  int64_t table_stride_ = 0;
};

// ---- Kernels --------------------------------------------------------------------------------------------------------

inline void run(const ForwardParams& p) {
  const FloatEnvironment environment;
  cpu::kernels().forward(p, torch_parallel());
}
inline void run(const BackwardParams& p, const Tensor&) {
  const FloatEnvironment environment;
  cpu::kernels().backward(p, torch_parallel());
}
inline void run(const WeightsParams& p) {
  const FloatEnvironment environment;
  cpu::kernels().weights(p, torch_parallel());
}
inline void run(const AppendParams& p) {
  const FloatEnvironment environment;
  cpu::kernels().append(p, torch_parallel());
}

}  // namespace attn_ext
