// What the forward pass does otherwise where its products are of pairs of bf16 (pair_products-inl.h): weights are rounded
// for their product with v, and on AMX the tiles are units of their own, whose work goes on beside the vector units'.
//
//   many rows   strips of 16 rows in a pipeline: the next strip's q · kᵀ and the weights · v of the strip before are handed
//               to the tiles while the scores of this one become weights
//   few rows    rows of k are the left factor as they lie in memory (k · qᵀ has the bits of q · kᵀ); rows of v are the right
//               one as they lie, to 8 rows of weights, or are packed 32 keys at a time while the 32 before are multiplied
//
// NaN and Inf in v, where some row must not see them: they become 0 in the packed block, and are added to the rows that do
// see them afterwards. So a row has the same bits whatever it may not see.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// The same for all strips of the task as a pipeline, for products that have units of their own: while the vector units
// turn a strip's scores into weights, the next strip's q is multiplied with k, and the weights of the strip before with v,
// a little of it after every row.
template <class Products>
void ForwardWorker<Products>::compute_strips(Partial t) {
  const bool exclude_hidden = p_.Dv > 0 && !values_finite_;
  if (exclude_hidden) {
    for (int64_t column = 0; column < p_.Dv; column += kPanel<T>) {
      Products::drop_specials(values_panel(column),
                              Products::right_rows(block_keys_) * std::min<int64_t>(kPanel<T>, padded_dv_ - column));
    }
  }
  const int64_t count = ceil_div(rows_, kBesideRows), value_panels = ceil_div(p_.Dv, kPanel<T>);
  const auto strip_at = [&](int64_t i) {
    return i < count ? strip_of(i * kBesideRows, std::min(rows_, (i + 1) * kBesideRows)) : Strip();
  };
  Strip before, now = strip_at(0);
  for (int64_t panel = now.panel_begin; panel < now.panel_end; ++panel) multiply_panel(now, panel, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t half = i % 2;
    const Strip next = strip_at(i + 1);
    const int64_t value_chores = before.empty() ? 0 : value_panels;
    const int64_t chores = value_chores + next.panel_end - next.panel_begin;
    int64_t done = 0;
    const auto work_off = [&](int64_t until) {
      for (; done < until; ++done) {
        if (done < value_chores) {
          multiply_values_panel(before, done * kPanel<T>, 1 - half, t);
        } else {
          multiply_panel(next, next.panel_begin + done - value_chores, 1 - half);
        }
      }
    };
    for (int64_t r = now.row_begin; r < now.row_end && !now.empty(); ++r) {
      weigh_row(now, r, half, exclude_hidden, t);
      work_off((r - now.row_begin + 1) * chores / now.rows());
    }
    work_off(chores);
    if (exclude_hidden && !now.empty()) add_visible_specials(now, half * kBesideRows, t);
    before = now;
    now = next;
  }
  for (int64_t panel = 0; panel < (before.empty() ? 0 : value_panels); ++panel) {
    multiply_values_panel(before, panel * kPanel<T>, (count - 1) % 2, t);
  }
}

// Row r of the strip whose scores stand in a half of scores_: weights in the same half of weights_.
template <class Products>
void ForwardWorker<Products>::weigh_row(const Strip& strip, int64_t r, int64_t half, bool exclude_hidden, Partial t) {
  const Stretch s{block_start_, block_start_ + strip.panel_begin * kPanelKeys,
                  block_start_ + padded_keys(strip.panel_end), block_start_ + block_keys_};
  const int64_t row = half * kBesideRows + r - strip.row_begin, from = s.from - s.start, to = s.to - s.start;
  T* x = scores_ + row * scores_stride_;
  if (p_.scales.k) scale_row(s, k_scales_, x);
  if (!strip.all_visible || units_.scaled || p_.mask) finish_scores<T>(p_, units_, sequence_, row_[r], s, buffers_, x);
  uint8_t* hidden = hidden_ + row * scores_stride_;
  if (exclude_hidden) {
    for (int64_t j = from; j < to; ++j) hidden[j] = x[j] == -kInfinity<T>;
  }
  Left* weights = weights_ + row * weights_stride();
  if (!p_.dropout && !p_.scales.k) return softmax_row(r, s, x, t, weights);
  softmax_row(r, s, x, t);
  if (p_.scales.k) scale_weights(s, exclude_hidden ? hidden : nullptr, x);
  Products::narrow(x + from, to - from, weights + from);
}

template <class Products>
void ForwardWorker<Products>::multiply_panel(const Strip& strip, int64_t panel, int64_t half) {
  const int64_t depth = Products::depth(p_.D), ld = scores_stride_;
  const int vecs = padded_keys(panel + 1) - panel * kPanelKeys > N ? kTileVecs : 1;
  Products::template multiply<Start::zero>(strip.rows(), vecs, depth, q_ + strip.row_begin * depth, depth,
                                           k_ + panel * Products::right_rows(p_.D) * kPanelKeys, vecs * N,
                                           scores_ + half * kBesideRows * ld + panel * kPanelKeys, ld);
}

template <class Products>
void ForwardWorker<Products>::multiply_values_panel(const Strip& strip, int64_t column, int64_t half, Partial t) {
  const int64_t from = strip.panel_begin * kPanelKeys, to = std::min(strip.panel_end * kPanelKeys, block_keys_);
  const int vecs = padded_dv_ - column > N ? kTileVecs : 1;
  Products::template multiply<Start::from_c>(strip.rows(), vecs, Products::depth(to - from),
                                             weights_ + half * kBesideRows * weights_stride() + from, weights_stride(),
                                             values_panel(column) + from / 2 * vecs * N, vecs * N,
                                             t.acc + strip.row_begin * padded_dv_ + column, padded_dv_);
}

// scores = k · qᵀ, some keys at a time, and turned. The queries stay in tiles where one vector holds all rows and there are
// not too many features. Otherwise keys in four tiles (a tile's next product waits for the one before), or in two where
// rows take two vectors.
template <class Products>
void ForwardWorker<Products>::multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to) {
  using Tile = typename Products::Tile;
  if constexpr (Products::kBytesAsTheyLie) {
    if (bytes_) return multiply_keys_of_bytes(rows, from, to);
  }
  if (rows > N) return multiply_keys_as_they_lie<typename Tile::template Sums<2, 2>, 2>(rows, from, to);
  switch (Products::depth(p_.D) / Products::kDepth) {
    case 1:
      return multiply_keys_by_held_queries<1>(rows, from, to);
    case 2:
      return multiply_keys_by_held_queries<2>(rows, from, to);
    case 3:
      return multiply_keys_by_held_queries<3>(rows, from, to);
    case 4:
      return multiply_keys_by_held_queries<4>(rows, from, to);
    default:
      return multiply_keys_as_they_lie<typename Tile::template Sums<4, 1>, 4>(rows, from, to);
  }
}

// Up to `most` rows of k from j on, as a left factor.
template <class Products>
auto ForwardWorker<Products>::keys_as_they_lie(int64_t j, int64_t count, int64_t most) -> SomeKeys {
  const int64_t depth = Products::depth(p_.D);
  if (p_.k.stride_d == 1 && p_.D == depth && count == most && evenly_apart(k_rows_ + j, most)) {
    return {reinterpret_cast<const Left*>(k_rows_[j]),
            (k_rows_[j + 1] - k_rows_[j]) / static_cast<int64_t>(sizeof(Left))};
  }
  Products::load_keys(p_.k, k_rows_ + j, count, p_.D, some_keys_);
  return {some_keys_, depth};
}

template <class Products>
template <class Sums, int tiles>
void ForwardWorker<Products>::multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to) {
  constexpr int64_t kKeys = tiles * N, kTurnedStride = kDirectKeys / tiles;
  const int64_t depth = Products::depth(p_.D);
  for (int64_t j = from; j < to; j += kKeys) {
    const int64_t count = std::min(kKeys, to - j);
    const SomeKeys keys = keys_as_they_lie(j, count, kKeys);
    const auto ahead = requests_.template beside<Products::Tile::kAsked>(tiles * (depth / Products::kDepth));
    Sums sums;
    sums.template begin<Start::zero>(turned_scores_, kTurnedStride);
    for (int64_t d = 0; d < depth; d += Products::kDepth) {
      sums.add(keys.first + d, keys.stride, turned_q_ + d / 2 * kTurnedStride, kTurnedStride,
               ahead.from(d / Products::kDepth * tiles));
    }
    sums.end(turned_scores_, kTurnedStride);
    for (int64_t n = 0; n < count; n += N) turn_scores(turned_scores_ + n * kTurnedStride, kTurnedStride, rows, j + n);
  }
}

// Calls multiply<c>(j) for every tile of keys in [from, to), c = 0 and 1 in turns, and turn<c>(j) after the next tile was
// begun: what a tile stores cannot be loaded at once.
template <int64_t keys, class Multiply, class Turn>
inline void one_tile_late(int64_t from, int64_t to, Multiply&& multiply, Turn&& turn) {
  for (int64_t j = from; j < to; j += 2 * keys) {
    multiply.template operator()<0>(j);
    if (j > from) turn.template operator()<1>(j - keys);
    if (j + keys < to) multiply.template operator()<1>(j + keys);
    turn.template operator()<0>(j);
  }
  const int64_t last = from + (to - from - 1) / keys * keys;
  if ((last - from) / keys % 2 == 1) turn.template operator()<1>(last);
}

template <class Products>
template <int steps>
void ForwardWorker<Products>::multiply_keys_by_held_queries(int64_t rows, int64_t from, int64_t to) {
  using Tile = typename Products::Tile;
  constexpr int64_t kKeys = N;
  Tile::template hold<steps>(turned_q_, N);
  const auto ahead = requests_.template beside<Tile::kAsked>(ceil_div(to - from, kKeys) * steps);
  one_tile_late<kKeys>(
      from, to,
      [&]<int c>(int64_t j) {
        const SomeKeys keys = keys_as_they_lie(j, std::min(kKeys, to - j), kKeys);
        Tile::template multiply_by_held<steps, c>(keys.first, keys.stride, turned_scores_ + c * kKeys * N,
                                                  ahead.from((j - from) / kKeys * steps));
      },
      [&]<int c>(int64_t j) { turn_scores(turned_scores_ + c * kKeys * N, N, rows, j); });
}

// Scores of N keys from j on, a row for each key, to where the rows of scores are.
template <class Products>
void ForwardWorker<Products>::turn_scores(const T* turned, int64_t stride, int64_t rows, int64_t j) {
  if (rows <= 4) {
    V row[4];
    Products::Words::turn_four(turned, stride, row);
    for (int64_t r = 0; r < rows; ++r) row[r].store(scores_ + r * scores_stride_ + j);
    return;
  }
  for (int64_t r0 = 0; r0 < rows; r0 += N) {
    V row[N];
    V::load_transposed([&](int i) { return turned + i * stride + r0; }, row);
    for (int64_t r = r0; r < std::min(rows, r0 + N); ++r) row[r - r0].store(scores_ + r * scores_stride_ + j);
  }
}

template <class Products>
void ForwardWorker<Products>::turn_queries() {
  if constexpr (Products::kBytesAsTheyLie) {
    if (bytes_) return split_queries();
  }
  TensorView rows;
  rows.data = q_;
  rows.dtype = DType::bfloat16;
  rows.stride_l = Products::depth(p_.D);
  rows.stride_d = 1;
  Products::pack_keys(rows, EvenRows(rows, reinterpret_cast<const char*>(q_)), rows_, p_.D, turned_q_);
}

// Step 4 over pairs of keys: the weights rounded to bf16, the values packed unless they were.
template <class Products>
void ForwardWorker<Products>::multiply_pairs_of_values(Strips strips, bool exclude_hidden, Partial t) {
  const int64_t ld = weights_stride(), first_row = strips[0].row_begin;
  if constexpr (Products::kBytesAsTheyLie) {
    if (bytes_) return multiply_values_of_bytes(strips[0], t);
  }
  for (const Strip& strip : strips) {
    const int64_t from = strip.panel_begin * kPanelKeys, to = padded_keys(strip.panel_end);
    for (int64_t r = strip.row_begin; r < strip.row_end && from < to; ++r) {
      const T* x = scores_ + (r - first_row) * scores_stride_;
      Products::narrow(x + from, to - from, weights_ + (r - first_row) * ld + from);
    }
  }
  if (direct_keys_) {
    if constexpr (Products::kKeysAsTheyLie) multiply_few_rows_with_values(strips[0], exclude_hidden, t);
  } else {
    for (int64_t column = 0; column < p_.Dv; column += kPanel<T>) {
      const int vecs = padded_dv_ - column > N ? kTileVecs : 1;
      Right* v = values_panel(column);
      if (!packs_values_first_) Products::pack_values(p_.v, v_rows_, block_keys_, p_.Dv, column, v);
      if (exclude_hidden) Products::drop_specials(v, Products::right_rows(block_keys_) * vecs * N);
      for (const Strip& strip : strips) {
        const int64_t from = strip.panel_begin * kPanelKeys;
        const int64_t to = std::min(strip.panel_end * kPanelKeys, block_keys_);
        if (from >= to) continue;
        Products::template multiply<Start::from_c>(
            strip.rows(), vecs, Products::depth(to - from), weights_ + (strip.row_begin - first_row) * ld + from, ld,
            v + from / 2 * vecs * N, vecs * N, t.acc + strip.row_begin * padded_dv_ + column, padded_dv_);
      }
    }
  }
  for (const Strip& strip : strips) {
    if (exclude_hidden) add_visible_specials(strip, strip.row_begin - first_row, t);
  }
}

// Step 4 for one strip of few rows. Values are read as they lie where they lie evenly apart, the rest is packed: columns
// behind the last whole panel, keys behind the last whole step of the sum, and all where NaN or Inf come in.
template <class Products>
void ForwardWorker<Products>::multiply_few_rows_with_values(const Strip& strip, bool exclude_hidden, Partial t) {
  constexpr int64_t kKeys = Products::kDepth;
  const int64_t from = strip.panel_begin * kPanelKeys, to = std::min(strip.panel_end * kPanelKeys, block_keys_);
  int64_t column = 0;
  if (rows_ <= Products::Tile::kSpreadRows && !exclude_hidden && p_.v.stride_d == 1) {
    int64_t end = from;
    while (end + kKeys <= to && evenly_apart(v_rows_ + end, kKeys)) end += kKeys;
    if (end > from) {
      spread_weights(strip, from, end);
      while (column + kPanel<T> <= p_.Dv) {
        const bool both = strip.rows() <= 4 && column + kSpreadPanels * kPanel<T> <= p_.Dv;
        const int64_t width = both ? kSpreadPanels * kPanel<T> : kPanel<T>;
        const bool finite = strip.rows() > 4   ? multiply_spread_weights<8, 1>(strip, from, end, column, t)
                            : !both            ? multiply_spread_weights<4, 1>(strip, from, end, column, t)
                            : strip.rows() > 1 ? multiply_spread_weights<4, kSpreadPanels>(strip, from, end, column, t)
                                               : multiply_spread_weights<1, kSpreadPanels>(strip, from, end, column, t);
        for (int64_t last = column + width; column < last; column += kPanel<T>) {
          multiply_values_while_packing(strip, finite ? end : from, to, column, exclude_hidden, t);
        }
      }
    }
  }
  for (; column < p_.Dv; column += kPanel<T>) {
    multiply_values_while_packing(strip, from, to, column, exclude_hidden, t);
  }
}

// The weights of keys [from, to), of 32 at a time those of even number in one tile and the others in the next, each beside
// a zero: see PairTile::multiply_spread.
template <class Products>
void ForwardWorker<Products>::spread_weights(const Strip& strip, int64_t from, int64_t to) {
  using Tile = typename Products::Tile;
  constexpr int64_t kKeys = Products::kDepth;
  Left* tiles = spread_weights_;
  for (int64_t j = from; j < to; j += kKeys, tiles += 2 * Tile::kSpreadTile) {
    for (int64_t r = 0; r < strip.rows(); ++r) {
      V spread[4];
      Products::Words::spread(V::load(reinterpret_cast<const T*>(weights_ + r * weights_stride() + j)), spread);
      for (int n = 0; n < 4; ++n) {
        Left* to_row = tiles + n / 2 * Tile::kSpreadTile + (n % 2 * Tile::kSpreadRows + r) * kKeys;
        spread[n].store(reinterpret_cast<T*>(to_row));
      }
    }
  }
}

// acc += weights · v for panels of columns, v as it lies. Returns false, and changes nothing, where a sum is NaN or Inf.
template <class Products>
template <int R, int panels>
bool ForwardWorker<Products>::multiply_spread_weights(const Strip& strip, int64_t from, int64_t to, int64_t column,
                                                      Partial t) {
  using Tile = typename Products::Tile;
  constexpr int64_t kKeys = Products::kDepth, kWidth = kPanel<T>;
  T* acc = t.acc + strip.row_begin * padded_dv_ + column;
  const int64_t rows = std::min<int64_t>(R, strip.rows());
  V even[R][panels], odd[R][panels];
  for (int64_t r = 0; r < R; ++r) {
    for (int n = 0; n < panels; ++n) {
      if (r >= rows) {
        even[r][n] = odd[r][n] = V::zero();
        continue;
      }
      Products::Words::unzip(acc + r * padded_dv_ + n * kWidth, even[r][n], odd[r][n]);
      even[r][n] = Products::Words::without_subnormals(even[r][n]);
      odd[r][n] = Products::Words::without_subnormals(odd[r][n]);
    }
  }
  const auto ahead = requests_.template beside<Tile::kAsked>((to - from) / kKeys * panels * 2);
  const auto sums_at = [&](int64_t step, int n) { return spread_sums_ + (step % 2 * panels + n) * Tile::kSpreadSums; };
  const auto multiply = [&](int64_t step) {
    const int64_t j = from + step * kKeys;
    const auto* first = reinterpret_cast<const Left*>(v_rows_[j]) + column;
    const int64_t stride = (v_rows_[j + 1] - v_rows_[j]) / static_cast<int64_t>(sizeof(Left));
    Tile::template multiply_spread<panels>(spread_weights_ + step * 2 * Tile::kSpreadTile, first, stride,
                                           sums_at(step, 0), ahead.from(step * panels * 2));
  };
  const auto add = [&](int64_t step) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < panels; ++n) {
        const T* sums = sums_at(step, n) + r * N;
        even[r][n] = Products::Words::without_subnormals(even[r][n] + V::load(sums));
        odd[r][n] = Products::Words::without_subnormals(odd[r][n] + V::load(sums + Tile::kSpreadRows * N));
      }
    }
  };
  // A step's sums are read after the next step's product was begun: what a tile stores cannot be loaded at once.
  const int64_t steps = (to - from) / kKeys;
  multiply(0);
  for (int64_t step = 1; step < steps; ++step) {
    multiply(step);
    add(step - 1);
  }
  add(steps - 1);
  FiniteCheck<T> check;
  for (int64_t r = 0; r < rows; ++r) {
    for (int n = 0; n < panels; ++n) check.see(even[r][n], odd[r][n]);
  }
  if (!check.all_finite()) return false;
  for (int64_t r = 0; r < rows; ++r) {
    for (int n = 0; n < panels; ++n) {
      Products::Words::zip(even[r][n], odd[r][n], acc + r * padded_dv_ + n * kWidth);
    }
  }
  return true;
}

// Step 4 for a panel of columns and keys [from, to): some values are packed while those before them are multiplied.
template <class Products>
void ForwardWorker<Products>::multiply_values_while_packing(const Strip& strip, int64_t from, int64_t to,
                                                            int64_t column, bool exclude_hidden, Partial t) {
  constexpr int64_t kKeys = Products::kDepth;
  if (from >= to) return;
  const int64_t ld = weights_stride();
  const int vecs = padded_dv_ - column > N ? kTileVecs : 1, width = vecs * N;
  const auto ahead = requests_.template beside<kPanel<T> * sizeof(Right)>(ceil_div(to - from, 2));
  T* acc = t.acc + strip.row_begin * padded_dv_ + column;
  Products::Tile::with_sums(strip.rows(), vecs, [&](auto sums) {
    sums.template begin<Start::from_c>(acc, padded_dv_);
    const auto panel = [&](int64_t j) { return v_ + j / kKeys % 2 * (kKeys / 2 * kPanel<T>); };
    for (int64_t j = from; j < to; j += kKeys) {
      const int64_t count = std::min(kKeys, to - j);
      Products::pack_values(p_.v, v_rows_ + j, count, p_.Dv, column, panel(j), ahead.from((j - from) / 2));
      if (exclude_hidden) Products::drop_specials(panel(j), kKeys / 2 * width);
      if (j > from) sums.add(weights_ + j - kKeys, ld, panel(j - kKeys), width);
    }
    const int64_t last = from + (to - from - 1) / kKeys * kKeys;
    sums.add(weights_ + last, ld, panel(last), width);
    sums.end(acc, padded_dv_);
  });
}

// What drop_specials took away, for the rows that see it: NaN and Inf stay what they are, whenever they are added. The
// strip's weights begin at row `first` of weights_.
template <class Products>
void ForwardWorker<Products>::add_visible_specials(const Strip& strip, int64_t first, Partial t) {
  for (int64_t j = strip.panel_begin * kPanelKeys; j < std::min(strip.panel_end * kPanelKeys, block_keys_); ++j) {
    for (int64_t d = 0; d < p_.Dv; ++d) {
      const float value = Products::number(p_.v, v_rows_[j], d);
      if (std::isfinite(value)) continue;
      for (int64_t r = 0; r < strip.rows(); ++r) {
        if (hidden_[(first + r) * scores_stride_ + j]) continue;
        t.acc[(strip.row_begin + r) * padded_dv_ + d] += to_float(weights_[(first + r) * weights_stride() + j]) * value;
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
