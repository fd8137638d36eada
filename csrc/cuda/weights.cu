// The softmax weights themselves, for whoever asks: exp2((x − m)·c) / l from the saved row max and sum.
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/score_block.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class Traits>
class WeightsBlock : ScoreBlock<Traits> {
  using Base = ScoreBlock<Traits>;
  using T = typename Traits::Number;

 public:
  ATTN_EXT_DEVICE explicit WeightsBlock(const WeightsParams& p) : Base(p), p_(p) {}

  ATTN_EXT_DEVICE void compute(int64_t b, int64_t hkv, int64_t row_begin) {
    Base::begin_sequence(b, hkv);
    if (!Base::begin_rows(row_begin, Base::stacked_rows())) return;
    T max[Traits::kOwnRows], inverse[Traits::kOwnRows];
    Base::load_statistics(p_.row_max, p_.row_sum, max, inverse);
    for (int64_t start = Base::first_tile(); start < Base::key_hi_; start += Traits::kKeys) {
      typename Base::Scores x;
      Base::compute_scores(start, x);
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) {
        if (!Base::real_[m]) continue;
        const ScoreRow& row = Base::row_[m];
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kOwnKeys; ++n) {
          const int64_t j = Base::own_key(start) + n;
          if (x[m][n] == -kInfinity<T>) continue;  // stays 0
          const T weight = exp2_of((x[m][n] - max[m]) * Base::units_.c) * inverse[m];
          store_number(address(p_.weights, p_.batch_inner, row.b, row.h, row.i, j), p_.weights.dtype, weight);
        }
      }
    }
  }

 private:
  const WeightsParams& p_;
};

template <class Traits>
ATTN_EXT_KERNEL void weights_kernel(ATTN_EXT_GRID_CONSTANT const WeightsParams p, int64_t row_blocks, int64_t tasks) {
  WeightsBlock<Traits> block(p);
  for (int64_t task = block_index(); task < tasks; task += block_count()) {
    const BlockPlace at = place_of_rows<Traits::kRows>(p, row_blocks, task);
    block.compute(at.b, at.hkv, at.begin);
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class Traits>
void launch_weights(const WeightsParams& p, StreamHandle stream) {
  const int64_t row_blocks = row_blocks_of<Traits::kRows>(p), tasks = heads_of_blocks(p) * row_blocks;
  launch_tasks("weights", weights_kernel<Traits>, tasks, Traits::kThreads, Traits::kScoresBytes, stream, p, row_blocks,
               tasks);
}

}  // namespace

void weights(const WeightsParams& p, StreamHandle stream) {
  if (!p.has_rows()) return;
  if (p.q.dtype == DType::float64) {
    launch_weights<ScoreTraits<double, double>>(p, stream);
  } else {
    launch_weights<ScoreTraits<float, AnyStorage>>(p, stream);
  }
}

}  // namespace attn_ext::cuda
