// Products of bf16 factors by instructions that multiply pairs of neighbours along the sum, and add in fp32.
//
// The left factor's neighbours lie side by side as they are: q by rows, and the weights, which are rounded to bf16 for it.
// In the right factor a lane is a column, so it holds words of two: features 2d and 2d + 1 of a key, keys 2j and 2j + 1 of
// a column of v. k is turned word by word, two rows of v are interleaved.
//
// The ISA brings Pairs (words made, numbers narrowed) and PairTile (the multiplication). A product has the same bits
// whatever the tile around it looks like, and with its two factors swapped.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Two numbers as a word.
inline Word<bf16> pair_of(bf16 first, bf16 second) { return {{first, second}}; }

// Numbers of bf16 or int8, exactly.
inline bf16 exact_bf16(bf16 x) { return x; }
inline bf16 exact_bf16(int8_t x) { return to_bf16(static_cast<float>(x)); }

inline float* lanes_of(Word<bf16>* words) { return reinterpret_cast<float*>(words); }
inline const float* lanes_of(const Word<bf16>* words) { return reinterpret_cast<const float*>(words); }

// Calls f(Storage*) for what k and v of a call in bf16 may be: bf16, or the numbers of an int8 cache.
template <class F>
inline void with_pair_storage(DType dtype, F&& f) {
  dtype == DType::int8 ? f(static_cast<int8_t*>(nullptr)) : f(static_cast<bf16*>(nullptr));
}

struct PairProducts {
  using T = float;
  using Left = bf16;
  using Right = Word<bf16>;
  using V = Vec<float>;
  using Tile = PairTile;
  using Words = Pairs;
  using Session = PairTile::Session;
  static constexpr int N = V::N;
  static constexpr bool kPairs = true;
  static constexpr int kRows = PairTile::kRows;
  static constexpr bool kKeysAsTheyLie = PairTile::kKeysAsTheyLie;
  static constexpr bool kBytesAsTheyLie = PairTile::kBytesAsTheyLie;
  using Bytes = PairTile::Bytes;
  static constexpr int64_t kDepth = PairTile::kDepth;

  static constexpr int64_t padded_rows(int64_t rows) { return round_up_to(rows, PairTile::kRowMultiple); }
  static constexpr int64_t depth(int64_t K) { return round_up_to(K, kDepth); }
  static constexpr int64_t right_rows(int64_t K) { return depth(K) / 2; }
  static int64_t strip_begin(int64_t rows, int64_t, int64_t i) { return std::min(rows, i * kRows); }

  // A row of q; `factor` is 1 or −1.
  static void load_left(const TensorView& view, const char* src, int64_t n, float factor, bf16* dst) {
    const auto* from = reinterpret_cast<const bf16*>(src);
    if (view.stride_d == 1) {
      std::memcpy(dst, from, static_cast<size_t>(n) * sizeof(bf16));
    } else {
      for (int64_t d = 0; d < n; ++d) dst[d] = from[d * view.stride_d];
    }
    if (factor < 0) {
      for (int64_t d = 0; d < n; ++d) dst[d].bits ^= 0x8000u;
    }
    std::fill(dst + n, dst + depth(n), bf16{0});
  }

  // Whether all numbers of a left factor are finite; n is a multiple of 2 · N.
  static bool all_finite(const bf16* x, int64_t n) {
    PairCheck check;
    for (int64_t d = 0; d < n; d += 2 * N) check.see(V::load(reinterpret_cast<const float*>(x + d)));
    return check.all_finite();
  }

  // A left factor turned: number d of row r becomes to[d · ld + r]. Rows and columns are multiples of N and 2 · N.
  static void turn(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* to, int64_t ld) {
    for (int64_t r0 = 0; r0 < rows; r0 += N) {
      const bf16* row[N];
      for (int r = 0; r < N; ++r) row[r] = from + (r0 + r) * stride;
      for (int64_t d = 0; d < columns; d += 2 * N) {
        V turned[N];
        load_turned<float, bf16>(row, d, turned);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) Pairs::split(turned[i], to + (d + 2 * i) * ld + r0, to + (d + 2 * i + 1) * ld + r0);
      }
    }
  }

  // Rows of k of one head as panels of kPanel rows, turned: panel p holds rows p·kPanel …, and features 2d and 2d + 1 of
  // a row are the word at [d][row]. Rows past `rows` and features past `columns` are zeros; the last panel is one vector
  // wide where that is enough.
  template <class Rows>
  static void pack_keys(const TensorView& view, Rows source, int64_t rows, int64_t columns, Word<bf16>* dst) {
    with_pair_storage(view.dtype, [&]<class Storage>(Storage*) {
      for (int64_t r0 = 0; r0 < rows; r0 += N) {
        const int64_t panel = r0 / kPanel<float>;
        const int64_t width = rows - panel * kPanel<float> > N ? kPanel<float> : N;
        Word<bf16>* to = dst + panel * kPanel<float> * right_rows(columns) + r0 % kPanel<float>;
        const int64_t real_rows = std::min<int64_t>(N, rows - r0);
        const auto row = [&](int64_t r) { return reinterpret_cast<const Storage*>(source[r0 + r]); };
        int64_t d = 0;
        if (view.stride_d == 1 && real_rows == N) {
          const Storage* from[N];
          for (int r = 0; r < N; ++r) from[r] = row(r);
          constexpr int turn = kTurn<float, Storage>;
          for (; d + turn <= columns; d += turn) {
            V turned[N];
            load_turned<float, Storage>(from, d, turned);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
              if constexpr (std::is_same_v<Storage, bf16>) {
                turned[i].store(lanes_of(to));
                to += width;
              } else {
                Pairs::of_whole(V::byte<0>(turned[i]), V::byte<1>(turned[i])).store(lanes_of(to));
                Pairs::of_whole(V::byte<2>(turned[i]), V::byte<3>(turned[i])).store(lanes_of(to + width));
                to += 2 * width;
              }
            }
          }
        }
        for (; d < depth(columns); d += 2, to += width) {
          const auto feature = [&](int64_t r, int64_t at) {
            return r < real_rows && at < columns ? exact_bf16(row(r)[at * view.stride_d]) : bf16{0};
          };
          for (int64_t r = 0; r < N; ++r) to[r] = pair_of(feature(r, d), feature(r, d + 1));
        }
      }
    });
  }

  // Rows of k, bf16, as a left factor.
  static void load_keys(const TensorView& view, const char* const* rows, int64_t count, int64_t n, bf16* dst) {
    for (int64_t r = 0; r < count; ++r) load_left(view, rows[r], n, 1.0f, dst + r * depth(n));
  }

  // Number d of a row of k or v.
  static float number(const TensorView& view, const char* row, int64_t d) {
    if (view.dtype == DType::int8) return static_cast<float>(reinterpret_cast<const int8_t*>(row)[d * view.stride_d]);
    return to_float(reinterpret_cast<const bf16*>(row)[d * view.stride_d]);
  }

  // Columns [column, column + kPanel) of the rows of v, two rows to a word: rows 2j and 2j + 1 are the words at
  // [j][column], zeros behind the last row and column. One vector wide where that is enough. Returns whether all numbers
  // were finite. What is given as `ahead` is asked for on the way, a step with every two rows.
  template <class Rows, class... Asked>
  static bool pack_values(const TensorView& view, Rows source, int64_t rows, int64_t columns, int64_t column,
                          Word<bf16>* dst, Asked... ahead) {
    PairCheck check;
    const int64_t left = columns - column, padded = depth(rows);
    const int64_t width = left > N ? kPanel<float> : N;
    with_pair_storage(view.dtype, [&]<class Storage>(Storage*) {
      const auto at = [&](int64_t r) { return reinterpret_cast<const Storage*>(source[r]) + column * view.stride_d; };
      const auto put = [&](int64_t n, V words, Word<bf16>* to) {
        check.see(words);
        words.store(lanes_of(to + n));
      };
      int64_t r = 0;
      if (view.stride_d == 1 && left >= width) {
        if (width == N) {
          for (; r + 2 <= rows; r += 2, dst += width) put(0, Pairs::of_rows(at(r), at(r + 1)), dst);
        } else {
          for (; r + 2 <= rows; r += 2, dst += width) {
            const Storage *even = at(r), *odd = at(r + 1);
            put(0, Pairs::of_rows(even, odd), dst);
            put(N, Pairs::of_rows(even + N, odd + N), dst);
            (ahead.ask(r / 2), ...);
          }
        }
      }
      for (; r < padded; r += 2, dst += width) {
        const auto number = [&](int64_t row, int64_t d) {
          return row < rows && d < left ? exact_bf16(at(row)[d * view.stride_d]) : bf16{0};
        };
        for (int64_t d = 0; d < width; ++d) dst[d] = pair_of(number(r, d), number(r + 1, d));
        for (int64_t n = 0; n < width; n += N) check.see(V::load(lanes_of(dst + n)));
      }
    });
    return check.all_finite();
  }

  // NaN and Inf of a packed panel become 0.
  static void drop_specials(Word<bf16>* words, int64_t count) {
    for (int64_t n = 0; n < count; n += N) {
      Pairs::without_specials(V::load(lanes_of(words + n))).store(lanes_of(words + n));
    }
  }

  // Rounds x[0 … count), count a multiple of N, to bf16; zeros up to the next multiple of kDepth behind them.
  static void narrow(const float* x, int64_t count, bf16* to) {
    int64_t j = 0;
    for (; j + 2 * N <= count; j += 2 * N) Pairs::narrow(V::load(x + j), V::load(x + j + N), to + j);
    if (j < count) Pairs::narrow(V::load(x + j), V::zero(), to + j);
  }

  static void narrow(V first, V second, bf16* to) { Pairs::narrow(first, second, to); }

  template <Start start, class... Asked>
  static void multiply(int64_t rows, int vecs, int64_t K, const bf16* a, int64_t lda, const Word<bf16>* b, int64_t ldb,
                       float* c, int64_t ldc, Asked... ahead) {
    PairTile::multiply<start>(rows, vecs, K, a, lda, b, ldb, c, ldc, ahead...);
  }
};

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
