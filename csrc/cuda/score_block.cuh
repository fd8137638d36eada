// A block's rows and their scores, tile by tile: what the general kernels have in common.
//
// 128 threads, 64 rows (32 of fp64), tiles of 32 keys. A thread has 4 (2) rows × 4 keys of a tile; the 8 threads that share
// rows are neighbours in a warp. Rows of all query heads that share a key/value head are stacked, as on the CPU: row r is head
// r / Lq of the group, query r % Lq.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/blocks.cuh"
#include "cuda/primitives.cuh"
#include "cuda/scores.cuh"

namespace attn_ext::cuda {

// What the blocks of a kernel look like, and where in shared memory things lie, in numbers of T:
//   q  [kDepth][kRows + 4]    q and k lie transposed, so that a thread reads its rows (keys) as one vector; 4 more a
//   k  [kDepth][kKeys + 4]    row put the stores of a warp, 8 d × 4 rows, into 32 different banks
template <class T, class KvStorage>
struct ScoreTraits {
  using Number = T;
  using Kv = KvStorage;

  static constexpr int kThreads = 128;
  static constexpr int kLanesPerRow = 8;                                 // threads that share a row
  static constexpr int kOwnRows = sizeof(T) == 4 ? 4 : 2, kOwnKeys = 4;  // more doubles would spill
  static constexpr int kRows = kThreads / kLanesPerRow * kOwnRows, kKeys = 32;
  static constexpr int kDepth = sizeof(T) == 4 ? 32 : 16;
  static_assert(kLanesPerRow * kOwnKeys == kKeys && kRows >= kKeys && kDepth % 8 == 0);

  static constexpr int kRowPitch = kRows + 4, kKeyPitch = kKeys + 4;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kDepth * kRowPitch;
  static constexpr int kScoresEnd = kK + kDepth * kKeyPitch;
  static constexpr size_t kScoresBytes = kScoresEnd * sizeof(T);
};

template <class Traits>
class ScoreBlock {
 protected:
  using T = typename Traits::Number;
  using Scores = T[Traits::kOwnRows][Traits::kOwnKeys];
  static constexpr int kLoadRows = Traits::kThreads / 8;  // rows that are loaded at once, 8 numbers of each
  static constexpr int kRowLoads = Traits::kRows / kLoadRows, kKeyLoads = Traits::kKeys / kLoadRows;

  ATTN_EXT_DEVICE explicit ScoreBlock(const AttentionParams& p)
      : p_(p),
        units_(p),
        shared_(reinterpret_cast<T*>(shared_memory())),
        own_row_(thread_index() / Traits::kLanesPerRow * Traits::kOwnRows),
        lane_(thread_index() % Traits::kLanesPerRow) {}

  // Turns to batch entry b and key/value head hkv.
  ATTN_EXT_DEVICE void begin_sequence(int64_t b, int64_t hkv) {
    sequence_ = sequence_at(p_, b);
    hkv_ = hkv;
  }

  // Rows that share the key/value head.
  ATTN_EXT_DEVICE int64_t stacked_rows() const { return p_.Hq / p_.Hkv * sequence_.Lq; }

  // Turns to rows row_begin … below row_end. False, for all threads, where there are none.
  ATTN_EXT_DEVICE bool begin_rows(int64_t row_begin, int64_t row_end) {
    row_begin_ = row_begin;
    row_end_ = row_end;
    if (row_begin >= row_end) return false;
    find_rows();
    return true;
  }

  // Looks at these keys only from now on, of those that the rows may see.
  ATTN_EXT_DEVICE void keep_keys(const KeyRange& keys) {
    key_lo_ = Largest()(key_lo_, keys.lo);
    key_hi_ = Smallest()(key_hi_, keys.hi);
  }

  // The tiles that hold every key that a row may see: from first_tile() on in steps of kKeys, below key_hi_.
  ATTN_EXT_DEVICE int64_t first_tile() const { return key_lo_ / Traits::kKeys * Traits::kKeys; }

  // The first of this thread's keys in a tile.
  ATTN_EXT_DEVICE int64_t own_key(int64_t start) const { return start + lane_ * Traits::kOwnKeys; }

  // Whether a row sees a key of the tile by position.
  ATTN_EXT_DEVICE bool sees(int64_t start) const { return start < key_hi_ && start + Traits::kKeys > key_lo_; }

  // Scores of the tile at `start`, −Inf where hidden or no row. All threads meet in here.
  ATTN_EXT_DEVICE void compute_scores(int64_t start, Scores& x, Scores* cap_derivative = nullptr) {
    ATTN_EXT_UNROLL
    for (auto& row : x) {
      ATTN_EXT_UNROLL
      for (T& score : row) score = 0;
    }
    multiply(q_rows_, p_.q, units_.q_factor, p_.k, p_.D, start, x);
    const int64_t key = own_key(start);
    if (p_.scales.k) {
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kOwnKeys; ++n) {
        const T scale = load_number<T, float>(row_of(p_.scales.k, key + n), DType::float32);
        ATTN_EXT_UNROLL
        for (int m = 0; m < Traits::kOwnRows; ++m) x[m][n] *= scale;
      }
    }
    const bool plain = !units_.scaled && !p_.mask && all_lo_ <= start && start + Traits::kKeys <= all_hi_;
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kOwnKeys; ++n) {
        if (!real_[m]) {
          x[m][n] = -kInfinity<T>;
        } else if (!plain) {
          x[m][n] = finish_score(p_, units_, sequence_, row_[m], key + n, x[m][n],
                                 cap_derivative ? &(*cap_derivative)[m][n] : nullptr);
        }
      }
    }
  }

  // Where the row of key j lies, or of the nearest one that a row of the block may see.
  ATTN_EXT_DEVICE const char* row_of(const TensorView& view, int64_t j) const {
    return key_row(p_, view, sequence_, hkv_, {key_lo_, key_hi_}, j);
  }

  // Row r of the block. False where there is none.
  ATTN_EXT_DEVICE bool row_at(int64_t r, ScoreRow& row) const {
    r += row_begin_;
    if (r >= row_end_) return false;
    row = stacked_row(p_, sequence_, hkv_, r);
    return true;
  }

  // What the forward saved of the own rows: their weights are exp2((x − max)·c) · inverse.
  ATTN_EXT_DEVICE void load_statistics(const RowView& row_max, const RowView& row_sum, T (&max)[Traits::kOwnRows],
                                       T (&inverse)[Traits::kOwnRows]) const {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m]) continue;
      const int64_t at = sequence_.q_row + row_[m].i;
      const T saved = load_global(row_address<const T>(row_max, row_[m].b, row_[m].h) + at);
      const T sum = load_global(row_address<const T>(row_sum, row_[m].b, row_[m].h) + at);
      max[m] = saved == -kInfinity<T> ? T(0) : saved;
      inverse[m] = sum == T(0) ? T(0) : T(1) / sum;
    }
  }

  // Where row r of the block lies in a tensor of the queries' shape; null where there is no row.
  ATTN_EXT_DEVICE const char* address_of_row(const TensorView& view, int r) const {
    ScoreRow row;
    if (!row_at(r, row)) return nullptr;
    return address(view, p_.batch_inner, row.b, row.h, sequence_.q_row + row.i);
  }

  // Where the rows that this thread loads lie in such a tensor.
  ATTN_EXT_DEVICE void find_addresses(const TensorView& view, const char* (&rows)[kRowLoads]) const {
    ATTN_EXT_UNROLL
    for (int n = 0; n < kRowLoads; ++n) rows[n] = address_of_row(view, n * kLoadRows + thread_index() / 8);
  }

  // x += a · bᵀ, each sum one chain over `width`: a are rows of the block (times `factor`), b the tile's rows of k or v.
  ATTN_EXT_DEVICE void multiply(const char* const (&a_rows)[kRowLoads], const TensorView& a_view, T factor,
                                const TensorView& b_view, int64_t width, int64_t start, Scores& x) {
    T* a = shared_ + Traits::kQ;
    T* b = shared_ + Traits::kK;
    const int d_in = thread_index() % 8, row_in = thread_index() / 8;
    if (width == 0) return;
    const char* b_rows[kKeyLoads];
    ATTN_EXT_UNROLL
    for (int n = 0; n < kKeyLoads; ++n) b_rows[n] = row_of(b_view, start + n * kLoadRows + row_in);
    const int64_t a_step = a_view.stride_d * size_of(a_view.dtype), b_step = b_view.stride_d * size_of(b_view.dtype);
    ATTN_EXT_ROLLED
    for (int64_t begin = 0; begin < width; begin += Traits::kDepth) {
      sync_block();  // what was there before has been read
      ATTN_EXT_ROLLED
      for (int d = d_in; d < Traits::kDepth; d += 8) {
        const bool inside = begin + d < width;
        ATTN_EXT_UNROLL
        for (int n = 0; n < kRowLoads; ++n) {
          T number = 0;
          if (inside && a_rows[n]) {
            number = load_number<T, AnyStorage>(a_rows[n] + (begin + d) * a_step, a_view.dtype) * factor;
          }
          store_shared(a + d * Traits::kRowPitch + n * kLoadRows + row_in, number);
        }
        ATTN_EXT_UNROLL
        for (int n = 0; n < kKeyLoads; ++n) {
          const T number =
              inside ? load_number<T, typename Traits::Kv>(b_rows[n] + (begin + d) * b_step, b_view.dtype) : T(0);
          store_shared(b + d * Traits::kKeyPitch + n * kLoadRows + row_in, number);
        }
      }
      sync_block();
      const int depth = static_cast<int>(width - begin < Traits::kDepth ? width - begin : Traits::kDepth);
      ATTN_EXT_ROLLED
      for (int d = 0; d < depth; ++d) {
        const auto left =
            load_shared(reinterpret_cast<const Several<T, Traits::kOwnRows>*>(a + d * Traits::kRowPitch + own_row_));
        const auto right = load_shared(reinterpret_cast<const Four<T>*>(b + d * Traits::kKeyPitch) + lane_);
        ATTN_EXT_UNROLL
        for (int m = 0; m < Traits::kOwnRows; ++m) {
          ATTN_EXT_UNROLL
          for (int n = 0; n < Traits::kOwnKeys; ++n) x[m][n] = fma_of(left.x[m], right.x[n], x[m][n]);
        }
      }
    }
  }

 private:
  // Looks up the rows whose scores this thread has, those whose q it loads, and the keys that any (all) of them may see.
  ATTN_EXT_DEVICE void find_rows() {
    int64_t lo = std::numeric_limits<int64_t>::max(), hi = 0, lo_max = 0, hi_min = lo;
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      real_[m] = row_at(own_row_ + m, row_[m]);
      if (!real_[m]) continue;
      const KeyRange keys = row_[m].keys;
      lo_max = Largest()(lo_max, keys.lo);
      hi_min = Smallest()(hi_min, keys.hi);
      if (keys.empty()) continue;
      lo = Smallest()(lo, keys.lo);
      hi = Largest()(hi, keys.hi);
    }
    key_lo_ = block_min(lo);
    key_hi_ = -block_min(-hi);
    all_lo_ = -block_min(-lo_max);
    all_hi_ = block_min(hi_min);
    find_addresses(p_.q, q_rows_);
  }

  // The smallest `x` of all threads, through the shared memory of q.
  ATTN_EXT_DEVICE int64_t block_min(int64_t x) {
    x = join_lanes<kWarpSize, Smallest>(x);
    auto* warps = reinterpret_cast<int64_t*>(shared_ + Traits::kQ);
    sync_block();  // whoever reads what was there before
    if (thread_index() % kWarpSize == 0) store_shared(warps + thread_index() / kWarpSize, x);
    sync_block();
    for (int warp = 0; warp < Traits::kThreads / kWarpSize; ++warp) x = Smallest()(x, load_shared(warps + warp));
    return x;
  }

  const AttentionParams& p_;
  const char* q_rows_[kRowLoads];

 protected:
  const ScoreUnits<T> units_;
  T* shared_;
  const int own_row_;  // the first of this thread's rows in the block
  const int lane_;     // which of the threads that share them

  Sequence sequence_;
  int64_t hkv_ = 0, row_begin_ = 0, row_end_ = 0;
  int64_t key_lo_ = 0, key_hi_ = 0;  // keys that any row may see, and the block looks at
  int64_t all_lo_ = 0, all_hi_ = 0;  // keys that all rows see by position
  ScoreRow row_[Traits::kOwnRows];
  bool real_[Traits::kOwnRows];
};

}  // namespace attn_ext::cuda
