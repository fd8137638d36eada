// Moving rows of q, k, v into the layouts that the register tile reads, converting to T on the way.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Calls f(Storage*) with a typed null pointer for the storage type of `dtype`.
template <class F>
inline auto with_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bfloat16:
      return f(static_cast<bf16*>(nullptr));
    case DType::float16:
      return f(static_cast<f16*>(nullptr));
    case DType::float64:
      return f(static_cast<double*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

// The same for what a cache may hold.
template <class F>
inline auto with_cache_storage(DType dtype, F&& f) {
  return dtype == DType::int8 ? f(static_cast<int8_t*>(nullptr)) : with_storage(dtype, f);
}

template <class T, class Storage>
inline constexpr bool kVectorLoads = std::is_same_v<T, Storage> || (sizeof(T) == 4 && sizeof(Storage) <= 2);

// Rows to be packed: evenly spaced ones, or pointers to each (`const char* const*`, from a cache).
struct EvenRows {
  const char* first;
  int64_t stride;  // bytes

  EvenRows(const TensorView& view, const char* row) : first(row), stride(view.stride_l * size_of(view.dtype)) {}
  const char* operator[](int64_t r) const { return first + r * stride; }
};

// Whether rows lie evenly apart. Every one is looked at: pages between the first and the last may have changed places.
inline bool evenly_apart(const char* const* rows, int64_t count) {
  bool even = true;
  for (int64_t r = 2; r < count; ++r) even &= rows[r] - rows[r - 1] == rows[1] - rows[0];
  return even;
}

inline constexpr int64_t round_up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Finds out whether any number passed to see() was NaN or Inf: 0·x is NaN then, and stays in the sum. Two sums, so that
// one multiply-add need not wait for the one before.
template <class T>
struct FiniteCheck {
  using V = Vec<T>;
  V even = V::zero(), odd = V::zero();

  void see(V x, V y) {
    even = V::fma(x, V::zero(), even);
    odd = V::fma(y, V::zero(), odd);
  }
  bool all_finite() const {
    const T total = (even + odd).sum();
    return total == total;
  }
};

// The largest magnitude of x[0 … count), count a multiple of N; NaN where NaN or Inf is among them.
template <class T>
inline T largest_magnitude(const T* x, int64_t count) {
  using V = Vec<T>;
  V largest = V::zero();
  FiniteCheck<T> check;
  for (int64_t i = 0; i < count; i += V::N) {
    const V size = V::abs(V::load(x + i));
    largest = V::max(size, largest);
    check.see(size, V::zero());
  }
  return check.all_finite() ? largest.largest() : std::numeric_limits<T>::quiet_NaN();
}

// Copies n elements `stride` apart to dst as T.
template <class T, class Storage>
inline void copy_row(const Storage* src, int64_t stride, int64_t n, T* dst) {
  using V = Vec<T>;
  int64_t d = 0;
  if constexpr (kVectorLoads<T, Storage>) {
    if (stride == 1) {
      for (; d + V::N <= n; d += V::N) V::load(src + d).store(dst + d);
    }
  }
  for (; d < n; ++d) dst[d] = convert_from<T>(src[d * stride]);
}

// The same, times `factor`, for a source whose dtype is known only at run time.
template <class T>
inline void copy_row_scaled(const TensorView& view, const char* src, int64_t n, T factor, T* dst) {
  with_storage(view.dtype, [&]<class Storage>(Storage*) {
    copy_row<T>(reinterpret_cast<const Storage*>(src), view.stride_d, n, dst);
  });
  if (factor != T(1)) {
    for (int64_t d = 0; d < n; ++d) dst[d] *= factor;
  }
}

// Stores n numbers of T, each times `factor`, as the dtype of `view`.
template <class T>
inline void store_row(const TensorView& view, char* dst, int64_t n, T factor, const T* src) {
  using V = Vec<T>;
  with_storage(view.dtype, [&]<class Storage>(Storage*) {
    Storage* out = reinterpret_cast<Storage*>(dst);
    const V by = V::broadcast(factor);
    int64_t d = 0;
    if constexpr (kVectorLoads<T, Storage>) {
      if (view.stride_d == 1) {
        for (; d + V::N <= n; d += V::N) (V::load(src + d) * by).store(out + d);
      }
    }
    for (; d < n; ++d) out[d * view.stride_d] = convert_to<Storage>(static_cast<T>(src[d] * factor));
  });
}

// Whether two bf16 (four int8) of a row travel through a transposition as one word: half (a quarter) of the shuffles.
template <class T, class Storage>
inline constexpr bool kInWords = std::is_same_v<T, float> &&
                                 (std::is_same_v<Storage, bf16> || std::is_same_v<Storage, int8_t>);

// What the lanes of a transposition hold: numbers of T, or words.
template <class T, class Storage>
using Packed = std::conditional_t<kInWords<T, Storage>, Word<Storage>, T>;

// Features that one turn of N rows takes: a vector's width in memory.
template <class T, class Storage>
inline constexpr int kTurn = Vec<T>::N* kParts<Packed<T, Storage>>;

// turned[i] = word (or number) i of all N rows, from feature d on.
template <class T, class Storage>
[[gnu::always_inline]] inline void load_turned(const Storage* const (&rows)[Vec<T>::N], int64_t d,
                                               Vec<T> (&turned)[Vec<T>::N]) {
  if constexpr (kInWords<T, Storage>) {
    Vec<T>::load_transposed([&](int r) { return reinterpret_cast<const T*>(rows[r] + d); }, turned);
  } else {
    Vec<T>::load_transposed([&](int r) { return rows[r] + d; }, turned);
  }
}

// Stores word by word what the lanes hold, each feature as a vector of its own.
template <class B, int part = 0, class T>
[[gnu::always_inline]] inline void store_parts(Vec<T> row, int64_t width, T* to) {
  part_of<B, part>(row).store(to);
  if constexpr (part + 1 < kParts<B>) store_parts<B, part + 1>(row, width, to + width);
}

// Rows of k (or v) of one head as panels of kPanel rows, transposed: panel p holds rows p·kPanel …, and element (row, d)
// at [d][row]. Rows past `rows` are zeros; the last panel is one vector wide where that is enough. Panel p starts at
// dst + p · kPanel · columns.
template <class T, class Rows>
inline void pack_transposed(const TensorView& view, Rows source, int64_t rows, int64_t columns, T* dst) {
  using V = Vec<T>;
  constexpr int N = V::N;
  with_cache_storage(view.dtype, [&]<class Storage>(Storage*) {
    for (int64_t r0 = 0; r0 < rows; r0 += N) {
      const int64_t panel = r0 / kPanel<T>;
      const int64_t width = rows - panel * kPanel<T> > N ? kPanel<T> : N;
      T* to = dst + panel * kPanel<T> * columns + r0 % kPanel<T>;
      const int64_t real_rows = std::min<int64_t>(N, rows - r0);
      const auto row = [&](int64_t r) { return reinterpret_cast<const Storage*>(source[r0 + r]); };
      int64_t d = 0;
      if constexpr (kVectorLoads<T, Storage>) {
        if (view.stride_d == 1 && real_rows == N) {
          const Storage* from[N];
          for (int r = 0; r < N; ++r) from[r] = row(r);
          constexpr int turn = kTurn<T, Storage>;
          for (; d + turn <= columns; d += turn) {
            V turned[N];
            load_turned<T, Storage>(from, d, turned);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i, to += turn / N * width) {
              store_parts<Packed<T, Storage>>(turned[i], width, to);
            }
          }
        }
      }
      for (; d < columns; ++d, to += width) {
        T lanes[N] = {};
        for (int64_t r = 0; r < real_rows; ++r) lanes[r] = convert_from<T>(row(r)[d * view.stride_d]);
        V::load(lanes).store(to);
      }
    }
  });
}

// A vector of T from `count` (at most N) numbers `stride` apart, zeros behind them.
template <class T, class Storage>
inline Vec<T> load_some(const Storage* src, int64_t stride, int64_t count) {
  T lanes[Vec<T>::N] = {};
  for (int64_t d = 0; d < count; ++d) lanes[d] = convert_from<T>(src[d * stride]);
  return Vec<T>::load(lanes);
}

// The same rows as panels of kPanel columns, row by row: panel c holds columns c·kPanel …, element (row, d) at
// [row][d − c·kPanel]. Columns up to the next multiple of N are zeros. Panel c starts at dst + c · kPanel · capacity.
// Returns whether all numbers were finite.
template <class T, class Rows>
inline bool pack_rows(const TensorView& view, Rows source, int64_t rows, int64_t columns, int64_t capacity, T* dst) {
  using V = Vec<T>;
  constexpr int N = V::N;
  FiniteCheck<T> check;
  with_cache_storage(view.dtype, [&]<class Storage>(Storage*) {
    for (int64_t column = 0; column < columns; column += kPanel<T>) {
      const int64_t left = columns - column;
      const bool two = left > N;  // vectors in this panel
      const int64_t width = two ? kPanel<T> : N;
      const int64_t first = column * view.stride_d;
      T* to = dst + column * capacity;
      if constexpr (kVectorLoads<T, Storage>) {
        if (view.stride_d == 1 && left >= kPanel<T>) {
          for (int64_t r = 0; r < rows; ++r, to += width) {
            const Storage* from = reinterpret_cast<const Storage*>(source[r]) + first;
            const V x = V::load(from), y = V::load(from + N);
            check.see(x, y);
            x.store(to);
            y.store(to + N);
          }
          continue;
        }
      }
      for (int64_t r = 0; r < rows; ++r, to += width) {
        const Storage* from = reinterpret_cast<const Storage*>(source[r]) + first;
        const V x = load_some<T>(from, view.stride_d, std::min<int64_t>(left, N));
        const V y = two ? load_some<T>(from + N * view.stride_d, view.stride_d, std::min<int64_t>(left - N, N)) : x;
        check.see(x, y);
        x.store(to);
        if (two) y.store(to + N);
      }
    }
  });
  return check.all_finite();
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
