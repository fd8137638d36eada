// Gradients on tensor cores: dq, dk and dv of fp16 and bf16, head dims to 256, without atomics: every number is one sum in one
// fixed order. (The rows' delta, and the gradients of sinks and biases, are the general kernels'.) Letters as there:
//
//   for each tile of 64 rows × 64 keys (32 at a time where registers are scarce) in which something is seen:
//     x = scores, as in the forward;  p = exp2((x − m)·c) / l;  dp = go · vᵀ;  ds = p ∘ (dp − delta)
//   dq += ds · k           a block has the tile's rows and walks over keys
//   dv += pᵀ · go,         a block has the tile's keys and walks over the heads that share them, and their rows; p and ds
//   dk += dsᵀ · q          lie in shared memory in between, where the warps find them transposed
//
// p and ds are rounded to 16 bits on their way to the second product, and nothing else is. Memory stays O(L).
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/mma_block.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Traits --------------------------------------------------------------------------------------------------------

// Behind what MmaTraits has (the last two only where has_tiles):
//   statistics  [kRows]                  max, 1 / sum, delta of the rows
//   tiles       2 × [kRows][2 × kKeys]   p and ds, in 16 bits
//   hidden      [kRows][2]               which pairs are, a bit a key
template <class Storage, int width, int keys, bool has_tiles>
struct GradientMmaTraits : MmaTraits<Storage, width, 1, keys, 2, 2> {
  using Base = MmaTraits<Storage, width, 1, keys, 2, 2>;

  static constexpr int kGo = Base::kQ + Base::kRowTensorBytes;
  static constexpr int kStatisticsAt = static_cast<int>(Base::kSharedBytes);
  static constexpr int kTileAt = kStatisticsAt + Base::kRows * static_cast<int>(sizeof(Four<float>));
  static constexpr int kTileKeys = 2 * Base::kKeys, kTileRowBytes = kTileKeys * 2;
  static constexpr int kTileBytes = has_tiles ? Base::kRows * kTileRowBytes : 0;
  static constexpr int kHiddenAt = kTileAt + 2 * kTileBytes;
  static constexpr size_t kSharedBytes = kHiddenAt + (has_tiles ? Base::kRows * 2 * sizeof(uint32_t) : 0);
};

// ---- Kernels: tiles ------------------------------------------------------------------------------------------------

// p and ds of a tile.
template <class Traits>
class GradientMmaBlock : public MmaBlock<Traits> {
 protected:
  using Base = MmaBlock<Traits>;
  using Scores = typename Base::Scores;
  using Base::lane_;
  using Base::shared_;
  using Base::warp_;

  ATTN_EXT_DEVICE GradientMmaBlock(const BackwardParams& p, const float* delta)
      : Base(p), p_(p), deltas_(delta), statistics_(reinterpret_cast<Four<float>*>(shared_ + Traits::kStatisticsAt)) {}

  ATTN_EXT_DEVICE char* q_at() const { return shared_ + Traits::kQ; }
  ATTN_EXT_DEVICE char* go_at() const { return shared_ + Traits::kGo; }
  ATTN_EXT_DEVICE char* k_at(int stage) const { return shared_ + Traits::kK + stage * Traits::kStageBytes; }
  ATTN_EXT_DEVICE char* v_at(int stage) const { return shared_ + Traits::kV + stage * Traits::kStageBytes; }

  // Begins to load the rows and what the forward saved of them. All threads have to meet before it is used.
  ATTN_EXT_DEVICE void load_rows() const {
    Base::load_rows(q_at(), p_.q, p_.D);
    Base::load_rows(go_at(), p_.grad_out, p_.Dv);
    if (thread_index() >= Traits::kRows) return;
    const MmaRow row = load_shared(Base::rows_ + thread_index());
    // A row that is none, or sees nothing, has 1 / sum = 0: no weights, whatever k and v hold.
    Four<float> statistics = {};
    if (row.real()) {
      const MmaSequence s = Base::sequence();
      const int64_t at = s.q_row + row.i;
      const float max = load_global(row_address<const float>(p_.row_max, s.b, row.h) + at);
      const float sum = load_global(row_address<const float>(p_.row_sum, s.b, row.h) + at);
      statistics.x[0] = max == -kInfinity<float> ? 0.0f : max;
      statistics.x[1] = sum == 0.0f ? 0.0f : 1.0f / sum;
      statistics.x[2] = load_global(deltas_ + s.b * p_.row_max.stride_b + row.h * p_.row_max.stride_h + at);
    }
    store_shared(statistics_ + thread_index(), statistics);
  }

  // p of the tile at `start`, before the dropout, from its k.
  ATTN_EXT_DEVICE void compute_weights(int64_t start, const char* k, Scores& p) {
    Base::look_at_pairs(start);
    Base::multiply_rows(q_at(), k, p_.D, p);
    Base::finish_scores(start, p);
    const float c = Base::units().c;
    ATTN_EXT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Four<float> row = statistics_of(half);
      for_each_of(half, [&](int n, int e) {
        const float weight = exp2_approx((p[0][n].x[e] - row.x[0]) * c) * row.x[1];
        p[0][n].x[e] = is_hidden(n, e) || row.x[1] == 0.0f ? 0.0f : weight;
      });
    }
  }

  // ds of that tile from its v and p.
  ATTN_EXT_DEVICE void compute_score_gradients(const char* k, const char* v, const Scores& p, Scores& ds) const {
    Base::multiply_rows(go_at(), v, p_.Dv, ds);
    Base::drop(ds);
    const float by = p_.dropout ? static_cast<float>(p_.dropout_scale) : 1.0f;
    ATTN_EXT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Four<float> row = statistics_of(half);
      for_each_of(half, [&](int n, int e) {
        const float gradient = p[0][n].x[e] * (ds[0][n].x[e] * by - row.x[2]);
        ds[0][n].x[e] = is_hidden(n, e) || row.x[1] == 0.0f ? 0.0f : gradient;
      });
    }
    if (p_.softcap != 0.0) apply_cap_derivative(k, ds);
  }

  // Makes of p what v has met.
  ATTN_EXT_DEVICE void apply_dropout(Scores& p) const {
    if (!p_.dropout) return;
    Base::drop(p);
    const auto by = static_cast<float>(p_.dropout_scale);
    Base::for_each_pair([&](int m, int n, int e) { p[m][n].x[e] *= by; });
  }

  const BackwardParams& p_;

 private:
  ATTN_EXT_DEVICE Four<float> statistics_of(int half) const {
    return load_shared(statistics_ + warp_ * Traits::kWarpRows + half * 8 + lane_ / 4);
  }

  // Calls f(n, e) for the elements of row g (half 0) or g + 8.
  template <class F>
  ATTN_EXT_DEVICE static void for_each_of(int half, const F& f) {
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeyTiles; ++n) {
      ATTN_EXT_UNROLL
      for (int e = 0; e < 2; ++e) f(n, half * 2 + e);
    }
  }

  ATTN_EXT_DEVICE bool is_hidden(int n, int e) const { return Base::some_hidden_ && Base::hidden(0, n, e); }

  // ds times 1 − tanh², of scores that are computed once more: there are no registers to keep them in.
  ATTN_EXT_DEVICE void apply_cap_derivative(const char* k, Scores& ds) const {
    Scores x;
    Base::multiply_rows(q_at(), k, p_.D, x);
    const float scale = Base::units().scale, by = static_cast<float>(1.0 / p_.softcap);
    Base::for_each_pair([&](int m, int n, int e) {
      const float t = std::tanh(x[m][n].x[e] * scale * by);
      if (!is_hidden(n, e)) ds[m][n].x[e] *= 1.0f - t * t;
    });
  }

  const float* deltas_;
  Four<float>* statistics_;
};

// dq of a block's rows. Of two buffers for k and v one is loaded while the other is multiplied.
template <class Traits>
class QueryGradientsMma : public GradientMmaBlock<Traits> {
  using Base = GradientMmaBlock<Traits>;
  using Base::p_;
  using Base::shared_;

 public:
  ATTN_EXT_DEVICE QueryGradientsMma(const BackwardParams& p, const float* delta) : Base(p, delta) {}

  ATTN_EXT_DEVICE void compute(int64_t task, int64_t b, int64_t hkv, int64_t row_begin) {
    Base::begin_task(task, b, hkv);
    if (!Base::begin_rows(row_begin)) return;
    typename Base::Sums acc;
    ATTN_EXT_UNROLL
    for (Four<float>& piece : acc[0]) piece = {};
    int64_t start = Base::block_keys().lo / Traits::kKeys * Traits::kKeys;
    int stage = 0;
    if (start < Base::block_keys().hi) {
      Base::load_rows();
      load_tile(start, stage);
    }
    for (; start < Base::block_keys().hi; start += Traits::kKeys, stage = 1 - stage) {
      wait_copies<0>();
      sync_block();  // the tile is there, and the one before has been used
      if (start + Traits::kKeys < Base::block_keys().hi) load_tile(start + Traits::kKeys, 1 - stage);
      if (!Base::warp_sees(start)) continue;
      const char* k = Base::k_at(stage);
      typename Base::Scores p, ds;
      Base::compute_weights(start, k, p);
      Base::compute_score_gradients(k, Base::v_at(stage), p, ds);
      typename Base::Weights rounded;
      Base::round_weights(ds, rounded);
      Base::multiply_columns(rounded, k, p_.D, acc);
    }
    store(acc);
  }

 private:
  ATTN_EXT_DEVICE void load_tile(int64_t start, int stage) const {
    Base::load_keys(Base::k_at(stage), p_.k, p_.D, start);
    Base::load_keys(Base::v_at(stage), p_.v, p_.Dv, start);
    commit_copies();
  }

  ATTN_EXT_DEVICE void store(typename Base::Sums& acc) const {
    ATTN_EXT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const MmaRow row = Base::row_of_half(0, half);
      if (!row.real()) continue;
      const MmaSequence s = Base::sequence();
      char* to = address(p_.dq, p_.batch_inner, s.b, row.h, s.q_row + row.i);
      Base::store_row(p_.dq, to, p_.D, static_cast<float>(p_.scale), 0, half, acc);
    }
  }
};

// dk, dv or both of a tile of 64 keys, as asked: 16 keys a warp. p and ds are computed for one half of the tile after the
// other: there are no registers for both beside the sums.
template <class Traits, bool of_keys, bool of_values>
class KeyGradientsMma : public GradientMmaBlock<Traits> {
  using Base = GradientMmaBlock<Traits>;
  using Scores = typename Base::Scores;
  using Sums = typename Base::Sums;
  using Weights = typename Base::Weights;
  using Transposed = typename Base::template LeftFactors<Traits::kRows>;
  using Base::lane_;
  using Base::p_;
  using Base::shared_;
  using Base::warp_;
  static_assert(Traits::kTileKeys == Traits::kWarps * 16 && Traits::kWarpRows == 16 && Traits::kKeys == 32);

 public:
  ATTN_EXT_DEVICE KeyGradientsMma(const BackwardParams& p, const float* delta)
      : Base(p, delta), hidden_words_(reinterpret_cast<uint32_t*>(shared_ + Traits::kHiddenAt)) {}

  ATTN_EXT_DEVICE void compute(int64_t task, int64_t b, int64_t hkv, int64_t start) {
    Base::begin_task(task, b, hkv);
    if (start >= Base::sequence().Lk) return;
    load_keys_of(start);
    commit_copies();
    Sums dk, dv;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kWidth / 8; ++n) dk[0][n] = dv[0][n] = {};
    for (int block = 0; Base::begin_rows(int64_t{Traits::kRows} * block); ++block) {
      if (!Base::block_keys().meets(start, Traits::kTileKeys)) continue;
      Base::load_rows();
      commit_copies();
      wait_copies<0>();
      sync_block();
      ATTN_EXT_ROLLED
      for (int part = 0; part < 2; ++part) compute_part(start + part * Traits::kKeys, part);
      sync_block();
      const bool some_hidden = Base::may_hide(Base::block_keys(), start, Traits::kTileKeys);
      const auto hidden_of = [&](int) { return hidden_transposed(); };
      Transposed left;
      if (of_values && p_.dv) {
        load_transposed(0, left);
        Base::multiply_columns(left, Base::go_at(), p_.Dv, dv, some_hidden, hidden_of);
      }
      if (of_keys && p_.dk) {
        load_transposed(1, left);
        Base::multiply_columns(left, Base::q_at(), p_.D, dk, some_hidden, hidden_of);
      }
    }
    wait_copies<0>();
    const MmaSequence s = Base::sequence();
    ATTN_EXT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t j = start + warp_ * 16 + half * 8 + lane_ / 4;
      if (j >= s.Lk) continue;
      if (of_keys && p_.dk) {
        char* to = address(p_.dk, p_.batch_inner, s.b, s.hkv, s.k_row + j);
        Base::store_row(p_.dk, to, p_.D, static_cast<float>(p_.scale), 0, half, dk);
      }
      if (of_values && p_.dv) {
        char* to = address(p_.dv, p_.batch_inner, s.b, s.hkv, s.k_row + j);
        Base::store_row(p_.dv, to, p_.Dv, 1.0f, 0, half, dv);
      }
    }
  }

 private:
  // k and v of the block's own keys; keys past the end are zeros.
  ATTN_EXT_DEVICE void load_keys_of(int64_t start) const {
    const MmaSequence s = Base::sequence();
    for (int part = 0; part < 2; ++part) {
      const int64_t first = start + part * Traits::kKeys;
      const auto row_of = [&](const TensorView& view, int j) -> const char* {
        return first + j < s.Lk ? address(view, p_.batch_inner, s.b, s.hkv, s.k_row + first + j) : nullptr;
      };
      const auto k_row = [&](int j) { return row_of(p_.k, j); };
      const auto v_row = [&](int j) { return row_of(p_.v, j); };
      Base::template load<Traits::kKeys>(Base::k_at(part), p_.k, p_.D, k_row);
      Base::template load<Traits::kKeys>(Base::v_at(part), p_.v, p_.Dv, v_row);
    }
  }

  // p and ds of this warp's rows and one half of the tile's keys to shared memory, and which pairs are hidden.
  ATTN_EXT_DEVICE void compute_part(int64_t start, int part) {
    Weights rounded_p, rounded_ds;
    uint32_t hidden[2] = {~0u, ~0u};
    if (Base::warp_sees(start)) {
      Scores p, ds;
      Base::compute_weights(start, Base::k_at(part), p);
      if (of_keys && p_.dk) {
        Base::compute_score_gradients(Base::k_at(part), Base::v_at(part), p, ds);
        Base::round_weights(ds, rounded_ds);
      }
      Base::apply_dropout(p);
      Base::round_weights(p, rounded_p);
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) hidden[half] = Base::some_hidden_ ? hidden_of_row(half) : 0;
    } else {
      ATTN_EXT_UNROLL
      for (int k = 0; k < Traits::kKeys / 16; ++k) rounded_p[0][k] = rounded_ds[0][k] = {};
    }
    if (of_values && p_.dv) store_tile(0, part, rounded_p);
    if (of_keys && p_.dk) store_tile(1, part, rounded_ds);
    ATTN_EXT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_ * 16 + half * 8 + lane_ / 4;
      if (lane_ % 4 == 0) store_shared(hidden_words_ + row * 2 + part, hidden[half]);
    }
  }

  // The four lanes of a row put together which of the 32 keys are hidden.
  ATTN_EXT_DEVICE uint32_t hidden_of_row(int half) const {
    uint32_t own = 0;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeyTiles; ++n) {
      own |= (Base::hidden_[0] >> Base::bit_of(n, half * 2) & 3u) << (n * 8 + lane_ % 4 * 2);
    }
    return join_lanes<4, Either>(own);
  }

  // Which of the pairs (own key, row of the tile) are hidden, in the order of hidden_.
  ATTN_EXT_DEVICE uint32_t hidden_transposed() const {
    uint32_t bits = 0;
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kRows / 8; ++n) {
      ATTN_EXT_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = n * 8 + lane_ % 4 * 2 + e % 2, key = warp_ * 16 + e / 2 * 8 + lane_ / 4;
        const uint32_t word = load_shared(hidden_words_ + row * 2 + key / Traits::kKeys);
        bits |= (word >> (key % Traits::kKeys) & 1u) << Base::bit_of(n, e);
      }
    }
    return bits;
  }

  ATTN_EXT_DEVICE char* tile_chunk(int which, int row, int chunk) const {
    return shared_ + Traits::kTileAt + which * Traits::kTileBytes + row * Traits::kTileRowBytes +
           (chunk ^ (row % 8)) * 16;
  }

  ATTN_EXT_DEVICE void store_tile(int which, int part, const Weights& rounded) const {
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeyTiles; ++n) {
      ATTN_EXT_UNROLL
      for (int half = 0; half < 2; ++half) {
        char* chunk = tile_chunk(which, warp_ * 16 + half * 8 + lane_ / 4, part * Traits::kKeyTiles + n);
        store_shared(reinterpret_cast<uint32_t*>(chunk) + lane_ % 4, rounded[0][n / 2].x[n % 2 * 2 + half]);
      }
    }
  }

  // This warp's keys of a tile, and all of its rows, as a left factor.
  ATTN_EXT_DEVICE void load_transposed(int which, Transposed& left) const {
    const int lane = computed_here(lane_);
    ATTN_EXT_UNROLL
    for (int k = 0; k < Traits::kRows / 16; ++k) {
      const char* chunk = tile_chunk(which, k * 16 + lane / 16 * 8 + lane % 8, warp_ * 2 + lane / 8 % 2);
      left[0][k] = load_matrices<true>(chunk);
    }
  }

  uint32_t* hidden_words_;
};

// ---- Kernels: entries ----------------------------------------------------------------------------------------------

template <class Traits>
ATTN_EXT_KERNEL void query_gradients_mma(ATTN_EXT_GRID_CONSTANT const BackwardParams p, const float* delta,
                                         int64_t row_blocks, int64_t tasks) {
  QueryGradientsMma<Traits> block(p, delta);
  for (int64_t task = block_index(); task < tasks; task = block.next_task()) {
    const BlockPlace at = place_of_rows<Traits::kRows>(p, row_blocks, task);
    block.compute(task, at.b, at.hkv, at.begin);
  }
}

template <class Traits, bool of_keys, bool of_values>
ATTN_EXT_KERNEL void key_gradients_mma(ATTN_EXT_GRID_CONSTANT const BackwardParams p, const float* delta,
                                       int64_t key_blocks, int64_t tasks) {
  KeyGradientsMma<Traits, of_keys, of_values> block(p, delta);
  for (int64_t task = block_index(); task < tasks; task = block.next_task()) {
    const BlockPlace at = place_of_keys<Traits::kTileKeys>(p, key_blocks, task);
    block.compute(task, at.b, at.hkv, at.begin);
  }
}

// ---- Launchers -----------------------------------------------------------------------------------------------------

// The traits for a width. Sums of dk and dv together fit into registers up to 128 columns. Bytes of shared memory for 64, 128
// and 256 columns: queries' gradients 52,480, 68,864 and 134,400; keys' 52,992, 85,760 and 151,296.
template <class StorageType, int columns>
struct GradientChoice {
  using Storage = StorageType;
  using Queries = GradientMmaTraits<Storage, columns, columns <= 64 ? 64 : 32, false>;
  using Keys = GradientMmaTraits<Storage, columns, 32, true>;
  static constexpr bool kKeysAndValues = columns <= 128;
};

template <class Traits>
void launch_queries(const BackwardParams& p, const float* delta, StreamHandle stream) {
  const int64_t row_blocks = row_blocks_of<Traits::kRows>(p), tasks = heads_of_blocks(p) * row_blocks;
  launch_tasks("query_gradients_mma", query_gradients_mma<Traits>, tasks, Traits::kThreads, Traits::kSharedBytes,
               stream, p, delta, row_blocks, tasks);
}

template <class Traits, bool of_keys, bool of_values>
void launch_keys(const BackwardParams& p, const float* delta, StreamHandle stream) {
  const int64_t key_blocks = key_blocks_of<Traits::kTileKeys>(p), tasks = heads_of_blocks(p) * key_blocks;
  launch_tasks("key_gradients_mma", key_gradients_mma<Traits, of_keys, of_values>, tasks, Traits::kThreads,
               Traits::kSharedBytes, stream, p, delta, key_blocks, tasks);
}

}  // namespace

bool fits_mma(const BackwardParams& p) {
  return with_choice<GradientChoice>(p, [](auto choice) {
    using Chosen = decltype(choice);
    const size_t most = most_shared_bytes();
    return Chosen::Queries::kSharedBytes <= most && Chosen::Keys::kSharedBytes <= most;
  });
}

void backward_mma(const BackwardParams& p, const float* delta, StreamHandle stream) {
  with_choice<GradientChoice>(p, [&](auto choice) {
    using Chosen = decltype(choice);
    if (p.dq) launch_queries<typename Chosen::Queries>(p, delta, stream);
    if constexpr (Chosen::kKeysAndValues) {
      if (p.dk || p.dv) launch_keys<typename Chosen::Keys, true, true>(p, delta, stream);
    } else {
      if (p.dk) launch_keys<typename Chosen::Keys, true, false>(p, delta, stream);
      if (p.dv) launch_keys<typename Chosen::Keys, false, true>(p, delta, stream);
    }
  });
}

}  // namespace attn_ext::cuda
