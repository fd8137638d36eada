// What the matrix products of attention are made of: how the factors are held, and who multiplies them.
//
// Left factors (q, weights) lie row by row; right factors (k, v) in panels of kPanel columns. Forward, backward and the
// weights are written over these names; VectorProducts serves every dtype on every ISA, PairProducts (where the ISA has
// instructions for it) bf16.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Both factors as T, by the register tile of gemm-inl.h.
template <class Number>
struct VectorProducts {
  using T = Number;
  using Left = T;
  using Right = T;
  static constexpr bool kPairs = false, kKeysAsTheyLie = false, kBytesAsTheyLie = false;
  static constexpr int kRows = kTileRows<T>;  // of a product at a time
  struct Session {};                          // what a thread must hold while it multiplies

  // Rows of a left factor and of a product that must be there.
  static constexpr int64_t padded_rows(int64_t rows) { return rows; }
  // Numbers in a row of a left factor, and rows of a right factor, for a sum of K products.
  static constexpr int64_t depth(int64_t K) { return K; }
  static constexpr int64_t right_rows(int64_t K) { return K; }

  // Where strip i of `count` begins. As even a height as can be: the fewer rows a tile has, the fewer chains hide the
  // time of a multiply-add.
  static int64_t strip_begin(int64_t rows, int64_t count, int64_t i) { return rows * i / count; }

  // A row of q; `factor` is 1 or −1.
  static void load_left(const TensorView& view, const char* src, int64_t n, T factor, T* dst) {
    copy_row_scaled<T>(view, src, n, factor, dst);
  }

  // Whether all numbers of a left factor are finite; n is a multiple of N.
  static bool all_finite(const T* x, int64_t n) {
    FiniteCheck<T> check;
    for (int64_t d = 0; d < n; d += Vec<T>::N) check.see(Vec<T>::load(x + d), Vec<T>::zero());
    return check.all_finite();
  }

  // Rows of k, transposed: panels of kPanel rows.
  template <class Rows>
  static void pack_keys(const TensorView& view, Rows source, int64_t rows, int64_t columns, T* dst) {
    pack_transposed<T>(view, source, rows, columns, dst);
  }

  template <Start start, class... Asked>
  static void multiply(int64_t rows, int vecs, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                       int64_t ldc, Asked... ahead) {
    cpu::ATTN_EXT_ISA_NAMESPACE::multiply<T, start, Along::k>(rows, vecs, K, a, lda, b, ldb, c, ldc, ahead...);
  }
};

// q · kᵀ (or go · vᵀ) for all rows and columns (a multiple of N): q row by row, k in panels.
template <class Products>
inline void multiply_keys(int64_t rows, int64_t columns, int64_t D, const typename Products::Left* q, int64_t q_stride,
                          const typename Products::Right* k, typename Products::T* scores, int64_t ld) {
  using T = typename Products::T;
  const int64_t depth = Products::depth(D), panel_rows = Products::right_rows(D);
  for (int64_t column = 0; column < columns; column += kPanel<T>, k += panel_rows * kPanel<T>) {
    const int vecs = columns - column > Vec<T>::N ? kTileVecs : 1;
    for (int64_t r = 0; r < rows; r += Products::kRows) {
      Products::template multiply<Start::zero>(std::min<int64_t>(Products::kRows, rows - r), vecs, depth,
                                               q + r * q_stride, q_stride, k, vecs * Vec<T>::N,
                                               scores + r * ld + column, ld);
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
