// The last step where blocks have shared a row's keys: joins what the row's segments have come to, left to right, adds the
// sink, divides by the sum, stores the row and its statistics. A row a block, a column of v a thread.
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/segments.cuh"

namespace attn_ext::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // segments whose numbers are on their way together: each would wait for memory alone

// `weight_scale`: what kept weights are still to be multiplied by.
template <class T>
ATTN_EXT_KERNEL void merge_kernel(ATTN_EXT_GRID_CONSTANT const ForwardParams p,
                                  ATTN_EXT_GRID_CONSTANT const Split split, double weight_scale, int64_t tasks) {
  const ScoreUnits<T> units(p);
  const int64_t rows = p.Hq / p.Hkv * p.Lq;
  for (int64_t task = block_index(); task < tasks; task += block_count()) {
    const int64_t unit = task / rows, r = task % rows;
    const Sequence sequence = sequence_of(p, unit / p.Hkv);
    const ScoreRow row = stacked_row(p, sequence, unit % p.Hkv, r);
    const int64_t keys = segment_keys(p, sequence), first = row.keys.lo / keys, end = pieces(row.keys.hi, keys);
    for (int64_t column = thread_index(); column == 0 || column < p.Dv; column += kThreads) {
      const bool is_column = column < p.Dv;  // without columns there are still the statistics
      T max = -kInfinity<T>, sum = 0, acc = 0;
      int64_t place = first % split.places;
      ATTN_EXT_ROLLED
      for (int64_t segment = first; segment < end; segment += kAhead) {
        T next_max[kAhead], next_sum[kAhead], next_acc[kAhead];
        ATTN_EXT_UNROLL
        for (int n = 0; n < kAhead; ++n) {
          if (segment + n >= end) continue;
          const Partial<T> partial(p, split, unit * split.places + place);
          next_max[n] = load_global(partial.max(r));
          next_sum[n] = load_global(partial.sum(r));
          next_acc[n] = is_column ? load_global(partial.columns(r) + column) : T(0);
          if (++place == split.places) place = 0;
        }
        ATTN_EXT_UNROLL
        for (int n = 0; n < kAhead; ++n) {
          if (segment + n >= end) continue;
          if (segment + n == first) {
            max = next_max[n];
            sum = next_sum[n];
            acc = next_acc[n];
            continue;
          }
          const Joint<T> joint = join_segments(units, max, sum, next_max[n], next_sum[n]);
          max = joint.max;
          sum = joint.sum;
          acc = joint(acc, next_acc[n]);
        }
      }
      const RowEnd<T> end_of_row = end_row(p, units, row.h, max, sum);
      if (is_column) {
        char* out = address(p.out, p.batch_inner, row.b, row.h, row.i, column);
        store_number(out, p.out.dtype, acc * (end_of_row.by * static_cast<T>(weight_scale)));
      }
      if (column == 0) store_statistics(p, units, row.b, row.h, row.i, end_of_row);
    }
  }
}

template <class T>
void launch_merge(const ForwardParams& p, const Split& split, double weight_scale, StreamHandle stream) {
  const int64_t tasks = p.batch * p.Hq * p.Lq;
  launch_tasks("forward_merge", merge_kernel<T>, tasks, kThreads, 0, stream, p, split, weight_scale, tasks);
}

}  // namespace

void forward_merge(const ForwardParams& p, const Split& split, double weight_scale, StreamHandle stream) {
  p.q.dtype == DType::float64 ? launch_merge<double>(p, split, weight_scale, stream)
                              : launch_merge<float>(p, split, weight_scale, stream);
}

}  // namespace attn_ext::cuda
