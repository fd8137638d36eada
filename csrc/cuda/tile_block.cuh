// A tile of weights in shared memory and what is multiplied by it: acc += tile · factor, where the tile is p or ds of the
// block's rows and keys, and the factor rows of v, k, q or the incoming gradient, up to kColumns columns of them.
//
// Hidden pairs are 0 in the tile. Where the factor holds NaN or Inf they are left out, for 0 · NaN would reach the sum.
#pragma once

#include <cstdint>

#include "cuda/score_block.cuh"
#include "philox.h"

namespace attn_ext::cuda {

// Beside q and k in shared memory, in numbers of T:
//   tile    [kRows][kKeys + 4]
//   factor  [kFactorRows][kColumns]     as many rows as the tile has keys, or rows
template <class T, class KvStorage, int columns, bool multiplies_rows>
struct TileTraits : ScoreTraits<T, KvStorage> {
  using Base = ScoreTraits<T, KvStorage>;
  static constexpr int kColumns = columns;
  static constexpr int kVectors = kColumns / (4 * Base::kLanesPerRow);  // of 4 columns, a thread and row (or key)
  static_assert(kVectors * 4 * Base::kLanesPerRow == kColumns);
  static constexpr int kFactorRows = multiplies_rows ? Base::kRows : Base::kKeys;

  static constexpr int kTile = Base::kScoresEnd;
  static constexpr int kFactor = kTile + Base::kRows * Base::kKeyPitch;
  static constexpr size_t kSharedBytes = (kFactor + kFactorRows * kColumns) * sizeof(T);
  static_assert(kSharedBytes <= 48 * 1024);  // more must be asked for
};

template <class Traits>
class TileBlock : protected ScoreBlock<Traits> {
 protected:
  using Base = ScoreBlock<Traits>;
  using T = typename Traits::Number;
  using Scores = typename Base::Scores;
  using Sums = Four<T>[Traits::kOwnRows][Traits::kVectors];
  using Base::lane_;
  using Base::own_row_;
  using Base::real_;
  using Base::row_;
  using Base::shared_;

  ATTN_EXT_DEVICE explicit TileBlock(const AttentionParams& p) : Base(p), p_(p) {}

  ATTN_EXT_DEVICE void note_hidden(int m, int n, bool hidden) {
    const uint32_t bit = 1u << (m * Traits::kOwnKeys + n);
    hidden_ = hidden ? hidden_ | bit : hidden_ & ~bit;
  }
  ATTN_EXT_DEVICE bool hidden(int m, int n) const { return hidden_ >> (m * Traits::kOwnKeys + n) & 1u; }

  // Which weights of own row m the dropout keeps, eight keys from a multiple of 8 on; and what that makes of one.
  ATTN_EXT_DEVICE uint32_t kept_of(int m, int64_t start) const {
    if (!p_.dropout || !real_[m]) return 0;
    return dropout_kept(dropout_seed_of(p_), p_.dropout_threshold, row_[m].b, row_[m].h, row_[m].i,
                        Base::own_key(start));
  }
  ATTN_EXT_DEVICE T dropped(T x, uint32_t kept, int64_t start, int n) const {
    if (!p_.dropout) return x;
    return kept >> ((Base::own_key(start) + n) % 8) & 1u ? x * static_cast<T>(p_.dropout_scale) : T(0);
  }

  // Own row m of the tile, own keys.
  ATTN_EXT_DEVICE Four<T>* tile_row(int m) const {
    return reinterpret_cast<Four<T>*>(shared_ + Traits::kTile + (own_row_ + m) * Traits::kKeyPitch) + lane_;
  }

  ATTN_EXT_DEVICE void store_tile(const Scores& tile) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      Four<T> four;
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kOwnKeys; ++n) four.x[n] = tile[m][n];
      store_shared(tile_row(m), four);
    }
  }

  // Loads the factor, of whose rows row_at(r) says where they lie (null: zeros), times `by`, from column `begin` of `width`
  // on. All threads meet. Returns the hidden pairs to leave out, a word a row, or null where none need be.
  template <class Storage, class RowAt>
  ATTN_EXT_DEVICE const uint32_t* load_factor(const TensorView& view, T by, int64_t begin, int64_t width,
                                              const RowAt& row_at) {
    const int64_t step = view.stride_d * size_of(view.dtype);
    T zero = 0;  // NaN once a number that is none was seen
    ATTN_EXT_ROLLED
    for (int r = thread_index() / kWarpSize; r < Traits::kFactorRows; r += Traits::kThreads / kWarpSize) {
      const char* row = row_at(r);
      for (int column = thread_index() % kWarpSize; column < Traits::kColumns; column += kWarpSize) {
        T number = 0;
        if (row && begin + column < width) {
          number = load_number<T, Storage>(row + (begin + column) * step, view.dtype) * by;
        }
        zero = fma_of(number, T(0), zero);
        store_shared(shared_ + Traits::kFactor + r * Traits::kColumns + column, number);
      }
    }
    return sync_block_or(zero != zero) ? share_hidden() : nullptr;
  }

  // acc += tile · factor for the own rows.
  ATTN_EXT_DEVICE void multiply_tile(const uint32_t* leave_out, Sums& acc) const {
    leave_out ? multiply_tile_but<true>(leave_out, acc) : multiply_tile_but<false>(leave_out, acc);
  }

  // Stores own row m of the sums, times `by`, to columns [begin, width) of a tensor of the queries' shape.
  ATTN_EXT_DEVICE void store_row(const TensorView& view, int m, T by, int64_t begin, int64_t width,
                                 const Sums& acc) const {
    ATTN_EXT_UNROLL
    for (int c = 0; c < Traits::kVectors; ++c) {
      ATTN_EXT_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int64_t column = begin + (c * Traits::kLanesPerRow + lane_) * 4 + e;
        if (column >= width) continue;
        char* at = address(view, p_.batch_inner, row_[m].b, row_[m].h, Base::sequence_.q_row + row_[m].i, column);
        store_number(at, view.dtype, acc[m][c].x[e] * by);
      }
    }
  }

 private:
  // Which pairs of the tile are hidden, a word a row, to where q and k were.
  ATTN_EXT_DEVICE const uint32_t* share_hidden() {
    auto* words = reinterpret_cast<uint32_t*>(shared_);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      const uint32_t own = (hidden_ >> (m * Traits::kOwnKeys) & 0xfu) << (lane_ * Traits::kOwnKeys);
      const uint32_t bits = join_lanes<Traits::kLanesPerRow, Either>(own);
      if (lane_ == 0) store_shared(words + own_row_ + m, bits);
    }
    sync_block();
    return words;
  }

  template <bool leaves_out>
  ATTN_EXT_DEVICE void multiply_tile_but(const uint32_t* leave_out, Sums& acc) const {
    const auto* tile = reinterpret_cast<const Four<T>*>(shared_ + Traits::kTile + own_row_ * Traits::kKeyPitch);
    const auto* factor = reinterpret_cast<const Four<T>*>(shared_ + Traits::kFactor);
    ATTN_EXT_ROLLED
    for (int j = 0; j < Traits::kKeys; j += 4) {
      Four<T> left[Traits::kOwnRows];
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) left[m] = load_shared(tile + (m * Traits::kKeyPitch + j) / 4);
      ATTN_EXT_UNROLL
      for (int n = 0; n < 4; ++n) {
        ATTN_EXT_UNROLL
        for (int c = 0; c < Traits::kVectors; ++c) {
          const auto right = load_shared(factor + (j + n) * (Traits::kColumns / 4) + c * Traits::kLanesPerRow + lane_);
          ATTN_EXT_UNROLL
          for (int m = 0; m < Traits::kOwnRows; ++m) {
            if (leaves_out && load_shared(leave_out + own_row_ + m) >> (j + n) & 1u) continue;
            ATTN_EXT_UNROLL
            for (int e = 0; e < 4; ++e) acc[m][c].x[e] = fma_of(left[m].x[n], right.x[e], acc[m][c].x[e]);
          }
        }
      }
    }
  }

  const AttentionParams& p_;
  uint32_t hidden_ = 0;
};

}  // namespace attn_ext::cuda
