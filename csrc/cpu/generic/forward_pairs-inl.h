// What the forward pass does otherwise where its products are of pairs of bf16 (pair_products-inl.h): weights are rounded
// for their product with v, and on AMX the tiles are units of their own, whose work goes on beside the vector units'.
//
//   many rows   strips of 16 rows in a pipeline: the next strip's q · kᵀ and the weights · v of the strip before are handed
//               to the tiles while the scores of this one become weights
//   few rows    rows of k are the left factor as they lie in memory (k · qᵀ has the bits of q · kᵀ), v is packed 32 keys at
//               a time while the 32 before are multiplied
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
  if (p_.scales.k) scale_row(s, v_scales_, x);
  if (p_.scales.k && exclude_hidden) {  // a hidden key's scale may be NaN
    for (int64_t j = from; j < to; ++j) x[j] = hidden[j] ? T(0) : x[j];
  }
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

// scores = k · qᵀ, some keys at a time, and turned. Keys in four tiles where one vector holds all rows (a tile's next
// product waits for the one before), in two where it takes two.
template <class Products>
void ForwardWorker<Products>::multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to) {
  if (rows > N) {
    multiply_keys_as_they_lie<typename Products::Tile::template Sums<2, 2>, 2>(rows, from, to);
  } else {
    multiply_keys_as_they_lie<typename Products::Tile::template Sums<4, 1>, 4>(rows, from, to);
  }
}

template <class Products>
template <class Sums, int tiles>
void ForwardWorker<Products>::multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to) {
  constexpr int64_t kKeys = tiles * N, kTurnedStride = kDirectKeys / tiles;
  const int64_t depth = Products::depth(p_.D);
  const bool whole = p_.k.stride_d == 1 && p_.D == depth;
  for (int64_t j = from; j < to; j += kKeys) {
    const int64_t count = std::min(kKeys, to - j);
    const Left* keys = some_keys_;
    int64_t stride = depth;
    const int64_t apart = k_rows_[j + 1] - k_rows_[j];
    if (whole && count == kKeys && k_rows_[j + kKeys - 1] - k_rows_[j] == (kKeys - 1) * apart) {
      keys = reinterpret_cast<const Left*>(k_rows_[j]);
      stride = apart / static_cast<int64_t>(sizeof(Left));
    } else {
      Products::load_keys(p_.k, k_rows_ + j, count, p_.D, some_keys_);
    }
    const auto ahead = requests_.template beside<Sums::kAsked>(tiles * (depth / Products::kDepth));
    Sums sums;
    sums.template begin<Start::zero>(turned_scores_, kTurnedStride);
    for (int64_t d = 0; d < depth; d += Products::kDepth) {
      sums.add(keys + d, stride, turned_q_ + d / 2 * kTurnedStride, kTurnedStride,
               ahead.from(d / Products::kDepth * tiles));
    }
    sums.end(turned_scores_, kTurnedStride);
    for (int64_t n = 0; n < count; n += N) {
      const T* turned = turned_scores_ + n * kTurnedStride;
      if (rows <= 4) {
        V row[4];
        Products::Words::turn_four(turned, kTurnedStride, row);
        for (int64_t r = 0; r < rows; ++r) row[r].store(scores_ + r * scores_stride_ + j + n);
        continue;
      }
      for (int64_t r0 = 0; r0 < rows; r0 += N) {
        V row[N];
        V::load_transposed([&](int i) { return turned + i * kTurnedStride + r0; }, row);
        for (int64_t r = r0; r < std::min(rows, r0 + N); ++r) row[r - r0].store(scores_ + r * scores_stride_ + j + n);
      }
    }
  }
}

template <class Products>
void ForwardWorker<Products>::turn_queries() {
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
  for (const Strip& strip : strips) {
    const int64_t from = strip.panel_begin * kPanelKeys, to = padded_keys(strip.panel_end);
    for (int64_t r = strip.row_begin; r < strip.row_end && from < to; ++r) {
      T* x = scores_ + (r - first_row) * scores_stride_;
      if (exclude_hidden && p_.scales.k) {  // a hidden key's scale may be NaN
        for (int64_t j = from; j < to; ++j) x[j] = hidden_[(r - first_row) * scores_stride_ + j] ? T(0) : x[j];
      }
      Products::narrow(x + from, to - from, weights_ + (r - first_row) * ld + from);
    }
  }
  if (direct_keys_) {
    multiply_values_while_packing(strips[0], exclude_hidden, t);
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

// Step 4 for one strip: some values are packed while those before them are multiplied.
template <class Products>
void ForwardWorker<Products>::multiply_values_while_packing(const Strip& strip, bool exclude_hidden, Partial t) {
  if constexpr (Products::kKeysAsTheyLie) {
    constexpr int64_t kKeys = Products::kDepth;
    const int64_t ld = weights_stride();
    const int64_t from = strip.panel_begin * kPanelKeys, to = std::min(strip.panel_end * kPanelKeys, block_keys_);
    for (int64_t column = 0; column < p_.Dv; column += kPanel<T>) {
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
  }
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
