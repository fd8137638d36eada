// Gradients for every dtype and head dim, without atomics: every number is one sum in one fixed order. Letters as in
// csrc/cpu/generic/backward-inl.h: go = the gradient that comes in for out, glse the one for lse.
//
//   delta_i = Σ_d go_id · out_id − glse_i                                    a warp a row
//   for each tile of 64 (fp64: 32) rows × 32 keys in which something is seen:
//     x = scores, as in the forward;  p = exp2((x − m)·c) / l;  dp = go · vᵀ;  ds = p ∘ (dp − delta)
//   dq += ds · k · scale              a block has the tile's rows and walks over keys
//   dv += pᵀ · go,  dk += dsᵀ · q     a block has the tile's keys and walks over the heads that share them, and their rows
//   dbias += ds                       a block has the entries of one tile and walks over all that share them
//   dsink = −Σ p_sink · delta         a block a head
//
// Each of dq, dk, dv recomputes the tiles, and once more for every kColumns columns: memory stays O(L) and nothing is added
// by two blocks. ds is multiplied by the softcap's derivative on its way into dq and dk.
#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/tile_block.cuh"

namespace attn_ext::cuda {
namespace {

// ---- Traits --------------------------------------------------------------------------------------------------------

// 38,912 bytes of shared memory; 34,816 for double.
template <class T, class KvStorage, int columns>
struct Gradient : TileTraits<T, KvStorage, columns, true> {
  using Base = ScoreTraits<T, KvStorage>;
  static constexpr int kKeysOfThread = Base::kKeys * Base::kLanesPerRow / Base::kThreads;  // of dk, dv
};

// Which gradient of the keys' a block computes.
enum class Of { keys, values };

// ---- Kernels: tiles ------------------------------------------------------------------------------------------------

// What the blocks of dq, dk, dv and dbias share: p and ds of a tile.
template <class Traits>
class GradientBlock : protected TileBlock<Traits> {
 protected:
  using Base = TileBlock<Traits>;
  using T = typename Traits::Number;
  using Scores = typename Base::Scores;
  using Base::real_;
  using Base::row_;
  using Base::sequence_;

  ATTN_EXT_DEVICE GradientBlock(const BackwardParams& p, const T* delta) : Base(p), p_(p), all_deltas_(delta) {}

  // Turns to rows, with what the forward saved of them.
  ATTN_EXT_DEVICE bool begin_rows(int64_t row_begin, int64_t row_end) {
    if (!Base::begin_rows(row_begin, row_end)) return false;
    Base::find_addresses(p_.grad_out, go_rows_);
    Base::load_statistics(p_.row_max, p_.row_sum, max_, inverse_);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (!real_[m]) continue;
      const int64_t at = row_[m].b * p_.row_max.stride_b + row_[m].h * p_.row_max.stride_h;
      delta_[m] = load_global(all_deltas_ + at + sequence_.q_row + row_[m].i);
    }
    return true;
  }

  // p of the tile at `start` as v has met it (dropout applied).
  ATTN_EXT_DEVICE void compute_weights(int64_t start, Scores& weights) {
    Base::compute_scores(start, weights);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      const uint32_t kept = Base::kept_of(m, start);
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kOwnKeys; ++n)
        weights[m][n] = Base::dropped(share(m, n, weights[m][n]), kept, start, n);
    }
  }

  // ds of the tile at `start`, before the softcap's derivative; times it where `capped`.
  ATTN_EXT_DEVICE void compute_score_gradients(int64_t start, Scores& ds, bool capped) {
    if (capped && p_.softcap != 0.0) {
      Scores derivative = {};
      Base::compute_scores(start, ds, &derivative);
      Base::store_tile(derivative);  // a thread's own places, until ds comes there: registers are scarce
    } else {
      Base::compute_scores(start, ds);
    }
    Scores dp = {};
    Base::multiply(go_rows_, p_.grad_out, T(1), p_.v, p_.Dv, start, dp);
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      const uint32_t kept = Base::kept_of(m, start);
      Four<T> derivative;
      if (capped && p_.softcap != 0.0) derivative = load_shared(Base::tile_row(m));
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kOwnKeys; ++n) {
        const T weight = share(m, n, ds[m][n]);
        const bool hidden = Base::hidden(m, n);
        ds[m][n] = hidden ? T(0) : weight * (Base::dropped(dp[m][n], kept, start, n) - delta_[m]);
        if (capped && p_.softcap != 0.0 && !hidden) ds[m][n] *= derivative.x[n];
      }
    }
  }

  const BackwardParams& p_;

 private:
  // exp2((x − m)·c) / l; notes whether the pair is hidden.
  ATTN_EXT_DEVICE T share(int m, int n, T x) {
    const bool hidden = x == -kInfinity<T>;
    Base::note_hidden(m, n, hidden);
    return hidden ? T(0) : exp2_of((x - max_[m]) * Base::units_.c) * inverse_[m];
  }

  const T* all_deltas_;
  const char* go_rows_[Base::kRowLoads];
  T max_[Traits::kOwnRows], inverse_[Traits::kOwnRows], delta_[Traits::kOwnRows];
};

// dq of a block's rows, kColumns columns, and the gradients of biases that have an entry for every score.
template <class Traits>
class QueryGradients : GradientBlock<Traits> {
  using Base = GradientBlock<Traits>;
  using T = typename Traits::Number;
  using Base::p_;
  using Base::real_;
  using Base::row_;

 public:
  ATTN_EXT_DEVICE QueryGradients(const BackwardParams& p, const T* delta) : Base(p, delta) {}

  ATTN_EXT_DEVICE void compute(int64_t b, int64_t hkv, int64_t row_begin, int64_t column_begin,
                               const bool (&own_bias)[kMaxBiases]) {
    Base::begin_sequence(b, hkv);
    if (!Base::begin_rows(row_begin, Base::stacked_rows())) return;
    typename Base::Sums acc = {};
    for (int64_t start = Base::first_tile(); start < Base::key_hi_; start += Traits::kKeys) {
      typename Base::Scores ds;
      if (column_begin == 0 && (own_bias[0] || own_bias[1])) {
        Base::compute_score_gradients(start, ds, false);
        store_bias_gradients(start, ds, own_bias);
      }
      if (!p_.dq) continue;
      Base::compute_score_gradients(start, ds, true);
      Base::store_tile(ds);
      const auto row_at = [&](int j) { return Base::row_of(p_.k, start + j); };
      const uint32_t* hidden = Base::template load_factor<typename Traits::Kv>(p_.k, T(1), column_begin, p_.D, row_at);
      Base::multiply_tile(hidden, acc);
    }
    if (!p_.dq) return;
    ATTN_EXT_UNROLL
    for (int m = 0; m < Traits::kOwnRows; ++m) {
      if (real_[m]) Base::store_row(p_.dq, m, static_cast<T>(p_.scale), column_begin, p_.D, acc);
    }
  }

 private:
  ATTN_EXT_DEVICE void store_bias_gradients(int64_t start, const typename Base::Scores& ds,
                                            const bool (&own_bias)[kMaxBiases]) {
    ATTN_EXT_UNROLL
    for (int bias = 0; bias < kMaxBiases; ++bias) {
      if (!own_bias[bias]) continue;
      const TensorView& out = p_.dbias[bias];
      ATTN_EXT_UNROLL
      for (int m = 0; m < Traits::kOwnRows; ++m) {
        ATTN_EXT_UNROLL
        for (int n = 0; n < Traits::kOwnKeys; ++n) {
          const int64_t j = Base::own_key(start) + n;
          if (!real_[m] || j >= Base::sequence_.Lk) continue;
          store_number(address(out, p_.batch_inner, row_[m].b, row_[m].h, row_[m].i, j), out.dtype, ds[m][n]);
        }
      }
    }
  }
};

// dk or dv of a tile's keys, kColumns columns. A thread has kKeysOfThread keys.
template <class Traits, Of of>
class KeyGradients : GradientBlock<Traits> {
  using Base = GradientBlock<Traits>;
  using T = typename Traits::Number;
  using Base::lane_;
  using Base::p_;
  using Base::shared_;

 public:
  ATTN_EXT_DEVICE KeyGradients(const BackwardParams& p, const T* delta) : Base(p, delta) {}

  ATTN_EXT_DEVICE void compute(int64_t b, int64_t hkv, int64_t start, int64_t column_begin) {
    Base::begin_sequence(b, hkv);
    if (start >= Base::sequence_.Lk) return;
    const TensorView& factor = of == Of::keys ? p_.q : p_.grad_out;
    const T by = of == Of::keys ? Base::units_.q_factor : T(1);
    const int64_t width = of == Of::keys ? p_.D : p_.Dv;
    Four<T> acc[Traits::kKeysOfThread][Traits::kVectors] = {};
    for (int64_t row = 0; Base::begin_rows(row, Base::stacked_rows()); row += Traits::kRows) {
      if (!Base::sees(start)) continue;
      typename Base::Scores tile;
      if (of == Of::keys) {
        Base::compute_score_gradients(start, tile, true);
      } else {
        Base::compute_weights(start, tile);
      }
      Base::store_tile(tile);
      const auto row_at = [&](int r) { return Base::address_of_row(factor, r); };
      const uint32_t* hidden = Base::template load_factor<AnyStorage>(factor, by, column_begin, width, row_at);
      multiply_tile(acc, hidden);
    }
    store(acc, b, hkv, start, column_begin, width);
  }

 private:
  ATTN_EXT_DEVICE int own_key() const { return thread_index() / Traits::kLanesPerRow * Traits::kKeysOfThread; }

  // acc += tileᵀ · rows
  ATTN_EXT_DEVICE void multiply_tile(Four<T> (&acc)[Traits::kKeysOfThread][Traits::kVectors], const uint32_t* hidden) {
    const T* tile = shared_ + Traits::kTile + own_key();
    const auto* rows = reinterpret_cast<const Four<T>*>(shared_ + Traits::kFactor);
    for (int r = 0; r < Traits::kRows; ++r) {
      const uint32_t skip = hidden ? load_shared(hidden + r) : 0;
      ATTN_EXT_UNROLL
      for (int n = 0; n < Traits::kKeysOfThread; ++n) {
        if (skip >> (own_key() + n) & 1u) continue;
        const T left = load_shared(tile + r * Traits::kKeyPitch + n);
        ATTN_EXT_UNROLL
        for (int c = 0; c < Traits::kVectors; ++c) {
          const auto right = load_shared(rows + r * (Traits::kColumns / 4) + c * Traits::kLanesPerRow + lane_);
          ATTN_EXT_UNROLL
          for (int e = 0; e < 4; ++e) acc[n][c].x[e] = fma_of(left, right.x[e], acc[n][c].x[e]);
        }
      }
    }
  }

  ATTN_EXT_DEVICE void store(const Four<T> (&acc)[Traits::kKeysOfThread][Traits::kVectors], int64_t b, int64_t hkv,
                             int64_t start, int64_t column_begin, int64_t width) {
    const TensorView& out = of == Of::keys ? p_.dk : p_.dv;
    const T scale = of == Of::keys ? static_cast<T>(Base::units_.scaled ? p_.scale : std::fabs(p_.scale)) : T(1);
    ATTN_EXT_UNROLL
    for (int n = 0; n < Traits::kKeysOfThread; ++n) {
      const int64_t j = start + own_key() + n;
      if (j >= Base::sequence_.Lk) continue;
      ATTN_EXT_UNROLL
      for (int c = 0; c < Traits::kVectors; ++c) {
        ATTN_EXT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int64_t column = column_begin + (c * Traits::kLanesPerRow + lane_) * 4 + e;
          if (column >= width) continue;
          char* at = address(out, p_.batch_inner, b, hkv, Base::sequence_.k_row + j, column);
          store_number(at, out.dtype, acc[n][c].x[e] * scale);
        }
      }
    }
  }
};

// The gradient of a bias that several scores share. A block has one tile of its entries, rows × keys of one head (one
// of each where the bias has no entries of its own along them), and adds up what shares them: batch entries, heads, row
// blocks and key tiles in this order, place by place of the tile, and then over the places that share an entry.
template <class Traits>
class BiasGradients : GradientBlock<Traits> {
  using Base = GradientBlock<Traits>;
  using T = typename Traits::Number;
  using Base::p_;
  using Base::shared_;

 public:
  ATTN_EXT_DEVICE BiasGradients(const BackwardParams& p, const T* delta, int bias)
      : Base(p, delta), bias_(bias), varies_(p.bias_varies[bias]) {}

  // Entries of outer and inner batch entry b0, b1, head h, from row i and key j on.
  ATTN_EXT_DEVICE void compute(int64_t b0, int64_t b1, int64_t h, int64_t i, int64_t j) {
    const int64_t inner = p_.batch_inner, group = p_.Hq / p_.Hkv;
    typename Base::Scores sums = {};
    for (int64_t b = 0; b < p_.batch; ++b) {
      if ((varies_[0] && b / inner != b0) || (varies_[1] && b % inner != b1)) continue;
      for (int64_t head = varies_[2] ? h : 0; head < (varies_[2] ? h + 1 : p_.Hq); ++head) {
        Base::begin_sequence(b, head / group);
        const int64_t first = head % group * Base::sequence_.Lq, last = first + Base::sequence_.Lq;
        for (int64_t row = first + i; row < (varies_[3] ? first + i + 1 : last); row += Traits::kRows) {
          if (!Base::begin_rows(row, last)) continue;
          for (int64_t start = varies_[4] ? j : 0; start < (varies_[4] ? j + 1 : p_.Lk); start += Traits::kKeys) {
            if (!Base::sees(start)) continue;
            typename Base::Scores ds;
            Base::compute_score_gradients(start, ds, false);
            ATTN_EXT_UNROLL
            for (int m = 0; m < Traits::kOwnRows; ++m) {
              ATTN_EXT_UNROLL
              for (int n = 0; n < Traits::kOwnKeys; ++n) sums[m][n] += ds[m][n];
            }
          }
        }
      }
    }
    sync_block();  // a tile before has been read
    Base::store_tile(sums);
    sync_block();
    store(b0, b1, h, i, j);
  }

 private:
  ATTN_EXT_DEVICE void store(int64_t b0, int64_t b1, int64_t h, int64_t i, int64_t j) {
    const int64_t left_rows = p_.Lq - i, left_keys = p_.Lk - j;
    const int rows = varies_[3] ? static_cast<int>(left_rows < Traits::kRows ? left_rows : Traits::kRows) : 1;
    const int keys = varies_[4] ? static_cast<int>(left_keys < Traits::kKeys ? left_keys : Traits::kKeys) : 1;
    const TensorView& out = p_.dbias[bias_];
    for (int entry = thread_index(); entry < rows * keys; entry += Traits::kThreads) {
      const int row = entry / keys, key = entry % keys;
      T sum = 0;
      for (int r = varies_[3] ? row : 0; r < (varies_[3] ? row + 1 : Traits::kRows); ++r) {
        for (int k = varies_[4] ? key : 0; k < (varies_[4] ? key + 1 : Traits::kKeys); ++k) {
          sum += load_shared(shared_ + Traits::kTile + r * Traits::kKeyPitch + k);
        }
      }
      char* at = address(out, p_.batch_inner, b0 * p_.batch_inner + b1, h, i + row, j + key);
      store_number(at, out.dtype, sum);
    }
  }

  const int bias_;
  const bool* varies_;
};

// ---- Kernels: entries ----------------------------------------------------------------------------------------------

struct Cut {
  int64_t blocks = 0, column_blocks = 0, tasks = 0;
  bool own_bias[kMaxBiases] = {};
};

template <class Traits>
ATTN_EXT_KERNEL void query_gradients(ATTN_EXT_GRID_CONSTANT const BackwardParams p,
                                     const typename Traits::Number* delta, ATTN_EXT_GRID_CONSTANT const Cut cut) {
  QueryGradients<Traits> block(p, delta);
  for (int64_t task = block_index(); task < cut.tasks; task += block_count()) {
    const BlockPlace at = place_of_rows<Traits::kRows>(p, cut.blocks, task / cut.column_blocks);
    block.compute(at.b, at.hkv, at.begin, task % cut.column_blocks * Traits::kColumns, cut.own_bias);
  }
}

template <class Traits, Of of>
ATTN_EXT_KERNEL void key_gradients(ATTN_EXT_GRID_CONSTANT const BackwardParams p, const typename Traits::Number* delta,
                                   ATTN_EXT_GRID_CONSTANT const Cut cut) {
  KeyGradients<Traits, of> block(p, delta);
  for (int64_t task = block_index(); task < cut.tasks; task += block_count()) {
    const BlockPlace at = place_of_keys<Traits::kKeys>(p, cut.blocks, task / cut.column_blocks);
    block.compute(at.b, at.hkv, at.begin, task % cut.column_blocks * Traits::kColumns);
  }
}

// How many entries of its own a bias has along (b0, b1, h), and tiles of them along (i, j).
struct BiasCut {
  int64_t b1s = 0, heads = 0, row_tiles = 0, key_tiles = 0, tasks = 0;
};

template <class Traits>
ATTN_EXT_KERNEL void bias_gradients(ATTN_EXT_GRID_CONSTANT const BackwardParams p, const typename Traits::Number* delta,
                                    int bias, ATTN_EXT_GRID_CONSTANT const BiasCut cut) {
  BiasGradients<Traits> block(p, delta, bias);
  for (int64_t task = block_index(); task < cut.tasks; task += block_count()) {
    const int64_t rows = task / cut.key_tiles, heads = rows / cut.row_tiles, batch = heads / cut.heads;
    block.compute(batch / cut.b1s, batch % cut.b1s, heads % cut.heads, rows % cut.row_tiles * Traits::kRows,
                  task % cut.key_tiles * Traits::kKeys);
  }
}

constexpr int kThreads = 128;

// Rows as they lie in memory: those of packed sequences end to end, as if they were one.
struct RowsInMemory {
  int64_t batch = 0, length = 0;

  explicit RowsInMemory(const AttentionParams& p) : batch(p.cu_q ? 1 : p.batch), length(p.cu_q ? p.total_q : p.Lq) {}
};

// delta of every row: a warp a row.
template <class T>
ATTN_EXT_KERNEL void row_deltas(ATTN_EXT_GRID_CONSTANT const BackwardParams p, T* delta, const RowsInMemory rows) {
  const int lane = thread_index() % kWarpSize;
  constexpr int64_t kWarps = kThreads / kWarpSize;
  const int64_t count = rows.batch * p.Hq * rows.length;
  for (int64_t r = block_index() * kWarps + thread_index() / kWarpSize; r < count; r += block_count() * kWarps) {
    const int64_t row = r % rows.length, h = r / rows.length % p.Hq, b = r / rows.length / p.Hq;
    const int64_t offset = b * p.row_max.stride_b + h * p.row_max.stride_h + row;
    const T max = load_global(static_cast<const T*>(p.row_max.data) + offset);
    const T sum = load_global(static_cast<const T*>(p.row_sum.data) + offset);
    // A row that sees no key has no gradient, whatever comes in; with a sink its lse is the sink's logit.
    const bool only_sink = p.sinks && sum == T(1) && max == static_cast<T>(load_global(p.sinks + h));
    T total = 0;
    if (sum != T(0) && !only_sink) {
      for (int64_t d = lane; d < p.Dv; d += kWarpSize) {
        const char* go = address(p.grad_out, p.batch_inner, b, h, row, d);
        const char* out = address(p.out, p.batch_inner, b, h, row, d);
        total = fma_of(load_number<T, AnyStorage>(go, p.grad_out.dtype), load_number<T, AnyStorage>(out, p.out.dtype),
                       total);
      }
    }
    total = join_lanes<kWarpSize, Sum>(total);
    if (lane != 0) continue;
    if (p.grad_lse && sum != T(0)) total -= load_global(row_address<const T>(p.grad_lse, b, h) + row);
    store_global(delta + offset, total);
  }
}

// dsink_h = −Σ p_sink · delta: the sink is a key whose value is 0. A block a head; its threads' sums meet in halves.
template <class T>
ATTN_EXT_KERNEL void sink_gradients(ATTN_EXT_GRID_CONSTANT const BackwardParams p, const T* delta,
                                    const RowsInMemory rows) {
  auto* sums = reinterpret_cast<double*>(shared_memory());
  for (int64_t h = block_index(); h < p.Hq; h += block_count()) {
    const double sink = load_global(p.sinks + h);
    double total = 0;
    for (int64_t r = thread_index(); r < rows.batch * rows.length; r += kThreads) {
      const int64_t offset = r / rows.length * p.row_max.stride_b + h * p.row_max.stride_h + r % rows.length;
      const T sum = load_global(static_cast<const T*>(p.row_sum.data) + offset);
      if (sum == T(0)) continue;
      const auto max = static_cast<double>(load_global(static_cast<const T*>(p.row_max.data) + offset));
      total -= std::exp(sink - max) / static_cast<double>(sum) * static_cast<double>(load_global(delta + offset));
    }
    sync_block();  // the head before has been added up
    store_shared(sums + thread_index(), total);
    for (int half = kThreads / 2; half > 0; half /= 2) {
      sync_block();
      if (thread_index() < half) {
        total += load_shared(sums + thread_index() + half);
        store_shared(sums + thread_index(), total);
      }
    }
    if (thread_index() == 0) store_global(p.dsinks + h, total);
  }
}

// ---- Launchers -----------------------------------------------------------------------------------------------------

template <class Traits>
void backward_of(const BackwardParams& p, typename Traits::Number* delta, StreamHandle stream) {
  using T = typename Traits::Number;
  const RowsInMemory rows(p);
  launch_tasks("row_deltas", row_deltas<T>, pieces(rows.batch * p.Hq * rows.length, kThreads / kWarpSize), kThreads, 0,
               stream, p, delta, rows);
  if (p.dsinks) {
    launch_tasks("sink_gradients", sink_gradients<T>, p.Hq, kThreads, kThreads * sizeof(double), stream, p, delta,
                 rows);
  }
  Cut queries;
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!p.dbias[n]) continue;
    queries.own_bias[n] = true;
    for (const bool varies : p.bias_varies[n]) queries.own_bias[n] = queries.own_bias[n] && varies;
    if (queries.own_bias[n]) continue;
    const bool(&varies)[5] = p.bias_varies[n];
    BiasCut cut;
    cut.b1s = varies[1] ? p.batch_inner : 1;
    cut.heads = varies[2] ? p.Hq : 1;
    cut.row_tiles = varies[3] ? pieces(p.Lq, Traits::kRows) : 1;
    cut.key_tiles = varies[4] ? pieces(p.Lk, Traits::kKeys) : 1;
    cut.tasks = (varies[0] ? p.batch / p.batch_inner : 1) * cut.b1s * cut.heads * cut.row_tiles * cut.key_tiles;
    launch_tasks("bias_gradients", bias_gradients<Traits>, cut.tasks, Traits::kThreads, Traits::kSharedBytes, stream, p,
                 delta, n, cut);
  }
  if (p.dq || queries.own_bias[0] || queries.own_bias[1]) {
    queries.blocks = row_blocks_of<Traits::kRows>(p);
    queries.column_blocks = p.dq ? pieces(p.D, Traits::kColumns) : 1;
    queries.tasks = heads_of_blocks(p) * queries.blocks * queries.column_blocks;
    launch_tasks("query_gradients", query_gradients<Traits>, queries.tasks, Traits::kThreads, Traits::kSharedBytes,
                 stream, p, delta, queries);
  }
  const auto launch_keys = [&](auto kernel, const char* name, int64_t width) {
    Cut keys;
    keys.blocks = key_blocks_of<Traits::kKeys>(p);
    keys.column_blocks = pieces(width, Traits::kColumns);
    keys.tasks = heads_of_blocks(p) * keys.blocks * keys.column_blocks;
    launch_tasks(name, kernel, keys.tasks, Traits::kThreads, Traits::kSharedBytes, stream, p, delta, keys);
  };
  if (p.dk) launch_keys(key_gradients<Traits, Of::keys>, "key_gradients", p.D);
  if (p.dv) launch_keys(key_gradients<Traits, Of::values>, "value_gradients", p.Dv);
}

}  // namespace

void backward_general(const BackwardParams& p, void* delta, StreamHandle stream) {
  if (p.q.dtype == DType::float64) {
    backward_of<Gradient<double, double, 64>>(p, static_cast<double*>(delta), stream);
  } else {
    backward_of<Gradient<float, AnyStorage, 64>>(p, static_cast<float*>(delta), stream);
  }
}

}  // namespace attn_ext::cuda
