// New keys and values into a cache, where they belong by position; and rows turned by their positions on the way (rotary
// embedding, Su et al. 2021, arXiv:2104.09864). Costs what is written, whatever the cache holds already.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// x turned in place: pairs (x[a], x[b]) by the angles of one position. Products and sums are rounded one by one, as they
// are where the same is put together of single operations.
template <class T>
inline void turn_row(const AppendParams& p, int64_t position, T* x) {
  const int64_t pairs = p.rotary_dim / 2;
  const T* cos = static_cast<const T*>(p.cos) + position * p.cos_stride;
  const T* sin = static_cast<const T*>(p.sin) + position * p.sin_stride;
  const int64_t step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : pairs;
  for (int64_t n = 0; n < pairs; ++n) {
    T &first = x[n * step], &second = x[n * step + apart];
    const T turned = first * cos[n] - second * sin[n];
    second = second * cos[n] + first * sin[n];
    first = turned;
  }
}

// round(x / scale) with scale = max|x| / 127, and the scale. A row with NaN or Inf gets a NaN scale, and so stays NaN.
// Up to the next multiple of N, x is followed by zeros; it is overwritten.
template <class T>
inline float quantize_row(T* x, int64_t n, int64_t stride, int8_t* to) {
  using V = Vec<T>;
  const int64_t padded = round_up_to(n, V::N);
  const auto scale = static_cast<float>(largest_magnitude(x, padded) / T(127));
  if (!std::isfinite(scale) || scale == 0) {
    for (int64_t d = 0; d < n; ++d) to[d * stride] = 0;
    return std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN();
  }
  const V divisor = V::broadcast(static_cast<T>(scale));
  const V whole = V::broadcast(sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52));  // added to a number, it leaves no fraction
  for (int64_t d = 0; d < padded; d += V::N) ((V::load(x + d) / divisor + whole) - whole).store(x + d);
  for (int64_t d = 0; d < n; ++d) to[d * stride] = static_cast<int8_t>(std::clamp(x[d], T(-127), T(127)));
  return scale;
}

// x rounded to what a tensor of `dtype` holds.
template <class T>
inline void round_row(DType dtype, int64_t n, T* x) {
  with_storage(dtype, [&]<class Storage>(Storage*) {
    for (int64_t d = 0; d < n; ++d) x[d] = convert_from<T>(convert_to<Storage>(x[d]));
  });
}

template <class T>
void append_of(const AppendParams& p, const Parallel& parallel) {
  // About how many bytes pay for waking a second thread.
  constexpr int64_t kBytesPerThread = 1 << 17;
  const int64_t rows = p.batch * p.heads * p.n;
  const int64_t bytes = rows * p.D * (size_of(p.from.dtype) + size_of(p.to.dtype));
  const Parallel threads{static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, parallel.threads)),
                         parallel.run};
  const bool as_it_is = p.cos == nullptr && p.from.dtype == p.to.dtype;

  share_tasks(threads, p.batch * p.heads, [&](auto&& next) {
    const auto x = std::make_unique<T[]>(static_cast<size_t>(round_up_to(p.D, Vec<T>::N)));
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t b = task / p.heads, h = task % p.heads;
      const int64_t first = p.cu ? p.cu[b] : 0, count = p.cu ? p.cu[b + 1] - first : p.n;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = p.positions[b] + i;
        const char* from = address(p.from, p.batch, b, h, first + i);
        char* to =
            p.to_packed ? address(p.to, p.batch, b, h, first + i) : cache_row(p.layout, p.to, p.batch, b, h, position);
        if (as_it_is) {
          const int64_t size = size_of(p.from.dtype);
          if (p.from.stride_d == 1 && p.to.stride_d == 1) {
            std::memcpy(to, from, static_cast<size_t>(p.D * size));
          } else {
            for (int64_t d = 0; d < p.D; ++d) {
              std::memcpy(to + d * p.to.stride_d * size, from + d * p.from.stride_d * size, static_cast<size_t>(size));
            }
          }
          continue;
        }
        copy_row_scaled<T>(p.from, from, p.D, T(1), x.get());
        if (p.cos) turn_row<T>(p, position, x.get());
        if (p.to.dtype == DType::int8) {
          // A turned key is what a cache of the key's own dtype would hold, and so rounded as there.
          if (p.cos) round_row<T>(p.from.dtype, p.D, x.get());
          const float scale = quantize_row<T>(x.get(), p.D, p.to.stride_d, reinterpret_cast<int8_t*>(to));
          *reinterpret_cast<float*>(cache_row(p.layout, p.scale, p.batch, b, h, position)) = scale;
        } else {
          store_row<T>(p.to, to, p.D, T(1), x.get());
        }
      }
    }
  });
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
