// Step 4 of the backward pass (backward-inl.h) where products are of pairs of bf16 (pair_products-inl.h): p and ds are
// rounded to bf16 for it, as the weights are in the forward pass.
//
//   dvᵀ += goᵀ · p    dkᵀ += qᵀ · ds    q and go turned once a tile are left factors; two rows of p or ds make a word
//   dq  += ds · k                       ds is a left factor as it is; two keys make a word, once a block of keys
//
// NaN and Inf of rows that some pair must not see become 0, and are added to the pairs that do see them afterwards: so
// gradients have the same bits whatever the hidden pairs hold.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class Products>
void BackwardWorker<Products>::pack_keys_by_pairs(const char* k) {
  keys_finite_ = true;
  key_rows_ = k;
  if (!p_.dq) return;
  const EvenRows rows(p_.k, k);
  for (int64_t column = 0; column < p_.D; column += kPanel<T>) {
    keys_finite_ &=
        Products::pack_values(p_.k, rows, keys_, p_.D, column, k_pairs_ + column * Products::right_rows(kKeys));
  }
  if (!keys_finite_) Products::drop_specials(k_pairs_, d_ * Products::right_rows(kKeys));
}

template <class Products>
void BackwardWorker<Products>::add_key_gradients_by_pairs() {
  if (p_.dv) {
    narrow_tile(p_tile_, weights_);
    add_turned(weights_, left_go_, turned_go_, p_.Dv, dv_rows_);
  }
  if (p_.dk || p_.dq) narrow_tile(ds_tile_, narrow_ds_);
  if (p_.dk) add_turned(narrow_ds_, left_q_, turned_q_, p_.D, dk_rows_);
}

// A tile's rows rounded to bf16, zeros behind its last key up to the next panel.
template <class Products>
void BackwardWorker<Products>::narrow_tile(T* tile, Left* to) {
  const int64_t padded = round_up_to(to_, N);
  for (int64_t r = 0; r < rows_; ++r, tile += kTileStride, to += kNarrowStride) {
    std::fill(tile + to_, tile + padded, T(0));
    Products::narrow(tile + from_, padded - from_, to + from_);
  }
}

// sums[width][keys] += leftᵀ[width][rows] · narrowed[rows][keys].
template <class Products>
void BackwardWorker<Products>::add_turned(const Left* narrowed, Left* left, Left* turned, int64_t width, T* sums) {
  const int64_t stride = left_stride(width), padded_rows = round_up_to(Products::depth(rows_), N);
  std::fill(left + rows_ * stride, left + padded_rows * stride, Left{0});  // of the tile before: a NaN, perhaps
  Products::turn(left, stride, padded_rows, stride, turned, kRows);
  if (exclude_hidden()) Products::drop_specials(reinterpret_cast<Right*>(turned), stride * kRows / 2);
  TensorView view;
  view.dtype = DType::bfloat16;
  view.stride_l = kNarrowStride;
  view.stride_d = 1;
  const EvenRows rows(view, reinterpret_cast<const char*>(narrowed));
  const int64_t end = round_up_to(to_, kPanel<T>), columns = round_up_to(width, N);
  for (int64_t column = from_; column < end; column += kPanel<T>) {
    Products::pack_values(view, rows, rows_, end, column, pairs_);
    for (int64_t d = 0; d < columns; d += Products::kRows) {
      Products::template multiply<Start::from_c>(std::min<int64_t>(Products::kRows, columns - d), kTileVecs,
                                                 Products::depth(rows_), turned + d * kRows, kRows, pairs_, kPanel<T>,
                                                 sums + d * kKeyStride + column, kKeyStride);
    }
  }
  if (!exclude_hidden()) return;
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t d = 0; d < width; ++d) {
      const float value = to_float(left[r * stride + d]);
      if (std::isfinite(value)) continue;
      for (int64_t j = from_; j < to_; ++j) {
        if (!hidden_[r * kTileStride + j])
          sums[d * kKeyStride + j] += to_float(narrowed[r * kNarrowStride + j]) * value;
      }
    }
  }
}

template <class Products>
void BackwardWorker<Products>::add_query_gradients_by_pairs(QueryGradients dq) {
  const int64_t depth = Products::depth(to_ - from_);
  for (int64_t r = 0; r < rows_; r += Products::kRows) {
    const int64_t rows = std::min<int64_t>(Products::kRows, rows_ - r), padded = Products::padded_rows(rows);
    // A product reads and writes whole tiles; behind the last row there may be another head's, or nothing.
    QueryGradients to{dq.rows + r * dq.stride, dq.stride};
    if (padded > rows) {
      to = {some_rows_, d_};
      for (int64_t i = 0; i < padded; ++i) {
        T* row = to.rows + i * d_;
        std::fill(row, row + d_, T(0));
        if (i < rows) std::copy(dq.rows + (r + i) * dq.stride, dq.rows + (r + i) * dq.stride + d_, row);
      }
    }
    for (int64_t column = 0; column < d_; column += kPanel<T>) {
      const int vecs = d_ - column > N ? kTileVecs : 1;
      Products::template multiply<Start::from_c>(rows, vecs, depth, narrow_ds_ + r * kNarrowStride + from_,
                                                 kNarrowStride,
                                                 k_pairs_ + column * Products::right_rows(kKeys) + from_ / 2 * vecs * N,
                                                 vecs * N, to.rows + column, to.stride);
    }
    if (padded > rows) {
      for (int64_t i = 0; i < rows; ++i)
        std::copy(to.rows + i * d_, to.rows + (i + 1) * d_, dq.rows + (r + i) * dq.stride);
    }
  }
  if (keys_finite_) return;
  const EvenRows keys(p_.k, key_rows_);
  for (int64_t j = from_; j < to_; ++j) {
    for (int64_t d = 0; d < p_.D; ++d) {
      const float value = Products::number(p_.k, keys[j], d);
      if (std::isfinite(value)) continue;
      for (int64_t r = 0; r < rows_; ++r) {
        if (exclude_hidden() && hidden_[r * kTileStride + j]) continue;
        dq.rows[r * dq.stride + d] += to_float(narrow_ds_[r * kNarrowStride + j]) * value;
      }
    }
  }
}

// Sums that lie turned, as rows of the keys.
template <class Products>
void BackwardWorker<Products>::store_turned(const TensorView& out, const Place& at, int64_t width, T factor,
                                            const T* sums) {
  const int64_t rows = round_up_to(width, N);
  for (int64_t j = 0; j < keys_; j += N) {
    for (int64_t d = 0; d < rows; d += N) {
      V some[N];
      V::load_transposed([&](int i) { return sums + (d + i) * kKeyStride + j; }, some);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) some[i].store(some_rows_ + i * rows + d);
    }
    for (int64_t i = 0; i < std::min<int64_t>(N, keys_ - j); ++i) {
      store_row<T>(out, address(out, p_.batch_inner, at.b, at.hkv, sequence_.k_row + at.key + j + i), width, factor,
                   some_rows_ + i * rows);
    }
  }
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
