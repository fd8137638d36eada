// The forward for every dtype and head dim: plain multiply-adds with the accuracy of fp32 and fp64, sums in one fixed order.
// Where tensor cores serve (fp16, bf16, D ≤ 256) they are faster; this is what is left, and what they are compared with.
//
// A block computes 64 rows (32 of fp64; score_block.cuh) and up to kColumns columns of the output; wider ones are computed by several
// blocks, each with scores of its own.
//
//   for each tile of 32 keys that one of the rows may see:
//     s = q · kᵀ        over pieces of D through shared memory; a thread has 4 (2) rows × 4 keys
//     scale, cap, biases, masks where the tile needs any
//     m, l, acc move along (online softmax); 8 neighbouring lanes share a row
//     p → shared memory, v → shared memory; acc += p · v, a thread has 4 (2) rows × kColumns / 8 columns
//
// Tiles begin at multiples of 32 of the key's position, and a row's sums run over its keys in one order whatever the other
// rows of the block are: a row has the same bits in every batch.
//
// Hidden keys have weight −0, all others a weight that is not negative: where v holds NaN or Inf, keys with a sign are left
// out, for 0 · NaN would reach the row.
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/primitives.cuh"
#include "cuda/score_block.cuh"
#include "philox.h"

namespace attn_ext::cuda {
namespace {

// ---- Traits --------------------------------------------------------------------------------------------------------

// Beside q and k in shared memory, in numbers of T:
//   p  [kRows][kKeys + 4]
//   v  [kKeys][kColumns]     in all 38,912 bytes (double, 64 columns: 34,816): below the 48 KB that need no asking
template <class T, class KvStorage, int columns>
struct General : ScoreTraits<T, KvStorage> {
  using Base = ScoreTraits<T, KvStorage>;
  static constexpr int kColumns = columns;
  static constexpr int kVectors = kColumns / (4 * Base::kLanesPerRow);  // of 4 columns
  static_assert(kVectors * 4 * Base::kLanesPerRow == kColumns);

  static constexpr int kP = Base::kScoresEnd;
  static constexpr int kV = kP + Base::kRows * Base::kKeyPitch;
  static constexpr size_t kSharedBytes = (kV + Base::kKeys * kColumns) * sizeof(T);
  static_assert(kSharedBytes <= 48 * 1024);
};

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <class Traits>
class ForwardBlock : ScoreBlock<Traits> {
  using Base = ScoreBlock<Traits>;
  using T = typename Traits::Number;
  using Base::lane_;
  using Base::own_row_;
  using Base::real_;
  using Base::row_;
  using Base::sequence_;
  using Base::shared_;
  using Base::units_;

 public:
  ATTN_EXT_DEVICE explicit ForwardBlock(const ForwardParams& p) : Base(p), p_(p) {}

  // Rows row_begin … of key/value head hkv of batch entry b, output columns column_begin …
  ATTN_EXT_DEVICE void compute(int64_t b, int64_t hkv, int64_t row_begin, int64_t column_begin) {
    Base::begin_sequence(b, hkv);
    if (!Base::begin_rows(row_begin, Base::stacked_rows())) return;
    column_begin_ = column_begin;
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      max_[m] = -kInfinity<T>;
      sum_[m] = 0;
      ATTN_EXT_UNROLL
      for (Four<T>& vector : acc_[m]) vector = {};
    }
    for (int64_t start = Base::first_tile(); start < Base::key_hi_; start += Traits::kKeys) {
      typename Base::Scores x;
      Base::compute_scores(start, x);
      const int64_t key = Base::own_key(start);
      T v_scales[Traits::kOwnKeys];
      if (p_.scales.v) {
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kOwnKeys; ++n) {
          v_scales[n] = load_number<T, float>(Base::row_of(p_.scales.v, key + n), DType::float32);
        }
      }
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) softmax(m, key, x[m], v_scales);
      accumulate(start);
    }
    finish();
  }

 private:
  // Turns the scores of own row m into weights, on their way to shared memory, and moves the row's max, sum and acc along.
  ATTN_EXT_DEVICE void softmax(int m, int64_t own_key, const T (&x)[Traits::kOwnKeys],
                               const T (&v_scales)[Traits::kOwnKeys]) {
    T now = max_[m];  // NaNs are passed over here and come back through the weights
    ATTN_EXT_UNROLL
    for (const T score : x) now = score > now ? score : now;
    for (int mask = Traits::kLanesPerRow / 2; mask > 0; mask /= 2) {
      const T other = shuffle_xor(now, mask);
      now = other > now ? other : now;
    }
    const T offset = now == -kInfinity<T> ? T(0) : now;  // nothing seen yet: −Inf − (−Inf) would be NaN
    const uint32_t kept = p_.dropout && real_[m] ? dropout_kept(p_.dropout_seed, p_.dropout_threshold, row_[m].b,
                                                                row_[m].h, row_[m].i, own_key)
                                                 : 0;
    T sum = 0;
    Four<T> weights;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kOwnKeys; ++n) {
      T weight = exp2_of((x[n] - offset) * units_.c);
      sum += weight;
      if (p_.dropout) weight = kept >> ((own_key + n) % 8) & 1u ? weight * static_cast<T>(p_.dropout_scale) : T(0);
      if (p_.scales.v) weight *= v_scales[n];
      weights.x[n] = x[n] == -kInfinity<T> ? T(-0.0) : weight;
    }
    for (int mask = Traits::kLanesPerRow / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
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
    store_shared(reinterpret_cast<Four<T>*>(shared_ + Traits::kP + (own_row_ + m) * Traits::kKeyPitch) + lane_,
                 weights);
  }

  // acc += p · v
  ATTN_EXT_DEVICE void accumulate(int64_t start) {
    T* v = shared_ + Traits::kV;
    const int64_t step = p_.v.stride_d * size_of(p_.v.dtype);
    T zero = 0;  // NaN once a number that is none was seen
    ATTN_EXT_ROLLED
    for (int j = thread_index() / 32; j < Traits::kKeys; j += Traits::kThreads / 32) {
      const char* row = Base::row_of(p_.v, start + j) + column_begin_ * step;
      for (int column = thread_index() % 32; column < Traits::kColumns; column += 32) {
        const bool inside = column_begin_ + column < p_.Dv;
        const T number = inside ? load_number<T, typename Traits::Kv>(row + column * step, p_.v.dtype) : T(0);
        zero = fma_of(number, T(0), zero);
        store_shared(v + j * Traits::kColumns + column, number);
      }
    }
    if (sync_block_or(zero != zero)) {
      multiply_values<true>();
    } else {
      multiply_values<false>();
    }
  }

  template <bool leave_out_hidden>
  ATTN_EXT_DEVICE void multiply_values() {
    const auto* p = reinterpret_cast<const Four<T>*>(shared_ + Traits::kP + own_row_ * Traits::kKeyPitch);
    const auto* v = reinterpret_cast<const Four<T>*>(shared_ + Traits::kV);
    ATTN_EXT_ROLLED
    for (int j = 0; j < Traits::kKeys; j += 4) {
      Four<T> weights[Traits::kOwnRows];
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) {
        weights[m] = load_shared(p + (m * Traits::kKeyPitch + j) / 4);
      }
      ATTN_EXT_UNROLL
      for (int n = 0; n < 4; ++n) {
        ATTN_EXT_UNROLL
        for (int c = 0; c < Traits::kVectors; ++c) {
          const auto values = load_shared(v + (j + n) * (Traits::kColumns / 4) + c * Traits::kLanesPerRow + lane_);
          ATTN_EXT_UNROLL
          for (int m = 0; m < Traits::kOwnRows; ++m) {
            const T weight = weights[m].x[n];
            if (leave_out_hidden && std::signbit(weight)) continue;
            ATTN_EXT_UNROLL
            for (int e = 0; e < 4; ++e) acc_[m][c].x[e] = fma_of(weight, values.x[e], acc_[m][c].x[e]);
          }
        }
      }
    }
  }

  // Adds the sink, divides by the sum, stores the rows and their statistics.
  ATTN_EXT_DEVICE void finish() {
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m]) continue;
      const ScoreRow& row = row_[m];
      T max = max_[m], sum = sum_[m], factor = 1;
      const T sink = p_.sinks ? static_cast<T>(load_global(p_.sinks + row.h)) : -kInfinity<T>;
      if (sink != -kInfinity<T>) {
        const T now = sink > max ? sink : max;
        factor = max == now ? T(1) : exp2_of((max - now) * units_.c);
        sum = sum * factor + (sink == now ? T(1) : exp2_of((sink - now) * units_.c));
        max = now;
      }
      // A row without a key stays 0 whatever its sink, a NaN included.
      const T inverse = sum_[m] == T(0) ? T(0) : T(1) / sum;
      const T by = inverse == T(0) ? T(0) : factor * inverse;
      ATTN_EXT_UNROLL
      for (int c = 0; c < Traits::kVectors; ++c) {
        ATTN_EXT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int64_t column = column_begin_ + (c * Traits::kLanesPerRow + lane_) * 4 + e;
          if (column >= p_.Dv) continue;
          char* at = address(p_.out, p_.batch_inner, row.b, row.h, sequence_.q_row + row.i, column);
          store_number(at, p_.out.dtype, acc_[m][c].x[e] * by);
        }
      }
      if (lane_ != 0 || column_begin_ != 0) continue;
      const int64_t at = sequence_.q_row + row.i;
      if (p_.row_max) store_global(row_address<T>(p_.row_max, row.b, row.h) + at, max);
      if (p_.row_sum) store_global(row_address<T>(p_.row_sum, row.b, row.h) + at, sum);
      if (p_.lse) {
        const T lse = sum == T(0) ? -kInfinity<T> : static_cast<T>(max * units_.unit + std::log(sum));
        store_global(row_address<T>(p_.lse, row.b, row.h) + at, lse);
      }
    }
  }

  const ForwardParams& p_;
  int64_t column_begin_ = 0;
  T max_[Traits::kOwnRows], sum_[Traits::kOwnRows];
  Four<T> acc_[Traits::kOwnRows][Traits::kVectors];
};

// How the work is cut: tasks are numbered by (b, hkv, block of rows, block of columns), the last one running fastest.
struct ForwardTasks {
  int64_t row_blocks = 0, column_blocks = 0, count = 0;
};

template <class Traits>
ATTN_EXT_KERNEL void forward_general(ATTN_EXT_GRID_CONSTANT const ForwardParams p, const ForwardTasks tasks) {
  ForwardBlock<Traits> block(p);
  for (int64_t task = block_index(); task < tasks.count; task += block_count()) {
    const int64_t rows = task / tasks.column_blocks, unit = rows / tasks.row_blocks;
    // Long rows first: with causal masks later rows see more keys.
    const int64_t row_block = tasks.row_blocks - 1 - rows % tasks.row_blocks;
    block.compute(unit / p.Hkv, unit % p.Hkv, row_block * Traits::kRows, task % tasks.column_blocks * Traits::kColumns);
  }
}

// ---- Launcher ------------------------------------------------------------------------------------------------------

template <class Traits>
void launch_general(const ForwardParams& p, StreamHandle stream) {
  ForwardTasks tasks;
  tasks.row_blocks = pieces(p.Hq / p.Hkv * p.Lq, Traits::kRows);
  tasks.column_blocks =
      p.Dv > 0 ? pieces(p.Dv, Traits::kColumns) : 1;  // without columns there are still the statistics
  tasks.count = p.batch * p.Hkv * tasks.row_blocks * tasks.column_blocks;
  if (tasks.count == 0) return;
  launch("forward_general", forward_general<Traits>, tasks.count < most_blocks ? tasks.count : most_blocks,
         Traits::kThreads, Traits::kSharedBytes, static_cast<Stream>(stream), p, tasks);
}

}  // namespace

void forward(const ForwardParams& p, StreamHandle stream) {
  if (p.batch == 0 || p.Hq == 0 || p.Lq == 0) return;
  const bool wide = p.Dv > 64;
  if (p.k.dtype == DType::float64) {
    launch_general<General<double, double, 64>>(p, stream);
  } else if (p.q.dtype == DType::float64) {  // over an int8 cache
    launch_general<General<double, AnyStorage, 64>>(p, stream);
  } else if (p.k.dtype == DType::float32) {
    wide ? launch_general<General<float, float, 128>>(p, stream) : launch_general<General<float, float, 64>>(p, stream);
  } else {
    wide ? launch_general<General<float, AnyStorage, 128>>(p, stream)
         : launch_general<General<float, AnyStorage, 64>>(p, stream);
  }
}

}  // namespace attn_ext::cuda
