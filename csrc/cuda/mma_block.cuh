// A block's rows on tensor cores: what the kernels for fp16 and bf16 have in common.
//
// 128 threads, 4 warps, each with 16 or 32 rows; tiles of 64 (32) keys. Rows of q and of a tile's k and v lie in shared memory
// as they do in global memory, in chunks of 16 bytes; chunk c of row r stands at place c ^ (r % 8) of its row, so that the
// eight rows of a matrix that ldmatrix loads are in different banks. Rows of all query heads that share a key/value head are
// stacked, as on the CPU: row r is head r / Lq of the group, query r % Lq.
//
// A lane has of every 16 × 8 piece of scores (and of the output) rows g = lane / 4 and g + 8, columns lane % 4 · 2 and the
// next: element n of the four belongs to row g + n / 2 · 8.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/blocks.cuh"
#include "cuda/primitives.cuh"
#include "cuda/scores.cuh"
#include "philox.h"

namespace attn_ext::cuda {

// A row of the block: which it is of which head, and the keys lo ≤ j < hi that it may see.
struct alignas(32) MmaRow {
  int64_t h, i, lo, hi;  // h < 0: there is no such row

  ATTN_EXT_DEVICE bool real() const { return h >= 0; }
};

// What a task needs now and then: its number and the call's constants. (Like the sequence looked up where it is asked for:
// registers are scarce.)
struct alignas(32) MmaTask : ScoreUnits<float> {
  int64_t number;
};

// The sequence of a batch entry, and the key/value head.
struct alignas(64) MmaSequence : Sequence {
  int64_t hkv;
};

// Keys that a row of a warp may see, and those that all of its rows see, by position.
struct alignas(32) MmaRange {
  int64_t lo, hi, all_lo, all_hi;

  // Whether one of the rows sees one of the keys [start, start + count), whether all of them see all.
  ATTN_EXT_DEVICE bool meets(int64_t start, int count) const { return start < hi && start + count > lo; }
  ATTN_EXT_DEVICE bool is_whole(int64_t start, int count) const { return start >= all_lo && start + count <= all_hi; }
};

// What the blocks of a kernel look like, and where in shared memory things lie, in bytes.
//   rows       row_tensors × [kRows][kWidth]      q, and for gradients the one that comes in for out
//   keys       key_stages × 2 × [kKeys][kWidth]   k, v
//   what is known of the rows, the warps, the sequence
template <class StorageType, int width, int row_tiles, int keys, int row_tensors = 1, int key_stages = 1>
struct MmaTraits {
  using Storage = StorageType;

  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int kWidth = width;  // columns that there is room for
  static constexpr int kRowTiles = row_tiles, kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = keys, kKeyTiles = kKeys / 8;
  static constexpr int kChunks = kWidth / 8;  // of 16 bytes, a row
  static constexpr int kRowBytes = kWidth * 2;
  static_assert(kWarpRows <= kWarpSize && kKeyTiles % 2 == 0 && kKeyTiles <= 8 && kChunks >= 8);
  static_assert(kThreads % kChunks == 0);

  static constexpr int kQ = 0;
  static constexpr int kRowTensorBytes = kRows * kRowBytes;
  static constexpr int kK = kQ + row_tensors * kRowTensorBytes;
  static constexpr int kV = kK + kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kKeys * kRowBytes;
  static constexpr int kRowsAt = kK + key_stages * kStageBytes;
  static constexpr int kRangesAt = kRowsAt + kRows * static_cast<int>(sizeof(MmaRow));
  static constexpr int kTaskAt = kRangesAt + (kWarps + 1) * static_cast<int>(sizeof(MmaRange));
  static constexpr int kSequenceAt = kTaskAt + static_cast<int>(sizeof(MmaTask));
  static_assert(kSequenceAt % sizeof(MmaSequence) == 0);
  static constexpr size_t kSharedBytes = kSequenceAt + sizeof(MmaSequence);
};

template <class Traits>
class MmaBlock {
 public:
  // The task after this one.
  ATTN_EXT_DEVICE int64_t next_task() const { return task_number() + block_count(); }

 protected:
  using Storage = typename Traits::Storage;
  using Scores = Four<float>[Traits::kRowTiles][Traits::kKeyTiles];
  using Sums = Four<float>[Traits::kRowTiles][Traits::kWidth / 8];
  // Numbers of the rows' pairs with so many keys, rounded, as left factors.
  template <int keys>
  using LeftFactors = Four<uint32_t>[Traits::kRowTiles][keys / 16];
  using Weights = LeftFactors<Traits::kKeys>;

  ATTN_EXT_DEVICE explicit MmaBlock(const AttentionParams& p)
      : p_(p),
        shared_(shared_memory()),
        rows_(reinterpret_cast<MmaRow*>(shared_ + Traits::kRowsAt)),
        ranges_(reinterpret_cast<MmaRange*>(shared_ + Traits::kRangesAt)),
        task_(reinterpret_cast<MmaTask*>(shared_ + Traits::kTaskAt)),
        sequence_(reinterpret_cast<MmaSequence*>(shared_ + Traits::kSequenceAt)),
        warp_(thread_index() / kWarpSize),
        lane_(thread_index() % kWarpSize) {}

  // ---- Rows ----------------------------------------------------------------------------------------------------------

  // Turns to batch entry b and key/value head hkv for task `number`. All threads meet in here.
  ATTN_EXT_DEVICE void begin_task(int64_t number, int64_t b, int64_t hkv) const {
    sync_block();  // what was there before has been read
    if (thread_index() == 0) {
      store_shared(sequence_, MmaSequence{sequence_at(p_, b), hkv});
      store_shared(task_, MmaTask{ScoreUnits<float>(p_), number});
    }
    sync_block();
  }

  // Turns to the rows from row_begin on. False, for all threads, where there are none. All threads meet in here.
  ATTN_EXT_DEVICE bool begin_rows(int64_t row_begin) const {
    return begin_rows(row_begin, [](MmaRange&) {});
  }
  // The same, with fewer keys: `restrict` turns those that the rows may see into those that the block is to look at.
  template <class Restrict>
  ATTN_EXT_DEVICE bool begin_rows(int64_t row_begin, const Restrict& restrict) const {
    const MmaSequence s = sequence();
    if (row_begin >= p_.Hq / p_.Hkv * s.Lq) return false;
    sync_block();  // what was there before has been read
    const int own = warp_ * Traits::kWarpRows + lane_ % Traits::kWarpRows;
    const MmaRow row = row_at(s, row_begin + own);
    if (lane_ < Traits::kWarpRows) store_shared(rows_ + own, row);
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    const bool sees = row.real() && row.lo < row.hi;
    MmaRange range;
    range.lo = join_lanes<kWarpSize, Smallest>(sees ? row.lo : kMost);
    range.hi = join_lanes<kWarpSize, Largest>(sees ? row.hi : int64_t{0});
    range.all_lo = join_lanes<kWarpSize, Largest>(row.real() ? row.lo : int64_t{0});
    range.all_hi = join_lanes<kWarpSize, Smallest>(row.real() ? row.hi : kMost);
    if (lane_ == 0) store_shared(ranges_ + warp_, range);
    sync_block();
    if (thread_index() == 0) {
      MmaRange all = load_shared(ranges_);
      for (int warp = 1; warp < Traits::kWarps; ++warp) {
        range = load_shared(ranges_ + warp);
        all.lo = Smallest()(all.lo, range.lo);
        all.hi = Largest()(all.hi, range.hi);
        all.all_lo = Largest()(all.all_lo, range.all_lo);
        all.all_hi = Smallest()(all.all_hi, range.all_hi);
      }
      restrict(all);
      store_shared(ranges_ + Traits::kWarps, all);
    }
    sync_block();
    return true;
  }

  ATTN_EXT_DEVICE int64_t task_number() const { return load_shared(task_).number; }
  ATTN_EXT_DEVICE ScoreUnits<float> units() const { return load_shared(task_); }

  // The sequence that the rows belong to.
  ATTN_EXT_DEVICE MmaSequence sequence() const { return load_shared(sequence_); }

  // Keys that rows of the block may see, as far as the block looks at them.
  ATTN_EXT_DEVICE MmaRange block_keys() const { return load_shared(ranges_ + Traits::kWarps); }

  // Whether a row of this warp sees a key of the tile by position.
  ATTN_EXT_DEVICE bool warp_sees(int64_t start) const {
    return load_shared(ranges_ + warp_).meets(start, Traits::kKeys);
  }

  // Of the rows of row tile m: the one that element 2 · half of a piece belongs to.
  ATTN_EXT_DEVICE MmaRow row_of_half(int m, int half) const {
    return load_shared(rows_ + warp_ * Traits::kWarpRows + m * 16 + half * 8 + lane_ / 4);
  }

  // Where row r of the block lies in a tensor of the queries' shape; null where there is no row.
  ATTN_EXT_DEVICE const char* address_of_row(const TensorView& view, int r) const {
    const MmaRow row = load_shared(rows_ + r);
    if (!row.real()) return nullptr;
    const MmaSequence s = sequence();
    return address(view, p_.batch_inner, s.b, row.h, s.q_row + row.i);
  }

  // Where the row of key j lies, or of the nearest one that a row of the block may see.
  ATTN_EXT_DEVICE const char* row_of_key(const TensorView& view, const MmaRange& keys, int64_t j) const {
    const MmaSequence s = sequence();
    return key_row(p_, view, s, s.hkv, {keys.lo, keys.hi}, j);
  }

  // ---- Loading -------------------------------------------------------------------------------------------------------

  // Whether every row of a tensor begins at a multiple of 16 bytes and is contiguous.
  ATTN_EXT_DEVICE static bool in_chunks(const TensorView& view) {
    const int64_t strides = view.stride_b0 | view.stride_b1 | view.stride_h | view.stride_l;
    return view.stride_d == 1 && strides % 8 == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  }

  ATTN_EXT_DEVICE static char* chunk_at(char* tile, int row, int chunk) {
    return tile + row * Traits::kRowBytes + (chunk ^ (row % 8)) * 16;
  }
  ATTN_EXT_DEVICE static const char* chunk_at(const char* tile, int row, int chunk) {
    return tile + row * Traits::kRowBytes + (chunk ^ (row % 8)) * 16;
  }

  // Begins to load rows, of which row_at(r) says where they lie (null: zeros), to `to`. Columns from `width` on are zeros as
  // far as products read them. The copies belong to the group that the caller commits next; where rows do not come in
  // chunks they are stored at once.
  template <int rows, class RowAt>
  ATTN_EXT_DEVICE void load(char* to, const TensorView& view, int64_t width, const RowAt& row_at) const {
    const int chunk = thread_index() % Traits::kChunks;
    const int64_t left = width - chunk * 8;
    if (left <= -8) return;  // products read 16 columns at a time
    const int most = static_cast<int>(left < 0 ? 0 : left < 8 ? left : 8);
    const bool whole = in_chunks(view);
    const int64_t step = view.stride_d * 2;
    ATTN_EXT_ROLLED
    for (int r = thread_index() / Traits::kChunks; r < rows; r += Traits::kThreads / Traits::kChunks) {
      const char* row = row_at(r);
      const int count = row ? most : 0;
      char* at = chunk_at(to, r, chunk);
      if (whole) {
        copy_async(at, count > 0 ? row + chunk * 16 : view.data, count * 2);
      } else {
        Several<uint16_t, 8> numbers = {};
        ATTN_EXT_UNROLL
        for (int e = 0; e < 8; ++e) {
          if (e < count) numbers.x[e] = load_global(reinterpret_cast<const uint16_t*>(row + (chunk * 8 + e) * step));
        }
        store_shared(reinterpret_cast<Several<uint16_t, 8>*>(at), numbers);
      }
    }
  }

  ATTN_EXT_DEVICE void load_rows(char* to, const TensorView& view, int64_t width) const {
    load<Traits::kRows>(to, view, width, [&](int r) { return address_of_row(view, r); });
  }
  ATTN_EXT_DEVICE void load_keys(char* to, const TensorView& view, int64_t width, int64_t start) const {
    const MmaRange keys = block_keys();
    load<Traits::kKeys>(to, view, width, [&](int j) { return row_of_key(view, keys, start + j); });
  }

  // ---- Products ------------------------------------------------------------------------------------------------------

  // x = a · bᵀ for this warp's rows of `a` and all keys of the tile `b`, over `width` columns.
  ATTN_EXT_DEVICE void multiply_rows(const char* a, const char* b, int64_t width, Scores& x) const {
    ATTN_EXT_UNROLL
    for (auto& row : x) {
      ATTN_EXT_UNROLL
      for (auto& piece : row) piece = {};
    }
    const int first_row = warp_ * Traits::kWarpRows, lane = computed_here(lane_);
    ATTN_EXT_ROLLED
    for (int chunk = 0; chunk * 8 < width; chunk += 2) {
      Four<uint32_t> left[Traits::kRowTiles];
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        left[m] = load_matrices<false>(chunk_at(a, first_row + m * 16 + lane % 16, chunk + lane / 16));
      }
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kKeyTiles; n += 2) {
        const auto right = load_matrices<false>(chunk_at(b, n * 8 + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
        ATTN_EXT_UNROLL
        for (int m = 0; m < Traits::kRowTiles; ++m) {
          multiply_matrices<Storage>(x[m][n], left[m], {{right.x[0], right.x[1]}});
          multiply_matrices<Storage>(x[m][n + 1], left[m], {{right.x[2], right.x[3]}});
        }
      }
    }
  }

  // Scores (or what else belongs to pairs) as left factors of the next product.
  ATTN_EXT_DEVICE static void round_weights(const Scores& x, Weights& weights) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int k = 0; k < Traits::kKeys / 16; ++k) {
        ATTN_EXT_UNROLL
        for (int n = 0; n < 4; ++n) {
          const Four<float>& piece = x[m][k * 2 + n / 2];
          weights[m][k].x[n] = pack_pair<Storage>(piece.x[n % 2 * 2], piece.x[n % 2 * 2 + 1]);
        }
      }
    }
  }

  // acc += weights · b, b the rows of a tile's keys, up to `width` columns. Hidden pairs have weight 0; where b holds NaN or
  // Inf they are left out, for 0 · NaN would reach the sum.
  ATTN_EXT_DEVICE void multiply_columns(const Weights& weights, const char* b, int64_t width, Sums& acc) const {
    multiply_columns(weights, b, width, acc, some_hidden_, [&](int m) { return hidden_[m]; });
  }
  // The same with other pairs, 16 · depth a row: hidden_of(m) tells which of them are hidden, where some are, as hidden_ does.
  template <int depth, class HiddenOf>
  ATTN_EXT_DEVICE void multiply_columns(const Four<uint32_t> (&weights)[Traits::kRowTiles][depth], const char* b,
                                        int64_t width, Sums& acc, bool some_hidden, const HiddenOf& hidden_of) const {
    if (some_hidden) {
      multiply_columns_but<true>(weights, b, width, acc, hidden_of);
    } else {
      multiply_columns_but<false>(weights, b, width, acc, hidden_of);
    }
  }

  // Stores the sums of one row, times `by`, to columns below `width` of the row of a tensor that begins at `to`.
  ATTN_EXT_DEVICE static void store_row(const TensorView& view, char* to, int64_t width, float by, int m, int half,
                                        Sums& acc) {
    const bool paired = view.stride_d == 1 && reinterpret_cast<uintptr_t>(view.data) % 4 == 0 &&
                        (view.stride_b0 | view.stride_b1 | view.stride_h | view.stride_l) % 2 == 0;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kWidth / 8; ++n) {
      float& low = acc[m][n].x[half * 2];
      float& high = acc[m][n].x[half * 2 + 1];
      low *= by;  // in place: there are no registers for copies
      high *= by;
      const int column = n * 8 + thread_index() % 4 * 2;
      if (paired && column + 1 < width) {
        store_global(reinterpret_cast<uint32_t*>(to + column * 2), pack_pair<Storage>(low, high));
      } else {
        auto* numbers = reinterpret_cast<Storage*>(to);
        if (column < width) store_global(numbers + column * view.stride_d, convert_to<Storage>(low));
        if (column + 1 < width) store_global(numbers + (column + 1) * view.stride_d, convert_to<Storage>(high));
      }
    }
  }

  // ---- Scores --------------------------------------------------------------------------------------------------------

  // Finds out which pairs of the tile at `start` are hidden by position or mask, and which the dropout keeps. Before the
  // product, while there are registers for it.
  ATTN_EXT_DEVICE void look_at_pairs(int64_t start) {
    some_hidden_ = may_hide(load_shared(ranges_ + warp_), start, Traits::kKeys);
    if (some_hidden_) {
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        hidden_[m] = (~seen_of_row(start, m, 0) & 0xffffu) | ~seen_of_row(start, m, 1) << 16;
      }
    }
    if (p_.dropout) {
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kRowTiles; ++m) kept_[m] = kept_of_row(start, m, 0) | kept_of_row(start, m, 1) << 16;
    }
  }

  // Whether one of those rows may not see one of the keys [start, start + count).
  ATTN_EXT_DEVICE bool may_hide(const MmaRange& rows, int64_t start, int count) const {
    return units().scaled || p_.mask || !rows.is_whole(start, count);
  }

  // Scores of that tile from q·k in x: scaled, capped, biased as the call says; −Inf where hidden.
  ATTN_EXT_DEVICE void finish_scores(int64_t start, Scores& x) {
    if (units().q_factor < 0) {
      for_each_pair([&](int m, int n, int e) { x[m][n].x[e] = -x[m][n].x[e]; });
    }
    if (units().scaled) {
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        ATTN_EXT_UNROLL
        for (int half = 0; half < 2; ++half) finish_row(start, m, half, x);
      }
    }
    if (some_hidden_) {
      for_each_pair([&](int m, int n, int e) {
        if (hidden(m, n, e)) x[m][n].x[e] = -kInfinity<float>;
      });
    }
  }

  // Calls f(m, n, e) for element e of piece n in row tile m.
  template <class F>
  ATTN_EXT_DEVICE static void for_each_pair(const F& f) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kKeyTiles; ++n) {
        ATTN_EXT_UNROLL
        for (int e = 0; e < 4; ++e) f(m, n, e);
      }
    }
  }

  // Whether that pair is hidden. (Where none may be, nobody asks.)
  ATTN_EXT_DEVICE bool hidden(int m, int n, int e) const { return hidden_[m] >> bit_of(n, e) & 1u; }

  // Takes what belongs to pairs that the dropout drops. What stays is not scaled yet.
  ATTN_EXT_DEVICE void drop(Scores& x) const {
    if (!p_.dropout) return;
    for_each_pair([&](int m, int n, int e) {
      if (!(kept_[m] >> bit_of(n, e) & 1u)) x[m][n].x[e] = 0;
    });
  }

 private:
  // Row r of those that share the key/value head.
  ATTN_EXT_DEVICE MmaRow row_at(const MmaSequence& s, int64_t r) const {
    if (r >= p_.Hq / p_.Hkv * s.Lq) return {-1, 0, 0, 0};
    const ScoreRow row = stacked_row(p_, s, s.hkv, r);
    return {row.h, row.i, row.keys.lo, row.keys.hi};
  }

  // Calls f(n, e) for the keys n · 8 + lane % 4 · 2 + e of a tile.
  template <class F>
  ATTN_EXT_DEVICE static void for_each_own(const F& f) {
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeyTiles; ++n) {
      ATTN_EXT_UNROLL
      for (int e = 0; e < 2; ++e) f(n, e);
    }
  }

  // Which of the own keys a row sees, by position and mask: bit n · 2 + e for f(n, e)'s.
  ATTN_EXT_DEVICE uint32_t seen_of_row(int64_t start, int m, int half) const {
    const MmaRow row = row_of_half(m, half);
    const int own = computed_here(lane_) % 4 * 2;
    const auto in_tile = [&](int64_t j) {
      const int64_t at = j - start;
      return static_cast<int>(at < 0 ? 0 : at > Traits::kKeys ? Traits::kKeys : at);
    };
    const int lo = in_tile(row.lo), hi = in_tile(row.hi);  // a row that is none has no keys
    uint32_t seen = 0;
    for_each_own([&](int n, int e) {
      const int key = n * 8 + own + e;
      if (key >= lo && key < hi) seen |= 1u << (n * 2 + e);
    });
    if (!p_.mask || seen == 0) return seen;
    const char* at = address(p_.mask, p_.batch_inner, sequence().b, row.h, row.i, start + own);
    for_each_own([&](int n, int e) {
      const uint32_t bit = 1u << (n * 2 + e);
      if (!(seen & bit)) return;
      if (load_global(reinterpret_cast<const uint8_t*>(at + (n * 8 + e) * p_.mask.stride_d)) == 0) seen &= ~bit;
    });
    return seen;
  }

  // Which of them the dropout keeps. The four lanes of a row take a piece of keys each; the lanes of a warp meet.
  ATTN_EXT_DEVICE uint32_t kept_of_row(int64_t start, int m, int half) const {
    const MmaRow row = row_of_half(m, half);
    uint32_t kept = 0;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeyTiles; n += 4) {
      const int64_t j = start + (n + lane_ % 4) * 8;
      const uint32_t own = dropout_kept(dropout_seed_of(p_), p_.dropout_threshold, sequence().b, row.h, row.i, j);
      ATTN_EXT_UNROLL
      for (int other = 0; other < 4; ++other) {
        const uint32_t piece = shuffle_from(own, lane_ / 4 * 4 + other) >> (lane_ % 4 * 2) & 3u;
        kept |= piece << ((n + other) * 2);
      }
    }
    return kept;
  }

  // What the scores of one row go through. A bias of −Inf hides.
  ATTN_EXT_DEVICE void finish_row(int64_t start, int m, int half, Scores& x) {
    const MmaRow row = row_of_half(m, half);
    if (!row.real()) return;
    const int own = lane_ % 4 * 2;
    for_each_own([&](int n, int e) { x[m][n].x[half * 2 + e] *= units().scale; });
    if (p_.softcap != 0.0) {
      const auto cap = static_cast<float>(p_.softcap), by = static_cast<float>(1.0 / p_.softcap);
      for_each_own([&](int n, int e) {
        float& score = x[m][n].x[half * 2 + e];
        score = cap * std::tanh(score * by);
      });
    }
    ATTN_EXT_ROLLED
    for (int bias = 0; bias < kMaxBiases; ++bias) {
      const TensorView& view = p_.bias[bias];
      if (!view) continue;
      const char* at = address(view, p_.batch_inner, sequence().b, row.h, row.i, start + own);
      switch (view.dtype) {
        case DType::float64:
          add_bias<double>(at, view.stride_d, m, half, x);
          break;
        case DType::bfloat16:
          add_bias<bf16>(at, view.stride_d, m, half, x);
          break;
        case DType::float16:
          add_bias<f16>(at, view.stride_d, m, half, x);
          break;
        default:
          add_bias<float>(at, view.stride_d, m, half, x);
      }
    }
    if (p_.alibi_slopes) {
      const float slope = -load_global(p_.alibi_slopes + sequence().b * p_.alibi_stride_b + row.h);
      const int64_t first = start + own - aligned_key(p_, sequence(), row.i);
      for_each_own([&](int n, int e) {
        const int64_t distance = first + n * 8 + e;
        float& score = x[m][n].x[half * 2 + e];
        score = fma_of(slope, static_cast<float>(distance < 0 ? -distance : distance), score);
      });
    }
  }

  template <class BiasStorage>
  ATTN_EXT_DEVICE void add_bias(const char* row, int64_t stride, int m, int half, Scores& x) {
    for_each_own([&](int n, int e) {
      const int element = half * 2 + e;
      if (hidden(m, n, element)) return;
      const auto* at = reinterpret_cast<const BiasStorage*>(row) + (n * 8 + e) * stride;
      const float add = convert_from<float>(load_global(at));
      if (add == -kInfinity<float>) hidden_[m] |= 1u << bit_of(n, element);  // even where q·k is NaN
      x[m][n].x[element] += add;
    });
  }

  // Bit 15 of each half of a pair where that number is NaN or Inf: its exponent is all ones.
  ATTN_EXT_DEVICE static uint32_t not_finite(uint32_t pair) {
    constexpr uint32_t kCarry = std::is_same_v<Storage, bf16> ? 0x00800080u : 0x04000400u;
    return ((pair & 0x7fff7fffu) + kCarry) & 0x80008000u;
  }

  template <bool leaves_out, int depth, class HiddenOf>
  ATTN_EXT_DEVICE void multiply_columns_but(const Four<uint32_t> (&weights)[Traits::kRowTiles][depth], const char* b,
                                            int64_t width, Sums& acc, const HiddenOf& hidden_of) const {
    uint32_t found = 0;
    const int lane = computed_here(lane_);
    // Four pieces at a time: as many products as depend on no other keep the tensor cores busy.
    ATTN_EXT_UNROLL
    for (int first = 0; first < Traits::kWidth / 8; first += 4) {
      if (first * 8 >= width) continue;
      ATTN_EXT_UNROLL
      for (int k = 0; k < depth; ++k) {
        ATTN_EXT_UNROLL
        for (int n = first; n < first + 4; n += 2) {
          if (n * 8 >= width) continue;
          auto right = load_matrices<true>(chunk_at(b, k * 16 + lane % 16, n + lane / 16));
          if constexpr (leaves_out) {
            ATTN_EXT_UNROLL
            for (uint32_t& pair : right.x) {
              const uint32_t bad = not_finite(pair);
              found |= bad;
              pair &= ~((bad >> 15) * 0xffffu);
            }
          }
          ATTN_EXT_UNROLL
          for (int m = 0; m < Traits::kRowTiles; ++m) {
            multiply_matrices<Storage>(acc[m][n], weights[m][k], {{right.x[0], right.x[1]}});
            multiply_matrices<Storage>(acc[m][n + 1], weights[m][k], {{right.x[2], right.x[3]}});
          }
        }
      }
    }
    if constexpr (leaves_out) {
      if (join_lanes<kWarpSize, Either>(found) != 0) add_not_finite(weights, b, width, acc, hidden_of);
    }
  }

  // acc += weights · b for the numbers of b that are NaN or Inf, and the pairs that are not hidden. The lanes of a warp meet.
  template <int depth, class HiddenOf>
  ATTN_EXT_DEVICE void add_not_finite(const Four<uint32_t> (&weights)[Traits::kRowTiles][depth], const char* b,
                                      int64_t width, Sums& acc, const HiddenOf& hidden_of) const {
    uint32_t own_hidden[Traits::kRowTiles];
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) own_hidden[m] = hidden_of(m);
    ATTN_EXT_ROLLED
    for (int j = 0; j < depth * 16; ++j) {
      const int holder = lane_ / 4 * 4 + j % 8 / 2;  // the lane that has key j of the own rows
      float weight[Traits::kRowTiles][2];
      bool hides[Traits::kRowTiles][2];
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        const uint32_t hidden = shuffle_from(own_hidden[m], holder);
        ATTN_EXT_UNROLL
        for (int half = 0; half < 2; ++half) {
          uint32_t pair = 0;
          ATTN_EXT_UNROLL
          for (int n = 0; n < depth * 2; ++n) {  // by masks: an index would move the weights out of registers
            pair |= weights[m][n / 2].x[n % 2 * 2 + half] & (n == j / 8 ? 0xffffffffu : 0u);
          }
          pair = shuffle_from(pair, holder);
          weight[m][half] = to_float(Storage{static_cast<uint16_t>(pair >> (j % 2 * 16))});
          hides[m][half] = hidden >> bit_of(j / 8, half * 2 + j % 2) & 1u;
        }
      }
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kWidth / 8; ++n) {
        if (n * 8 >= width) continue;
        const uint32_t pair = load_shared(reinterpret_cast<const uint32_t*>(chunk_at(b, j, n)) + lane_ % 4);
        if (not_finite(pair) == 0) continue;
        ATTN_EXT_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (!(not_finite(pair) >> (e * 16 + 15) & 1u)) continue;
          const float number = to_float(Storage{static_cast<uint16_t>(pair >> (e * 16))});
          ATTN_EXT_UNROLL
          for (int m = 0; m < Traits::kRowTiles; ++m) {
            ATTN_EXT_UNROLL
            for (int half = 0; half < 2; ++half) {
              float& sum = acc[m][n].x[half * 2 + e];
              if (!hides[m][half]) sum = fma_of(weight[m][half], number, sum);
            }
          }
        }
      }
    }
  }

  const AttentionParams& p_;

 protected:
  // Where element e of piece n is in hidden_ and kept_: 16 bits of row g, then those of row g + 8.
  ATTN_EXT_DEVICE static constexpr int bit_of(int n, int e) { return e / 2 * 16 + n * 2 + e % 2; }

  char* shared_;
  MmaRow* rows_;
  MmaRange* ranges_;  // of the warps, then of the block
  MmaTask* task_;
  MmaSequence* sequence_;
  const int warp_, lane_;

  bool some_hidden_ = false;            // whether the tile has pairs that may be hidden
  uint32_t hidden_[Traits::kRowTiles];  // which: 16 bits of row g, then those of row g + 8
  uint32_t kept_[Traits::kRowTiles];    // by the dropout
};

// Calls f with an object of the call's format and width, Choice<Storage, columns>: the kernels are compiled for 64, 128 and
// 256 columns.
template <template <class, int> class Choice, class Storage, class F>
auto with_width(const AttentionParams& p, const F& f) {
  const int64_t width = p.D > p.Dv ? p.D : p.Dv;
  if (width <= 64) return f(Choice<Storage, 64>());
  if (width <= 128) return f(Choice<Storage, 128>());
  return f(Choice<Storage, 256>());
}
template <template <class, int> class Choice, class F>
auto with_choice(const AttentionParams& p, const F& f) {
  return p.q.dtype == DType::bfloat16 ? with_width<Choice, bf16>(p, f) : with_width<Choice, f16>(p, f);
}

}  // namespace attn_ext::cuda
