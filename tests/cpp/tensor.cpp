#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#include "positions.h"
#include "storage.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

// All bits set: NaN in every float format, "attend" in a mask.
constexpr int kPoison = 0xff;

// Under a sanitizer the allocation ends where the tensor does; otherwise poison lies around it.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 0;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 64;
#endif
#else
constexpr size_t kGuard = 64;
#endif

constexpr int64_t kFar = (int64_t{1} << 31) + 64;

}  // namespace

void Release::operator()(char* memory) const {
#if defined(__unix__) || defined(__APPLE__)
  if (mapped != 0) {
    munmap(memory, mapped);
    return;
  }
#endif
  std::free(memory);
}

Tensor::Tensor(DType dtype, const Index& sizes, Layout layout) : dtype_(dtype), sizes_(sizes) {
  // The order in which dims lie in memory, innermost first, and what lies between two of their elements.
  std::array<int, 5> order{4, 3, 2, 1, 0};
  if (layout == Layout::transposed) order = {4, 2, 3, 1, 0};
  if (layout == Layout::columns) order = {3, 4, 2, 1, 0};
  int64_t stride = layout == Layout::strided ? 2 : 1;
  for (const int dim : order) {
    const auto d = static_cast<size_t>(dim);
    if (layout == Layout::padded && dim == 3) stride += 3;
    if (layout == Layout::far && dim == 2) stride = kFar;
    strides_[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  first_ = layout == Layout::padded ? 1 : 0;
  span_ = 1;
  for (size_t d = 0; d < 5; ++d) {
    if (sizes[d] <= 1) strides_[d] = 0;
    span_ += (sizes[d] - 1) * strides_[d];
  }
  if (elements() == 0) span_ = 0;

  const size_t bytes = static_cast<size_t>((first_ + span_) * size_of(dtype)) + 2 * kGuard;
#if defined(__unix__) || defined(__APPLE__)
  if (bytes > size_t{1} << 30) {  // address space only; the pages that nobody touches never exist
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = {static_cast<char*>(memory), Release{bytes}};
    return;
  }
#endif
  memory_ = {static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1))), Release{}};
  if (!memory_) throw std::bad_alloc();
  std::memset(memory_.get(), kPoison, bytes);
}

char* Tensor::data() const { return memory_.get() + kGuard + first_ * size_of(dtype_); }

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : sizes_) count *= size;
  return count;
}

double Tensor::get_at(int64_t offset) const {
  const char* at = data() + offset * size_of(dtype_);
  const auto read = [at]<class T>(T x) {
    std::memcpy(&x, at, sizeof x);
    return x;
  };
  switch (dtype_) {
    case DType::float64:
      return read(0.0);
    case DType::float32:
      return static_cast<double>(read(0.0f));
    case DType::bfloat16:
      return static_cast<double>(to_float(read(bf16{})));
    case DType::float16:
      return static_cast<double>(to_float(read(f16{})));
    default:
      return read(uint8_t{}) != 0 ? 1.0 : 0.0;
  }
}

void Tensor::set_at(int64_t offset, double x) {
  char* at = data() + offset * size_of(dtype_);
  const auto write = [at](auto value) { std::memcpy(at, &value, sizeof value); };
  switch (dtype_) {
    case DType::float64:
      return write(x);
    case DType::float32:
      return write(static_cast<float>(x));
    case DType::bfloat16:
      return write(to_bf16(static_cast<float>(x)));
    case DType::float16:
      return write(to_f16(static_cast<float>(x)));
    default:
      return write(static_cast<uint8_t>(x != 0));
  }
}

// A row is written number by number and the others copied from it: filling is half of what the cheaper tests do.
void Tensor::fill(double x) {
  const char* first = nullptr;
  for_each_run([&](int64_t offset, int64_t count) {
    char* run = data() + offset * size_of(dtype_);
    if (first) {
      std::memcpy(run, first, static_cast<size_t>(count * size_of(dtype_)));
      return;
    }
    for (int64_t n = 0; n < count; ++n) set_at(offset + n, x);
    first = run;
  });
}

TensorView Tensor::view() const {
  TensorView v;
  if (!memory_) return v;
  v.data = span_ > 0 ? data() : nullptr;  // as torch has it for empty tensors
  v.dtype = dtype_;
  v.stride_b0 = strides_[0];
  v.stride_b1 = strides_[1];
  v.stride_h = strides_[2];
  v.stride_l = strides_[3];
  v.stride_d = strides_[4];
  return v;
}

TensorView Tensor::view_from(int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) const {
  TensorView v = view();
  if (v) v.data = data() + offset(b0, b1, h, l, d) * size_of(dtype_);
  return v;
}

bool Tensor::poison_intact() const {
  if (!memory_ || memory_.get_deleter().mapped != 0) return true;
  const size_t bytes = static_cast<size_t>((first_ + span_) * size_of(dtype_)) + 2 * kGuard;
  // A copy whose elements are poisoned as well is poison throughout. (In bulk: this is called after every kernel.)
  std::string copy(memory_.get(), bytes);
  for_each_run([&](int64_t offset, int64_t count) {
    const auto at = kGuard + static_cast<size_t>((first_ + offset) * size_of(dtype_));
    std::memset(&copy[at], kPoison, static_cast<size_t>(count * size_of(dtype_)));
  });
  return copy == std::string(bytes, static_cast<char>(kPoison));
}

void check_close(const char* what, const Tensor& got, const Tensor& want, Tolerance tolerance, const Tensor* sums) {
  double largest = 0;
  want.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
    const double x = std::fabs(want.get(b0, b1, h, l, d));
    if (std::isfinite(x)) largest = std::max(largest, x);
  });
  got.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
    const double x = got.get(b0, b1, h, l, d), y = want.get(b0, b1, h, l, d);
    const double sum = sums ? sums->get(b0, b1, h, l, d) : largest;
    const double allowed = tolerance.relative * std::fabs(y) + tolerance.of_sum * sum + tolerance.absolute;
    const bool right = std::isfinite(y) ? std::fabs(x - y) <= allowed : (std::isnan(y) ? std::isnan(x) : x == y);
    CHECK(right, "%s[%lld][%lld][%lld][%lld][%lld] is %.9g, not %.9g (%.2g off, %.2g allowed)", what,
          static_cast<long long>(b0), static_cast<long long>(b1), static_cast<long long>(h), static_cast<long long>(l),
          static_cast<long long>(d), x, y, std::fabs(x - y), allowed);
  });
  CHECK(got.poison_intact(), "%s: something was written outside the tensor's elements", what);
}

void check_same_bits(const char* what, const Tensor& got, const Tensor& want) {
  got.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
    const double x = got.get(b0, b1, h, l, d), y = want.get(b0, b1, h, l, d);
    // All NaNs are alike.
    CHECK((x == y && std::signbit(x) == std::signbit(y)) || (std::isnan(x) && std::isnan(y)),
          "%s[%lld][%lld][%lld][%lld][%lld] is %a here, %a there", what, static_cast<long long>(b0),
          static_cast<long long>(b1), static_cast<long long>(h), static_cast<long long>(l), static_cast<long long>(d),
          x, y);
  });
}

}  // namespace attn_ext::test
