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
// other rows of the block are.
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/mma_block.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class Traits>
class ForwardMmaBlock : public MmaBlock<Traits> {
  using Base = MmaBlock<Traits>;
  using Base::lane_;
  using Base::shared_;

 public:
  ATTN_EXT_DEVICE explicit ForwardMmaBlock(const ForwardParams& p) : Base(p), p_(p) {}

  // Rows row_begin … of key/value head hkv of batch entry b.
  ATTN_EXT_DEVICE void compute(int64_t task, int64_t b, int64_t hkv, int64_t row_begin) {
    Base::begin_task(task, b, hkv);
    if (!Base::begin_rows(row_begin)) return;
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
    int64_t start = Base::block_keys().lo / Traits::kKeys * Traits::kKeys;
    if (start < Base::block_keys().hi) {
      Base::load_rows(q_at(), p_.q, p_.D);
      Base::load_keys(k_at(), p_.k, p_.D, start);
      commit_copies();
    }
    for (; start < Base::block_keys().hi; start += Traits::kKeys) {
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
    finish();
  }

 private:
  ATTN_EXT_DEVICE char* q_at() const { return shared_ + Traits::kQ; }
  ATTN_EXT_DEVICE char* k_at() const { return shared_ + Traits::kK; }
  ATTN_EXT_DEVICE char* v_at() const { return shared_ + Traits::kV; }

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
    sum_[m][half] += sum;  // of the own keys: lanes meet at the end
  }

  // Adds the sink, divides by the sum, stores the rows and their statistics.
  ATTN_EXT_DEVICE void finish() {
    const ScoreUnits<float> units = Base::units();
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float sum = join_lanes<4, Sum>(sum_[m][half]);
        const MmaRow row = Base::row_of_half(m, half);
        if (!row.real()) continue;
        const RowEnd<float> end = end_row(p_, units, row.h, max_[m][half], sum);
        const MmaSequence sequence = Base::sequence();
        const int64_t at = sequence.q_row + row.i;
        const float by = p_.dropout ? end.by * static_cast<float>(p_.dropout_scale) : end.by;
        char* out = address(p_.out, p_.batch_inner, sequence.b, row.h, at);
        Base::store_row(p_.out, out, p_.Dv, by, m, half, acc_);
        if (lane_ % 4 == 0) store_statistics(p_, units, sequence.b, row.h, at, end);
      }
    }
  }

  const ForwardParams& p_;
  float max_[Traits::kRowTiles][2], sum_[Traits::kRowTiles][2];
  typename Base::Sums acc_;
};

template <class Traits>
ATTN_EXT_KERNEL void forward_mma_kernel(ATTN_EXT_GRID_CONSTANT const ForwardParams p, int64_t row_blocks,
                                        int64_t tasks) {
  ForwardMmaBlock<Traits> block(p);
  for (int64_t task = block_index(); task < tasks; task = block.next_task()) {
    const BlockPlace at = place_of_rows<Traits::kRows>(p, row_blocks, task);
    block.compute(task, at.b, at.hkv, at.begin);
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class Traits>
void launch_mma(const ForwardParams& p, StreamHandle stream) {
  const int64_t row_blocks = row_blocks_of<Traits::kRows>(p, true), tasks = heads_of_blocks(p) * row_blocks;
  launch_tasks("forward_mma", forward_mma_kernel<Traits>, tasks, Traits::kThreads, Traits::kSharedBytes, stream, p,
               row_blocks, tasks);
}

// 37,120 bytes of shared memory for 64 columns, 53,504 for 128, 100,608 for 256.
template <class Storage, int columns>
using ForwardTraits = MmaTraits<Storage, columns, columns <= 128 ? 2 : 1, columns == 128 ? 32 : 64>;

}  // namespace

bool fits_mma(const ForwardParams& p) {
  return with_choice<ForwardTraits>(p,
                                    [](auto traits) { return decltype(traits)::kSharedBytes <= most_shared_bytes(); });
}

void forward_mma(const ForwardParams& p, StreamHandle stream) {
  with_choice<ForwardTraits>(p, [&](auto traits) { launch_mma<decltype(traits)>(p, stream); });
}

ForwardTile tile_mma(const ForwardParams& p) {
  return with_choice<ForwardTraits>(p, [](auto traits) -> ForwardTile {
    using Traits = decltype(traits);
    return {Traits::kWidth, Traits::kRows, Traits::kKeys};
  });
}

size_t shared_bytes_to_have() { return most_shared_bytes(); }

}  // namespace attn_ext::cuda
