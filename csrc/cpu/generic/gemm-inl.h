// The register tile that every product goes through: C[MR × NV·N] = (C +) A · B.
//
// Each element of C is one chain of fused multiply-adds over k in rising order, whatever the tile around it looks like.
// That is why a row of the result has the same bits alone, in a chunk, or in a full pass.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

enum class Start { zero, from_c };

// A's neighbours in memory: along k (a row-major A) or along its rows (a transposed A).
enum class Along { k, rows };

template <class T>
inline constexpr int kTileRows = Vec<T>::kTileRows;

// Vectors of B in a full tile, and so the width of the panels that B is packed in.
inline constexpr int kTileVecs = 2;

template <class T>
inline constexpr int kPanel = kTileVecs* Vec<T>::N;

// Neighbours in a row of k that a transposition moved together: a lane holds as many of them as fit a float.
template <class Storage>
struct Word {
  Storage parts[sizeof(float) / sizeof(Storage)];
};

// How many k's a vector of B holds: 1, or those of a word.
template <class B>
inline constexpr int kParts = 1;
template <class Storage>
inline constexpr int kParts<Word<Storage>> = sizeof(float) / sizeof(Storage);

// One of the k's that a vector of B holds.
template <class B, int part, class V>
[[gnu::always_inline]] inline V part_of(V row) {
  if constexpr (std::is_same_v<B, Word<bf16>>) {
    return part == 0 ? V::low_bf16(row) : V::high_bf16(row);
  } else if constexpr (std::is_same_v<B, Word<int8_t>>) {
    return V::template byte<part>(row);
  } else {
    return row;
  }
}

// Adds the products of k = a's first, one part of `rows`, to the accumulators, or makes them the accumulators; then those
// of the parts that follow.
template <class B, int part, bool first, Along along, class T, int MR, int NV>
[[gnu::always_inline]] inline void tile_parts(const T* a, int64_t lda, const Vec<T> (&rows)[NV],
                                              Vec<T> (&acc)[MR][NV]) {
  using V = Vec<T>;
  V bk[NV];
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) bk[n] = part_of<B, part>(rows[n]);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const V ark = V::broadcast_from(a + r * (along == Along::k ? lda : 1));
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) acc[r][n] = first ? ark * bk[n] : V::fma(ark, bk[n], acc[r][n]);
  }
  if constexpr (part + 1 < kParts<B>) {
    static_assert(along == Along::k);  // words come from rows of k
    tile_parts<B, part + 1, false, along>(a + 1, lda, rows, acc);
  }
}

// The products of one row of B.
template <class T, int MR, int NV, Along along, bool first, class B>
[[gnu::always_inline]] inline void tile_step(int64_t k, const T* a, int64_t lda, const B* b, int64_t ldb,
                                             Vec<T> (&acc)[MR][NV]) {
  Vec<T> rows[NV];
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) rows[n] = Vec<T>::load(b + k * ldb + n * Vec<T>::N);
  tile_parts<T, 0, first, along>(a + (along == Along::k ? k : k * lda), lda, rows, acc);
}

// A is read at a[r·lda + k] (Along::k) or a[k·lda + r] (Along::rows); C at c[r·ldc …]; B, numbers of T or of what a cache
// stores, at b[k·ldb …]. What is given as `ahead` is asked for on the way.
template <class T, int MR, int NV, Start start, Along along, class B, class... Asked>
inline void tile(int64_t K, const T* a, int64_t lda, const B* b, int64_t ldb, T* c, int64_t ldc, Asked... ahead) {
  using V = Vec<T>;
  V acc[MR][NV];
  int64_t first = 0;
  if (start == Start::from_c || K == 0) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) acc[r][n] = start == Start::zero ? V::zero() : V::load(c + r * ldc + n * V::N);
    }
  } else {
    // Plain products begin the chains. Beginning with zeros cost 4 % of a tile at K = 64 on Zen 3: there the stores of
    // the tile before take the register ports that a multiply-add's third operand needs, and a product has only two.
    tile_step<T, MR, NV, along, true>(0, a, lda, b, ldb, acc);
    first = 1;
  }
#pragma GCC unroll 4
  for (int64_t k = first; k < K; ++k) {
    tile_step<T, MR, NV, along, false>(k, a, lda, b, ldb, acc);
    (ahead.ask(k), ...);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) acc[r][n].store(c + r * ldc + n * V::N);
  }
}

// Calls f with the number of rows of a strip as a constant.
template <class T, int MR = kTileRows<T>, class F>
inline void with_row_count(int64_t rows, F&& f) {
  if constexpr (MR > 1) {
    if (rows < MR) return with_row_count<T, MR - 1>(rows, f);
  }
  f(std::integral_constant<int, MR>());
}

// One strip (at most kTileRows rows) times one panel of B, `vecs` (1 or 2) vectors wide.
template <class T, Start start, Along along, class... Asked>
inline void multiply(int64_t rows, int vecs, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                     int64_t ldc, Asked... ahead) {
  with_row_count<T>(rows, [&](auto count) {
    constexpr int MR = decltype(count)::value;
    if (vecs == kTileVecs) {
      tile<T, MR, kTileVecs, start, along>(K, a, lda, b, ldb, c, ldc, ahead...);
    } else {
      tile<T, MR, 1, start, along>(K, a, lda, b, ldb, c, ldc, ahead...);
    }
  });
}

// Where B lies: packed panels (row length = the panel's width) or plain rows, of which panels are column ranges.
struct PanelLayout {
  int64_t panel_stride;   // from the first element of one panel to that of the next
  int64_t row_stride;     // 0: the width of the panel
  int64_t first_row = 0;  // the product's k = 0 is this row of B
};

// All rows times all panels of B. Panel p holds columns p·kPanel …; the last one is one vector wide where `columns` (a
// multiple of N) says so. The panel stays in L1 while the strips pass by.
template <class T, Start start, Along along>
inline void multiply_panels(int64_t rows, int64_t columns, int64_t K, const T* a, int64_t lda, const T* b,
                            PanelLayout layout, T* c, int64_t ldc) {
  for (int64_t column = 0; column < columns; column += kPanel<T>, b += layout.panel_stride) {
    const int vecs = columns - column > Vec<T>::N ? kTileVecs : 1;
    const int64_t ldb = layout.row_stride ? layout.row_stride : vecs * Vec<T>::N;
    for (int64_t r = 0; r < rows; r += kTileRows<T>) {
      multiply<T, start, along>(std::min<int64_t>(kTileRows<T>, rows - r), vecs, K,
                                a + r * (along == Along::k ? lda : 1), lda, b + layout.first_row * ldb, ldb,
                                c + r * ldc + column, ldc);
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
