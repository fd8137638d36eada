// Products with k and v as they lie in memory: for tasks of a few rows (one token against a cache), where packing a block
// would cost more than the products that it serves. The same chain of multiply-adds for every number as through the packed
// panels, and so the same bits.
//
// A lane is a key, so k is still turned, but a few features at a time, through a few hundred bytes to 4 KB of stack;
// the sums stay in registers over all of them. One thread, one row, D = 128, Zen 3: fp32 34 → 46 GB/s, bf16 20 → 27.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Whether a tensor's rows can be read in whole vectors.
template <class T>
inline bool direct_layout(const TensorView& view, int64_t width) {
  const bool loads = sizeof(T) == 8 ? view.dtype == DType::float64 : view.dtype != DType::float64;
  return loads && view.stride_d == 1 && width % Vec<T>::N == 0;
}

// Rows that multiply k unpacked, at most. Six would have the registers; a packed panel serves five as well.
inline constexpr int kDirectKeyRows = 4;

// Vectors of keys side by side: chains enough to keep the multiply-adds busy, within the registers.
template <int MR, class B>
inline constexpr int kDirectKeyVecs = MR == 1 || (MR == 2 && kParts<B> < 4) ? 4 : 2;

// Whether rows of k can be turned in whole vectors.
template <class T>
inline bool direct_keys_layout(const TensorView& view, int64_t D) {
  return with_cache_storage(view.dtype, [&]<class Storage>(Storage*) {
    if constexpr (kVectorLoads<T, Storage>) return D > 0 && D % kTurn<T, Storage> == 0 && view.stride_d == 1;
    return false;
  });
}

// scores = q · kᵀ for MR rows and NV vectors of keys.
template <class T, int MR, int NV, class Storage>
inline void direct_keys_tile(int64_t D, const T* q, const char* const* k_rows, T* scores, int64_t ld,
                             Requests& requests) {
  using V = Vec<T>;
  using B = Packed<T, Storage>;
  constexpr int N = V::N, turn = kTurn<T, Storage>;
  V acc[MR][NV];
  constexpr int kTurnBytes = N * turn * static_cast<int>(sizeof(Storage));
  const auto ahead = requests.beside<kTurnBytes>(D / turn * NV);
  int64_t turns = 0;
  // Inlined, or the sums would be stored with every multiply-add: a lambda of its own reaches them through memory.
  const auto step = [&]<bool first>(int64_t d) __attribute__((always_inline)) {
    alignas(kCacheLine) T words[N][NV][N];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      const Storage* from[N];
#pragma GCC unroll 16
      for (int r = 0; r < N; ++r) from[r] = reinterpret_cast<const Storage*>(k_rows[n * N + r]);
      V turned[N];
      load_turned<T, Storage>(from, d, turned);
      ahead.ask(turns++);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) turned[i].store(words[i][n]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      V rows[NV];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) rows[n] = V::load(words[i][n]);
      if (first && i == 0) {
        tile_parts<B, 0, first, Along::k>(q + d, D, rows, acc);
      } else {
        tile_parts<B, 0, false, Along::k>(q + d + i * kParts<B>, D, rows, acc);
      }
    }
  };
  step.template operator()<true>(0);
  for (int64_t d = turn; d < D; d += turn) step.template operator()<false>(d);
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) acc[r][n].store(scores + r * ld + n * N);
  }
}

// scores = q · kᵀ for a strip of rows and keys [from, to). Up to the next multiple of N the last key stands in for those
// that are not there.
template <class T>
inline void direct_keys(DType dtype, int64_t rows, int64_t D, const T* q, const char* const* k_rows, int64_t from,
                        int64_t to, T* scores, int64_t ld, Requests& requests) {
  with_cache_storage(dtype, [&]<class Storage>(Storage*) {
    if constexpr (kVectorLoads<T, Storage>) {
      with_row_count<T, kDirectKeyRows>(rows, [&](auto count) {
        constexpr int N = Vec<T>::N, MR = decltype(count)::value, NV = kDirectKeyVecs<MR, Packed<T, Storage>>;
        int64_t j = from;
        for (; j + NV * N <= to; j += NV * N) {
          direct_keys_tile<T, MR, NV, Storage>(D, q, k_rows + j, scores + j, ld, requests);
        }
        for (; j < to; j += N) {
          const char* some[N];
          for (int r = 0; r < N; ++r) some[r] = k_rows[std::min(j + r, to - 1)];
          direct_keys_tile<T, MR, 1, Storage>(D, q, some, scores + j, ld, requests);
        }
      });
    }
  });
}

// Vectors of columns of a tile with MR rows: enough chains of multiply-adds to keep the units busy.
template <int MR>
inline constexpr int kDirectVecs = MR == 1   ? 8
                                   : MR == 2 ? 4
                                             : kTileVecs;

// Some rows of v, evenly spaced, that stay in L1 while strips of rows pass by.
template <class Storage>
struct SomeValues {
  const Storage* first;
  int64_t stride;
  int64_t count;
};

// acc += weights · v for MR rows, from one column on; NV vectors at a time, then fewer. That many strips of rows share v,
// and the asking for what comes next.
template <class T, int MR, int NV, class Storage>
inline void direct_columns(int64_t column, int64_t Dv, const T* weights, int64_t ld, const SomeValues<Storage>& v,
                           int64_t strips, T* acc, Requests& requests) {
  constexpr int kWidth = NV * Vec<T>::N, kBytes = kWidth * static_cast<int>(sizeof(Storage));
  for (; column + kWidth <= Dv; column += kWidth) {
    tile<T, MR, NV, Start::from_c, Along::k>(v.count, weights, ld, v.first + column, v.stride, acc + column, Dv,
                                             requests.beside<kBytes>(v.count, strips));
  }
  if constexpr (NV > 1) {
    if (column < Dv) direct_columns<T, MR, NV / 2>(column, Dv, weights, ld, v, strips, acc, requests);
  }
}

// acc += weights · v for one strip of rows.
template <class T, class Storage>
inline void direct_values(int64_t rows, int64_t Dv, const T* weights, int64_t ld, const SomeValues<Storage>& v,
                          int64_t strips, T* acc, Requests& requests) {
  with_row_count<T>(rows, [&](auto count) {
    constexpr int MR = decltype(count)::value;
    direct_columns<T, MR, kDirectVecs<MR>>(0, Dv, weights, ld, v, strips, acc, requests);
  });
}

// Calls f(SomeValues, j) for v's rows [from, to), j the first of those it gets: a few keys at a time, so that v is read in
// order, and as many as lie evenly spaced.
template <class T, class F>
inline void for_some_values(DType dtype, const char* const* v_rows, int64_t from, int64_t to, F&& f) {
  constexpr int64_t kChunk = 32;  // 16 KB of fp32 at Dv = 128: stays in L1 while the columns pass by
  with_cache_storage(dtype, [&]<class Storage>(Storage*) {
    if constexpr (kVectorLoads<T, Storage>) {
      for (int64_t j = from; j < to;) {
        const int64_t most = std::min(to, j + kChunk), stride = v_rows[j + 1] - v_rows[j];
        int64_t end = j + 1;
        for (; end < most && v_rows[end] - v_rows[end - 1] == stride; ++end)
          ;
        f(SomeValues<Storage>{reinterpret_cast<const Storage*>(v_rows[j]),
                              stride / static_cast<int64_t>(sizeof(Storage)), end - j},
          j);
        j = end;
      }
    }
  });
}

// Whether v's rows [from, to) hold numbers only.
template <class T>
inline bool direct_values_finite(const TensorView& view, int64_t Dv, const char* const* v_rows, int64_t from,
                                 int64_t to) {
  using V = Vec<T>;
  FiniteCheck<T> check;
  with_cache_storage(view.dtype, [&]<class Storage>(Storage*) {
    for (int64_t j = from; j < to; ++j) {
      const auto* row = reinterpret_cast<const Storage*>(v_rows[j]);
      int64_t d = 0;
      if constexpr (kVectorLoads<T, Storage>) {
        if (view.stride_d == 1) {
          for (; d + V::N <= Dv; d += V::N) check.see(V::load(row + d), V::zero());
        }
      }
      for (; d < Dv; ++d) check.see(V::broadcast(convert_from<T>(row[d * view.stride_d])), V::zero());
    }
  });
  return check.all_finite();
}

// One vector of v's row j, at any column that is a multiple of N.
template <class T>
inline Vec<T> direct_value(DType dtype, const char* row, int64_t column) {
  return with_cache_storage(dtype, [&]<class Storage>(Storage*) {
    if constexpr (kVectorLoads<T, Storage>) {
      return Vec<T>::load(reinterpret_cast<const Storage*>(row) + column);
    } else {
      return Vec<T>::zero();
    }
  });
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
