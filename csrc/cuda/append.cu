// New keys and values into a cache, where they belong by position; and rows turned by their positions on the way (rotary
// embedding, Su et al. 2021, arXiv:2104.09864). A warp takes a row; an element of a turned pair is computed from both of
// the pair's, so that lanes need not exchange. Products and sums are rounded one by one (--fmad=false), as on the CPU: a
// cache has the same bits wherever it was filled (but for what a NaN carries).
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/blocks.cuh"
#include "cuda/kernels.h"
#include "cuda/primitives.cuh"
#include "cuda/scores.cuh"

namespace attn_ext::cuda {
namespace {

constexpr int kThreads = 128;

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class T>
class AppendedRow {
 public:
  ATTN_EXT_DEVICE AppendedRow(const AppendParams& p, const char* from, int64_t position)
      : p_(p), from_(from), position_(position) {}

  // Number d of the row as it goes into the cache, before it is rounded to the cache's dtype.
  ATTN_EXT_DEVICE T number(int64_t d) const {
    if (p_.cos == nullptr || d >= p_.rotary_dim) return raw(d);
    const int64_t pairs = p_.rotary_dim / 2;
    const int64_t pair = p_.interleaved ? d / 2 : d % pairs;
    const bool is_first = p_.interleaved ? d % 2 == 0 : d < pairs;
    const T cos = load_global(static_cast<const T*>(p_.cos) + position_ * p_.cos_stride + pair);
    const T sin = load_global(static_cast<const T*>(p_.sin) + position_ * p_.sin_stride + pair);
    const int64_t apart = p_.interleaved ? 1 : pairs;
    return is_first ? raw(d) * cos - raw(d + apart) * sin : raw(d) * cos + raw(d - apart) * sin;
  }

  // A turned key is what a cache of the key's own dtype would hold, and so rounded as there.
  ATTN_EXT_DEVICE T rounded(int64_t d) const {
    const T x = number(d);
    if (p_.cos == nullptr) return x;
    switch (p_.from.dtype) {
      case DType::bfloat16:
        return convert_from<T>(convert_to<bf16>(x));
      case DType::float16:
        return convert_from<T>(convert_to<f16>(x));
      default:
        return x;
    }
  }

 private:
  ATTN_EXT_DEVICE T raw(int64_t d) const {
    return load_number<T, AnyStorage>(from_ + d * p_.from.stride_d * size_of(p_.from.dtype), p_.from.dtype);
  }

  const AppendParams& p_;
  const char* from_;
  const int64_t position_;
};

// round(x / scale) with scale = max|x| / 127, and the scale. A row with NaN or Inf gets a NaN scale, and so stays NaN.
template <class T>
ATTN_EXT_DEVICE void store_quantized(const AppendParams& p, const AppendedRow<T>& row, int lane, char* to,
                                     char* scale_at) {
  T largest = 0, not_finite = 0;
  for (int64_t d = lane; d < p.D; d += kWarpSize) {
    const T size = std::fabs(row.rounded(d));
    if (!std::isfinite(size)) not_finite = 1;
    largest = Largest()(largest, size);
  }
  largest = join_lanes<kWarpSize, Largest>(largest);
  not_finite = join_lanes<kWarpSize, Sum>(not_finite);
  auto scale = static_cast<float>(largest / T(127));
  if (not_finite != 0 || !std::isfinite(scale)) scale = std::numeric_limits<float>::quiet_NaN();
  for (int64_t d = lane; d < p.D; d += kWarpSize) {
    T number = scale > 0 ? std::nearbyint(row.rounded(d) / static_cast<T>(scale)) : T(0);  // 0 for a NaN scale too
    number = number > T(127) ? T(127) : number < T(-127) ? T(-127) : number;
    store_global(reinterpret_cast<int8_t*>(to) + d * p.to.stride_d, static_cast<int8_t>(number));
  }
  if (lane == 0) store_global(reinterpret_cast<float*>(scale_at), scale);
}

// Rows of `from` that a head has of a batch entry, or of all packed sequences.
ATTN_EXT_SHARED inline int64_t rows_of_head(const AppendParams& p) { return p.cu ? p.total : p.n; }

template <class T>
ATTN_EXT_KERNEL void append_kernel(ATTN_EXT_GRID_CONSTANT const AppendParams p, int64_t rows) {
  const int lane = thread_index() % kWarpSize;
  constexpr int64_t kWarps = kThreads / kWarpSize;
  for (int64_t r = block_index() * kWarps + thread_index() / kWarpSize; r < rows; r += block_count() * kWarps) {
    const int64_t length = rows_of_head(p), at = r % length, h = r / length % p.heads;
    int64_t b = r / length / p.heads, first = 0, count = p.n;
    if (p.cu) {
      b = last_before(p.batch, at, [&](int64_t n) { return entry(p.cu + n); });
      if (b == p.batch) continue;  // behind the last sequence
      first = entry(p.cu + b);
      count = entry(p.cu + b + 1) - first;
    }
    const int64_t i = at - first;
    // Of more tokens than a ring has places the last ones stay: others would be written to the same place at the same time.
    if (p.layout.ring > 0 && i < count - p.layout.ring) continue;
    const int64_t start = entry(p.positions + b);
    if (start < 0) continue;
    const int64_t position = start + i;
    const AppendedRow<T> row(p, address(p.from, p.batch, b, h, at), position);
    char* to = p.to_packed ? address(p.to, p.batch, b, h, at) : cache_row(p.layout, p.to, p.batch, b, h, position);
    if (p.to.dtype == DType::int8) {
      store_quantized(p, row, lane, to, cache_row(p.layout, p.scale, p.batch, b, h, position));
      continue;
    }
    for (int64_t d = lane; d < p.D; d += kWarpSize) {
      store_number(to + d * p.to.stride_d * size_of(p.to.dtype), p.to.dtype, row.number(d));
    }
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class T>
void launch_append(const AppendParams& p, StreamHandle stream) {
  const int64_t rows = p.D > 0 ? (p.cu ? 1 : p.batch) * p.heads * rows_of_head(p) : 0;
  launch_tasks("append", append_kernel<T>, pieces(rows, kThreads / kWarpSize), kThreads, 0, stream, p, rows);
}

}  // namespace

void append(const AppendParams& p, StreamHandle stream) {
  p.from.dtype == DType::float64 ? launch_append<double>(p, stream) : launch_append<float>(p, stream);
}

}  // namespace attn_ext::cuda
