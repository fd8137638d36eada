// The forward for every dtype and head dim: plain multiply-adds with the accuracy of fp32 and fp64, sums in one fixed order.
// Where tensor cores serve (fp16, bf16, D ≤ 256) they are faster; this is what is left, and what they are compared with.
//
// A block computes its rows (score_block.cuh) and up to kColumns columns of the output; wider ones are computed by several
// blocks, each with scores of its own.
//
//   for each tile of 32 keys that one of the rows may see:
//     s = q · kᵀ        over pieces of D through shared memory; a thread has 4 (2) rows × 4 keys
//     scale, cap, biases, masks where the tile needs any
//     m, l, acc move along (online softmax); 8 neighbouring lanes share a row
//     p → shared memory, v → shared memory; acc += p · v, a thread has 4 (2) rows × kColumns / 8 columns
//
// Tiles begin at multiples of 32 of the key's position, and a row's sums run over its keys in one order whatever the other
// rows of the block are, segment by segment (segments.cuh): a row has the same bits in every batch.
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/segments.cuh"
#include "cuda/tile_block.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Traits --------------------------------------------------------------------------------------------------------

// 38,912 bytes of shared memory with 128 columns, 30,720 with 64; 34,816 for double.
template <class T, class KvStorage, int columns>
using General = TileTraits<T, KvStorage, columns, false>;

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class Traits>
class ForwardBlock : TileBlock<Traits> {
  using Base = TileBlock<Traits>;
  using T = typename Traits::Number;
  using Base::lane_;
  using Base::own_row_;
  using Base::real_;
  using Base::row_;
  using Base::sequence_;
  using Base::units_;

 public:
  ATTN_EXT_DEVICE ForwardBlock(const ForwardParams& p, const Split& split) : Base(p), p_(p), split_(split) {}

  // Rows row_begin … of key/value head hkv of batch entry b, output columns column_begin … Where keys are shared out: their
  // segment of that place, which is number `partial` of all.
  ATTN_EXT_DEVICE void compute(int64_t b, int64_t hkv, int64_t row_begin, int64_t column_begin, int64_t place,
                               int64_t partial) {
    Base::begin_sequence(b, hkv);
    if (!Base::begin_rows(row_begin, Base::stacked_rows())) return;
    const int64_t keys = segment_keys(p_, sequence_);
    if (split_.is_shared() && Base::key_lo_ < Base::key_hi_) {
      const int64_t begin = segment_at(split_, place, Base::key_lo_, keys) * keys;
      Base::keep_keys({begin, begin + keys});
    }
    clear();
    if (Base::key_lo_ < Base::key_hi_) {
      Before memory;
      Before& before = *out_of_registers(&memory);
      int64_t segment = Base::key_lo_ / keys * keys;
      compute_segment(segment, keys, column_begin);
      for (segment += keys; segment < Base::key_hi_; segment += keys) {
        put_aside(before);
        compute_segment(segment, keys, column_begin);
        join(segment, before);
      }
      if (split_.is_shared()) store_partial(partial, column_begin);
    }
    if (!split_.is_shared()) finish(column_begin);
  }

 private:
  // What the own rows have come to in the segments before, like max_, sum_ and acc_.
  struct Before {
    T max[Traits::kOwnRows], sum[Traits::kOwnRows];
    typename Base::Sums acc;
  };

  ATTN_EXT_DEVICE void clear() {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      max_[m] = -kInfinity<T>;
      sum_[m] = 0;
      ATTN_EXT_UNROLL
      for (Four<T>& vector : acc_[m]) vector = {};
    }
  }

  ATTN_EXT_DEVICE void put_aside(Before& before) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      before.max[m] = max_[m];
      before.sum[m] = sum_[m];
      ATTN_EXT_UNROLL
      for (int c = 0; c < Traits::kVectors; ++c) before.acc[m][c] = acc_[m][c];
    }
    clear();
  }

  // Joins what the rows have come to in the segment that begins at key `begin` with the segments before.
  ATTN_EXT_DEVICE void join(int64_t begin, const Before& before) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m] || row_[m].keys.lo >= begin) continue;
      const bool sees = row_[m].keys.hi > begin;  // else the row stays as it is, down to the sign of a zero
      const Joint<T> joint = join_segments(units_, before.max[m], before.sum[m], max_[m], sum_[m]);
      max_[m] = joint.max;
      sum_[m] = joint.sum;
      ATTN_EXT_UNROLL
      for (int c = 0; c < Traits::kVectors; ++c) {
        ATTN_EXT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const T left = before.acc[m][c].x[e];
          acc_[m][c].x[e] = sees ? joint(left, acc_[m][c].x[e]) : left;
        }
      }
    }
  }

  // The keys of one segment, those that a row may see.
  ATTN_EXT_DEVICE void compute_segment(int64_t begin, int64_t keys, int64_t column_begin) {
    const int64_t end = Smallest()(begin + keys, Base::key_hi_);
    static_assert(1024 % Traits::kKeys == 0);
    for (int64_t start = Largest()(begin, Base::first_tile()); start < end; start += Traits::kKeys) {
      typename Base::Scores x;
      Base::compute_scores(start, x);
      T v_scales[Traits::kOwnKeys];
      if (p_.scales.v) {
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kOwnKeys; ++n) {
          v_scales[n] = load_number<T, float>(Base::row_of(p_.scales.v, Base::own_key(start) + n), DType::float32);
        }
      }
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) softmax(m, start, x[m], v_scales);
      const auto row_at = [&](int j) { return Base::row_of(p_.v, start + j); };
      const uint32_t* hidden = Base::template load_factor<typename Traits::Kv>(p_.v, T(1), column_begin, p_.Dv, row_at);
      Base::multiply_tile(hidden, acc_);
    }
  }

  // Turns the scores of own row m into weights, on their way to shared memory, and moves the row's max, sum and acc along.
  ATTN_EXT_DEVICE void softmax(int m, int64_t start, const T (&x)[Traits::kOwnKeys],
                               const T (&v_scales)[Traits::kOwnKeys]) {
    T now = max_[m];  // NaNs are passed over here and come back through the weights
    ATTN_EXT_UNROLL
    for (const T score : x) now = Largest()(now, score);
    now = join_lanes<Traits::kLanesPerRow, Largest>(now);
    const T offset = now == -kInfinity<T> ? T(0) : now;  // nothing seen yet: −Inf − (−Inf) would be NaN
    const uint32_t kept = Base::kept_of(m, start);
    T sum = 0;
    Four<T> weights;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kOwnKeys; ++n) {
      const bool hidden = x[n] == -kInfinity<T>;
      Base::note_hidden(m, n, hidden);
      const T weight = exp2_of((x[n] - offset) * units_.c);
      sum += weight;
      weights.x[n] = Base::dropped(weight, kept, start, n);
      if (p_.scales.v) weights.x[n] = hidden ? T(0) : weights.x[n] * v_scales[n];  // a free place's scale may be NaN
    }
    sum = join_lanes<Traits::kLanesPerRow, Sum>(sum);
    if (now != max_[m]) {
      const T factor = exp2_of((max_[m] - now) * units_.c);
      sum_[m] *= factor;
      ATTN_EXT_UNROLL
      for (Four<T>& vector : acc_[m]) {
        ATTN_EXT_UNROLL
        for (T& number : vector.x) number *= factor;
      }
      max_[m] = now;
    }
    sum_[m] += sum;
    store_shared(Base::tile_row(m), weights);
  }

  // Adds the sink, divides by the sum, stores the rows and their statistics.
  ATTN_EXT_DEVICE void finish(int64_t column_begin) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m]) continue;
      const ScoreRow& row = row_[m];
      const RowEnd<T> end = end_row(p_, units_, row.h, max_[m], sum_[m]);
      Base::store_row(p_.out, m, end.by, column_begin, p_.Dv, acc_);
      if (lane_ == 0 && column_begin == 0) {
        store_statistics(p_, units_, row.b, row.h, sequence_.q_row + row.i, end);
      }
    }
  }

  // Stores what the rows have come to in their one segment.
  ATTN_EXT_DEVICE void store_partial(int64_t number, int64_t column_begin) const {
    const Partial<T> partial(p_, split_, number);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m]) continue;
      const int r = own_row_ + m;
      T* columns = partial.columns(r);
      ATTN_EXT_UNROLL
      for (int c = 0; c < Traits::kVectors; ++c) {
        ATTN_EXT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int64_t column = column_begin + (c * Traits::kLanesPerRow + lane_) * 4 + e;
          if (column < p_.Dv) store_global(columns + column, acc_[m][c].x[e]);
        }
      }
      if (lane_ != 0 || column_begin != 0) continue;
      store_global(partial.max(r), max_[m]);
      store_global(partial.sum(r), sum_[m]);
    }
  }

  const ForwardParams& p_;
  const Split& split_;
  T max_[Traits::kOwnRows], sum_[Traits::kOwnRows];
  typename Base::Sums acc_;
};

// How the work is cut: tasks are numbered as blocks.cuh says, for each block of rows by place of a segment where keys are
// shared out (there is one block of rows then), and for each of those by block of columns.
struct ForwardTasks {
  int64_t row_blocks = 0, column_blocks = 0, count = 0;
};

template <class Traits>
ATTN_EXT_KERNEL void forward_general(ATTN_EXT_GRID_CONSTANT const ForwardParams p,
                                     ATTN_EXT_GRID_CONSTANT const Split split, const ForwardTasks tasks) {
  ForwardBlock<Traits> block(p, split);
  const int64_t shares = split.shares();
  for (int64_t task = block_index(); task < tasks.count; task += block_count()) {
    const int64_t rows = task / tasks.column_blocks, column = task % tasks.column_blocks * Traits::kColumns;
    const BlockPlace at = place_of_rows<Traits::kRows>(p, tasks.row_blocks, rows / shares);
    block.compute(at.b, at.hkv, at.begin, column, rows % shares, rows);
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class Traits>
void launch_general(const ForwardParams& p, const Split& split, StreamHandle stream) {
  ForwardTasks tasks;
  tasks.row_blocks = row_blocks_of<Traits::kRows>(p, true);
  tasks.column_blocks =
      p.Dv > 0 ? pieces(p.Dv, Traits::kColumns) : 1;  // without columns there are still the statistics
  tasks.count = heads_of_blocks(p) * tasks.row_blocks * split.shares() * tasks.column_blocks;
  launch_tasks("forward_general", forward_general<Traits>, tasks.count, Traits::kThreads, Traits::kSharedBytes, stream,
               p, split, tasks);
}

// Calls f with an object of the traits that p is for.
template <class F>
auto with_general(const ForwardParams& p, const F& f) {
  const bool wide = p.Dv > 64;
  if (p.k.dtype == DType::float64) return f(General<double, double, 64>());
  if (p.q.dtype == DType::float64) return f(General<double, AnyStorage, 64>());  // over an int8 cache
  if (p.k.dtype == DType::float32) {
    return wide ? f(General<float, float, 128>()) : f(General<float, float, 64>());
  }
  return wide ? f(General<float, AnyStorage, 128>()) : f(General<float, AnyStorage, 64>());
}

}  // namespace

void forward_general(const ForwardParams& p, const Split& split, StreamHandle stream) {
  with_general(p, [&](auto traits) { launch_general<decltype(traits)>(p, split, stream); });
}

ForwardTile tile_general(const ForwardParams& p) {
  return with_general(p, [](auto traits) -> ForwardTile {
    using Traits = decltype(traits);
    return {Traits::kColumns, Traits::kRows, Traits::kKeys};
  });
}

}  // namespace attn_ext::cuda
