// The forward on tensor cores: fp16 and bf16, head dims to 256. Products are those of 16-bit numbers, sums are fp32; the softmax
// weights are rounded to 16 bits on their way to v, and nothing else is on the way.
//
//   q → shared memory; k of the first tile → shared memory
//   for each tile of keys that one of the rows may see:
//     wait for k; begin to load v
//     s = q · kᵀ; scale, cap, biases, masks where the tile needs any
//     m, l move along (online softmax); four neighbouring lanes share a row
//     wait for v; begin to load the next tile's k
//     acc = acc · 2^(m before − m) + p · v
//
// So one of the two buffers is loaded while the other is multiplied. A warp whose rows see none of the tile leaves it out.
// Tiles begin at multiples of their size by the key's position, and a row's sums run over its keys in one order whatever the
// other rows of the block are, segment by segment (segments.cuh): a block that walks over several puts its sums aside at each
// border.
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/mma_block.cuh"
#include "cuda/segments.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class Traits>
class ForwardMmaBlock : public MmaBlock<Traits> {
  using Base = MmaBlock<Traits>;
  using Base::lane_;
  using Base::shared_;
  using Base::warp_;

 public:
  ATTN_EXT_DEVICE ForwardMmaBlock(const ForwardParams& p, const Split& split) : Base(p), p_(p), split_(split) {}

  // Rows row_begin … of key/value head hkv of batch entry b; where keys are shared out, their segment of that place.
  ATTN_EXT_DEVICE void compute(int64_t task, int64_t b, int64_t hkv, int64_t row_begin, int64_t place) {
    Base::begin_task(task, b, hkv);
    if (!Base::begin_rows(row_begin, [&](MmaRange& block) { keep_segment(place, block); })) return;
    clear();
    Before memory;
    Before& before = *out_of_registers(&memory);
    int64_t start = Base::block_keys().lo / Traits::kKeys * Traits::kKeys;
    const bool sees_keys = start < Base::block_keys().hi;
    int tiles_left = 0;  // of the segment
    if (sees_keys) {
      tiles_left = segment_tiles() - static_cast<int>(start / Traits::kKeys % segment_tiles());
      Base::load_rows(q_at(), p_.q, p_.D);
      Base::load_keys(k_at(), p_.k, p_.D, start);
      commit_copies();
    }
    for (; start < Base::block_keys().hi; start += Traits::kKeys) {
      if (tiles_left == 0) {
        end_segment(start - segment_keys(p_, Base::sequence()), before);
        put_aside(before);
        tiles_left = segment_tiles();
      }
      --tiles_left;
      wait_copies<0>();
      sync_block();  // k is there, and v has been read
      if (p_.Dv > 0) Base::load_keys(v_at(), p_.v, p_.Dv, start);
      commit_copies();
      typename Base::Weights weights;
      const bool sees = Base::warp_sees(start);
      if (sees) compute_weights(start, weights);
      wait_copies<0>();
      sync_block();  // v is there, and k has been read
      if (start + Traits::kKeys < Base::block_keys().hi) Base::load_keys(k_at(), p_.k, p_.D, start + Traits::kKeys);
      commit_copies();
      if (sees) Base::multiply_columns(weights, v_at(), p_.Dv, acc_);
    }
    wait_copies<0>();
    if (sees_keys) {
      const int64_t keys = segment_keys(p_, Base::sequence());
      end_segment((Base::block_keys().hi - 1) / keys * keys, before);
    }
    if (!split_.is_shared()) {
      finish();
    } else if (sees_keys) {
      store_partial();
    }
  }

 private:
  // What the own rows have come to in the segments before, like max_, sum_ and acc_.
  struct Before {
    float max[Traits::kRowTiles][2], sum[Traits::kRowTiles][2];
    typename Base::Sums acc;
  };

  ATTN_EXT_DEVICE char* q_at() const { return shared_ + Traits::kQ; }
  ATTN_EXT_DEVICE char* k_at() const { return shared_ + Traits::kK; }
  ATTN_EXT_DEVICE char* v_at() const { return shared_ + Traits::kV; }

  // ---- Segments ------------------------------------------------------------------------------------------------------

  ATTN_EXT_DEVICE int segment_tiles() const {
    static_assert(1024 % Traits::kKeys == 0);
    return static_cast<int>(segment_keys(p_, Base::sequence()) / Traits::kKeys);
  }

  // Of the keys that the rows see those of one segment, where keys are shared out.
  ATTN_EXT_DEVICE void keep_segment(int64_t place, MmaRange& block) const {
    if (!split_.is_shared() || block.lo >= block.hi) return;
    const int64_t keys = segment_keys(p_, Base::sequence());
    const int64_t begin = segment_at(split_, place, block.lo, keys) * keys;
    block.lo = Largest()(block.lo, begin);
    block.hi = Smallest()(block.hi, begin + keys);
  }

  ATTN_EXT_DEVICE void clear() {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        max_[m][half] = -kInfinity<float>;
        sum_[m][half] = 0;
      }
      ATTN_EXT_UNROLL
      for (Four<float>& piece : acc_[m]) piece = {};
    }
  }

  // The segment that begins at key `begin` is complete: its sums meet, and join those of the segments before.
  ATTN_EXT_DEVICE void end_segment(int64_t begin, const Before& before) {
    const bool is_first = Base::block_keys().lo >= begin;
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        sum_[m][half] = join_lanes<4, Sum>(sum_[m][half]);
        const MmaRow row = Base::row_of_half(m, half);
        if (is_first || row.lo >= begin) continue;
        const bool sees = row.hi > begin;  // else the row stays as it is, down to the sign of a zero
        const Joint<float> joint =
            join_segments(Base::units(), before.max[m][half], before.sum[m][half], max_[m][half], sum_[m][half]);
        max_[m][half] = joint.max;
        sum_[m][half] = joint.sum;
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kWidth / 8; ++n) {
          ATTN_EXT_UNROLL
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            const float left = before.acc[m][n].x[e];
            acc_[m][n].x[e] = sees ? joint(left, acc_[m][n].x[e]) : left;
          }
        }
      }
    }
  }

  ATTN_EXT_DEVICE void put_aside(Before& before) {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        before.max[m][half] = max_[m][half];
        before.sum[m][half] = sum_[m][half];
      }
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kWidth / 8; ++n) before.acc[m][n] = acc_[m][n];
    }
    clear();
  }

  // ---- Tiles ---------------------------------------------------------------------------------------------------------

  // The weights of the tile at `start`; moves the rows' max, sum and acc along.
  ATTN_EXT_DEVICE void compute_weights(int64_t start, typename Base::Weights& weights) {
    Base::look_at_pairs(start);
    typename Base::Scores x;
    Base::multiply_rows(q_at(), k_at(), p_.D, x);
    Base::finish_scores(start, x);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) softmax(m, half, x[m]);
    }
    Base::drop(x);
    Base::round_weights(x, weights);
  }

  ATTN_EXT_DEVICE void softmax(int m, int half, Four<float> (&x)[Traits::kKeyTiles]) {
    float now = max_[m][half];  // NaNs are passed over here and come back through the weights
    ATTN_EXT_UNROLL
    for (const Four<float>& piece : x) now = Largest()(Largest()(now, piece.x[half * 2]), piece.x[half * 2 + 1]);
    now = join_lanes<4, Largest>(now);
    const float c = Base::units().c;
    const float offset = now == -kInfinity<float> ? 0.0f : now;  // nothing seen yet: −Inf − (−Inf) would be NaN
    float sum = 0;
    ATTN_EXT_UNROLL
    for (Four<float>& piece : x) {
      ATTN_EXT_UNROLL
      for (int e = half * 2; e < half * 2 + 2; ++e) {
        piece.x[e] = exp2_approx((piece.x[e] - offset) * c);
        sum += piece.x[e];
      }
    }
    if (now != max_[m][half]) {
      const float factor = exp2_approx((max_[m][half] - now) * c);
      sum_[m][half] *= factor;
      ATTN_EXT_UNROLL
      for (Four<float>& piece : acc_[m]) {
        piece.x[half * 2] *= factor;
        piece.x[half * 2 + 1] *= factor;
      }
      max_[m][half] = now;
    }
    sum_[m][half] += sum;  // of the own keys: lanes meet at the end of the segment
  }

  // ---- The end -------------------------------------------------------------------------------------------------------

  // Adds the sink, divides by the sum, stores the rows and their statistics.
  ATTN_EXT_DEVICE void finish() {
    const ScoreUnits<float> units = Base::units();
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const MmaRow row = Base::row_of_half(m, half);
        if (!row.real()) continue;
        const RowEnd<float> end = end_row(p_, units, row.h, max_[m][half], sum_[m][half]);
        const MmaSequence sequence = Base::sequence();
        const int64_t at = sequence.q_row + row.i;
        const float by = p_.dropout ? end.by * static_cast<float>(p_.dropout_scale) : end.by;
        char* out = address(p_.out, p_.batch_inner, sequence.b, row.h, at);
        Base::store_row(p_.out, out, p_.Dv, by, m, half, acc_);
        if (lane_ % 4 == 0) store_statistics(p_, units, sequence.b, row.h, at, end);
      }
    }
  }

  // Stores what the rows have come to in their one segment: the task's number is that of its place.
  ATTN_EXT_DEVICE void store_partial() const {
    const Partial<float> partial(p_, split_, Base::task_number());
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (!Base::row_of_half(m, half).real()) continue;
        const int64_t r = warp_ * Traits::kWarpRows + m * 16 + half * 8 + lane_ / 4;
        float* columns = partial.columns(r);
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kWidth / 8; ++n) {
          ATTN_EXT_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int column = n * 8 + lane_ % 4 * 2 + e;
            if (column < p_.Dv) store_global(columns + column, acc_[m][n].x[half * 2 + e]);
          }
        }
        if (lane_ % 4 != 0) continue;
        store_global(partial.max(r), max_[m][half]);
        store_global(partial.sum(r), sum_[m][half]);
      }
    }
  }

  const ForwardParams& p_;
  const Split& split_;
  float max_[Traits::kRowTiles][2], sum_[Traits::kRowTiles][2];
  typename Base::Sums acc_;
};

// Tasks are numbered as blocks.cuh says, and for each block of rows by place of a segment where keys are shared out (there is
// one block of rows then).
template <class Traits>
ATTN_EXT_KERNEL void forward_mma_kernel(ATTN_EXT_GRID_CONSTANT const ForwardParams p,
                                        ATTN_EXT_GRID_CONSTANT const Split split, int64_t row_blocks, int64_t tasks) {
  ForwardMmaBlock<Traits> block(p, split);
  const int64_t shares = split.shares();
  for (int64_t task = block_index(); task < tasks; task = block.next_task()) {
    const BlockPlace at = place_of_rows<Traits::kRows>(p, row_blocks, task / shares);
    block.compute(task, at.b, at.hkv, at.begin, task % shares);
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class Traits>
void launch_mma(const ForwardParams& p, const Split& split, StreamHandle stream) {
  const int64_t row_blocks = row_blocks_of<Traits::kRows>(p, true);
  const int64_t tasks = heads_of_blocks(p) * row_blocks * split.shares();
  launch_tasks("forward_mma", forward_mma_kernel<Traits>, tasks, Traits::kThreads, Traits::kSharedBytes, stream, p,
               split, row_blocks, tasks);
}

// 37,120 bytes of shared memory for 64 columns, 53,504 for 128, 100,608 for 256.
template <class Storage, int columns>
using ForwardTraits = MmaTraits<Storage, columns, columns <= 128 ? 2 : 1, columns == 128 ? 32 : 64>;

}  // namespace

bool fits_mma(const ForwardParams& p) {
  return with_choice<ForwardTraits>(p,
                                    [](auto traits) { return decltype(traits)::kSharedBytes <= most_shared_bytes(); });
}

void forward_mma(const ForwardParams& p, const Split& split, StreamHandle stream) {
  with_choice<ForwardTraits>(p, [&](auto traits) { launch_mma<decltype(traits)>(p, split, stream); });
}

ForwardTile tile_mma(const ForwardParams& p) {
  return with_choice<ForwardTraits>(p, [](auto traits) -> ForwardTile {
    using Traits = decltype(traits);
    return {Traits::kWidth, Traits::kRows, Traits::kKeys};
  });
}

size_t shared_bytes_to_have() { return most_shared_bytes(); }

}  // namespace attn_ext::cuda
