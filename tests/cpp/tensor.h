// Tensors of the tests: exactly as much memory as their shape and strides need, so that the address sanitizer sees every
// access beyond; everything between and around their elements is poison that must neither count nor change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "params.h"

namespace attn_ext::test {

enum class Layout {
  plain,       // (b0, b1, h, l, d), contiguous
  transposed,  // (b0, b1, l, h, d) in memory, as a (B, L, H, D).transpose(1, 2) view
  padded,      // rows longer than their numbers, the first one not aligned
  strided,     // numbers of a row two apart
  columns,     // a row's numbers a column apart: l runs fastest
  far          // heads more than 2^31 elements apart
};

// Gives memory back to where it came from.
struct Release {
  size_t mapped = 0;  // bytes of address space; 0: from malloc

  void operator()(char* memory) const;
};

class Tensor {
 public:
  using Index = std::array<int64_t, 5>;  // b0, b1, h, l, d

  Tensor() = default;
  Tensor(DType dtype, const Index& sizes, Layout layout = Layout::plain);

  explicit operator bool() const { return memory_ != nullptr; }
  DType dtype() const { return dtype_; }
  const Index& sizes() const { return sizes_; }
  int64_t elements() const;

  // Broadcasting: the index of a dim of size 1 is ignored.
  double get(int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) const { return get_at(offset(b0, b1, h, l, d)); }
  void set(int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d, double x) { set_at(offset(b0, b1, h, l, d), x); }
  void fill(double x);

  // With stride 0 where a size is 1.
  TensorView view() const;
  // The same, starting at another element.
  TensorView view_from(int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) const;

  // Whether everything that is no element still holds poison.
  bool poison_intact() const;

  // Calls f(b0, b1, h, l, d) for every element.
  template <class F>
  void for_each(const F& f) const {
    for (int64_t b0 = 0; b0 < sizes_[0]; ++b0) {
      for (int64_t b1 = 0; b1 < sizes_[1]; ++b1) {
        for (int64_t h = 0; h < sizes_[2]; ++h) {
          for (int64_t l = 0; l < sizes_[3]; ++l) {
            for (int64_t d = 0; d < sizes_[4]; ++d) f(b0, b1, h, l, d);
          }
        }
      }
    }
  }

 private:
  int64_t offset(int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) const {
    return b0 * strides_[0] + b1 * strides_[1] + h * strides_[2] + l * strides_[3] + d * strides_[4];
  }
  // Calls f(offset, count) for elements that lie side by side: whole rows, or one by one where a row does not.
  template <class F>
  void for_each_run(const F& f) const {
    const int64_t count = strides_[4] <= 1 ? sizes_[4] : 1;
    for (int64_t b0 = 0; b0 < sizes_[0]; ++b0) {
      for (int64_t b1 = 0; b1 < sizes_[1]; ++b1) {
        for (int64_t h = 0; h < sizes_[2]; ++h) {
          for (int64_t l = 0; l < sizes_[3]; ++l) {
            for (int64_t d = 0; d < sizes_[4]; d += count) f(offset(b0, b1, h, l, d), count);
          }
        }
      }
    }
  }
  double get_at(int64_t offset) const;
  void set_at(int64_t offset, double x);
  char* data() const;

  DType dtype_ = DType::float32;
  Index sizes_{}, strides_{};
  int64_t first_ = 0;  // elements of poison in front of element 0
  int64_t span_ = 0;   // elements from element 0 to the last
  std::unique_ptr<char, Release> memory_;
};

// Errors allowed: relative to the number wanted (its rounding when it is stored), to what its sum was made of (the
// roundings on the way), and in any case (the step of subnormals).
struct Tolerance {
  double relative = 0, of_sum = 0, absolute = 0;
};

// Compares element by element: NaN only where NaN is wanted, Inf likewise. `sums` holds for every element the sum of its
// terms' absolute values; without it the largest number wanted stands for that.
void check_close(const char* what, const Tensor& got, const Tensor& want, Tolerance tolerance,
                 const Tensor* sums = nullptr);

// Compares to the last bit.
void check_same_bits(const char* what, const Tensor& got, const Tensor& want);

}  // namespace attn_ext::test
