// Gradients of attention, recomputing the weights instead of having stored them. Letters as in forward-inl.h; go = the
// gradient that comes in for out, glse the one for lse.
//
//   delta_i = Σ_d go_id · out_id − glse_i                                  once a row
//   for each block of 128 keys, for each block of 96 rows:
//     1. s = q · kᵀ; x = finish_scores(s)                                   as in the forward pass, the same bits
//        p = exp2((x − m_i)·c) / l_i                                        m and l saved apart: their lse loses them
//                                                                           where |m| is huge
//     2. dp = go · vᵀ                                                       (dropped weights: 0, others / (1 − p_drop))
//     3. ds = p ∘ (dp − delta)                                              which is the bias' gradient
//     4. dv += pᵀ · go;   dk += dsᵀ · q · scale;   dq += ds · k · scale     ds times the softcap's derivative
//                                                                           (by pairs: backward_pairs-inl.h)
//
// Every sum is one chain in a fixed order (dk, dv over heads of the group and rows; dq over keys), so gradients have the
// same bits for any number of threads. dk and dv of the block stay in cache while the rows pass by; dq goes out to
// memory and comes back for every key block, in their order.
//
// A task is one key/value head with all its key blocks. Where there are too few heads to go round, a task is a key
// block, and the tasks of a head run as a wavefront: block n may add to dq of row block t once block n − 1 has.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class Products>
class BackwardWorker {
  using T = typename Products::T;
  using Left = typename Products::Left;
  using Right = typename Products::Right;
  using V = Vec<T>;
  static constexpr int N = V::N;
  static constexpr int64_t kKeys = kBackwardKeys, kRows = kBackwardRows;
  static_assert(kKeys % kPanel<T> == 0);
  // Numbers of a row of q or go as a left factor. Where they are turned, whole turns of them.
  static int64_t left_stride(int64_t width) { return round_up_to(width, Products::kPairs ? 2 * N : N); }
  // Rows of the p and ds tiles lie a cache line further apart than they are long: step 4 walks down their columns, and
  // at a power of two all of a column would fall into a few sets of L1.
  static constexpr int64_t kTileStride = kKeys + static_cast<int64_t>(kCacheLine / sizeof(T));
  // From one key's gradients to the next one's: none where they lie row by row.
  static constexpr int64_t kKeyStride = Products::kPairs ? kKeys + N : kKeys;
  static constexpr int64_t kNarrowStride = kKeys + kPanel<T>;

 public:
  // dq on its way: T rows, in the output itself where it can hold them.
  struct QueryGradients {
    T* rows = nullptr;
    int64_t stride = 0;
  };

  // The tile's place: batch entry, key/value head, head of the group, first row, first key.
  struct Place {
    int64_t b = 0, hkv = 0, g = 0, row = 0, key = 0;
  };

  BackwardWorker(const BackwardParams& p, const T* delta)
      : p_(p),
        delta_(delta),
        units_(p),
        group_(p.Hq / p.Hkv),
        d_(round_up_to(p.D, N)),
        dv_(round_up_to(p.Dv, N)),
        scratch_(layout(nullptr)) {
    layout(scratch_.data());
  }

  void begin_sequence(int64_t b) { sequence_ = sequence_of(p_, b); }
  const Sequence& sequence() const { return sequence_; }
  int64_t row_blocks() const { return ceil_div(sequence_.Lq, kRows); }

  // Packs keys [key, key + kKeys) of one key/value head, as both products want them.
  void begin_keys(const Place& at) {
    keys_ = std::min(kKeys, sequence_.Lk - at.key);
    const int64_t row = sequence_.k_row + at.key;
    const char* k = address(p_.k, p_.batch_inner, at.b, at.hkv, row);
    Products::pack_keys(p_.k, EvenRows(p_.k, k), keys_, p_.D, k_panels_);
    if (p_.Dv > 0) {  // an empty tensor's pointer is null, with no address to count from
      Products::pack_keys(p_.v, EvenRows(p_.v, address(p_.v, p_.batch_inner, at.b, at.hkv, row)), keys_, p_.Dv,
                          v_panels_);
    }
    if constexpr (Products::kPairs) {
      pack_keys_by_pairs(k);
    } else {
      keys_finite_ = !p_.dq || pack_rows<T>(p_.k, EvenRows(p_.k, k), keys_, p_.D, kKeys, k_rows_);
    }
  }

  void clear_key_gradients() {
    std::fill(dk_rows_, dk_rows_ + kKeyStride * d_, T(0));
    std::fill(dv_rows_, dv_rows_ + kKeyStride * dv_, T(0));
  }

  // Steps 1 to 3 for one tile; false where no row sees a key of it by position.
  bool compute_tile(const Place& at) {
    const int64_t h = at.hkv * group_ + at.g;
    if (padding_mask_hides_all(p_, at.b, at.key, keys_) || !trim(at)) return false;
    load_rows(at.b, h);

    const int64_t columns = round_up_to(to_, N) - from_;
    multiply_by_keys(columns, p_.D, left_q_, k_panels_, p_tile_);
    multiply_by_keys(columns, p_.Dv, left_go_, v_panels_, ds_tile_);

    const Stretch s{at.key, at.key + from_, at.key + from_ + columns, at.key + keys_};
    const bool plain = all_visible_ && !units_.scaled && !p_.mask;
    const auto* max = row_address<const T>(p_.row_max, at.b, h) + sequence_.q_row;
    const auto* sum = row_address<const T>(p_.row_sum, at.b, h) + sequence_.q_row;
    const T* delta = delta_of(at.b, h);
    for (int64_t r = 0; r < rows_; ++r) {
      T* x = p_tile_ + r * kTileStride;
      if (!plain) {
        finish_scores<T>(p_, units_, sequence_, row_[r], s, buffers_, x,
                         p_.softcap != 0.0 ? cap_tile_ + r * kTileStride : nullptr);
      }
      weights_and_scores(r, s, max[row_[r].i], sum[row_[r].i], delta[row_[r].i]);
    }
    return true;
  }

  // Products of the tile's rows with k or v, whose panels are `width` numbers deep.
  void multiply_by_keys(int64_t columns, int64_t width, const Left* rows, const Right* panels, T* tile) const {
    multiply_keys<Products>(rows_, columns, width, rows, left_stride(width),
                            panels + from_ * Products::right_rows(width), tile + from_, kTileStride);
  }

  // Step 4 for dk and dv.
  void add_key_gradients() {
    if (p_.softcap != 0.0) apply_cap_derivative();
    if constexpr (Products::kPairs) {
      add_key_gradients_by_pairs();
    } else {
      add_key_gradients_by_rows();
    }
  }

  void add_key_gradients_by_rows() {
    if (exclude_hidden()) return add_key_gradients_visible();
    if (p_.dv) {
      multiply_panels<T, Start::from_c, Along::rows>(to_ - from_, dv_, rows_, p_tile_ + from_, kTileStride, left_go_,
                                                     {kPanel<T>, dv_}, dv_rows_ + from_ * dv_, dv_);
    }
    if (p_.dk) {
      multiply_panels<T, Start::from_c, Along::rows>(to_ - from_, d_, rows_, ds_tile_ + from_, kTileStride, left_q_,
                                                     {kPanel<T>, d_}, dk_rows_ + from_ * d_, d_);
    }
  }

  // Step 4 for dq.
  void add_query_gradients(QueryGradients dq) {
    dq.rows += first_row_ * dq.stride;
    if constexpr (Products::kPairs) {
      add_query_gradients_by_pairs(dq);
    } else if (exclude_hidden()) {
      add_query_gradients_visible(dq);
    } else {
      multiply_panels<T, Start::from_c, Along::k>(rows_, d_, to_ - from_, ds_tile_ + from_, kTileStride, k_rows_,
                                                  {kPanel<T> * kKeys, 0, from_}, dq.rows, dq.stride);
    }
  }

  void store_key_gradients(const Place& at) {
    const T factor = static_cast<T>(units_.scaled ? p_.scale : std::fabs(p_.scale));
    const auto store = [&](const TensorView& out, int64_t width, T by, const T* sums) {
      if (!out) return;
      if constexpr (Products::kPairs) {
        store_turned(out, at, width, by, sums);
      } else {
        for (int64_t j = 0; j < keys_; ++j) {
          store_row<T>(out, address(out, p_.batch_inner, at.b, at.hkv, sequence_.k_row + at.key + j), width, by,
                       sums + j * round_up_to(width, N));
        }
      }
    };
    store(p_.dk, p_.D, factor, dk_rows_);
    store(p_.dv, p_.Dv, T(1), dv_rows_);
  }

  // Where dq of the rows from at.row on is summed up: in the output where it is T and vectors fit its rows, otherwise in
  // `memory` ([G · Lq][padded D], zeros).
  QueryGradients query_gradients(const Place& at, T* memory) const {
    if (memory) return {memory + (at.g * sequence_.Lq + at.row) * d_, d_};
    const int64_t h = at.hkv * group_ + at.g;
    return {reinterpret_cast<T*>(address(p_.dq, p_.batch_inner, at.b, h, sequence_.q_row + at.row)), p_.dq.stride_l};
  }

  void store_query_gradients(const Place& at, QueryGradients dq) {
    const int64_t h = at.hkv * group_ + at.g;
    for (int64_t r = 0; r < std::min(kRows, sequence_.Lq - at.row); ++r) {
      store_row<T>(p_.dq, address(p_.dq, p_.batch_inner, at.b, h, sequence_.q_row + at.row + r), p_.D,
                   static_cast<T>(p_.scale), dq.rows + r * dq.stride);
    }
  }

  // The bias' gradient of this tile straight into dbias, for a bias with an entry of its own for every score.
  void store_bias_gradients(const Place& at, int n) {
    const TensorView& out = p_.dbias[n];
    for (int64_t r = 0; r < rows_; ++r) {
      store_row<T>(out, address(out, p_.batch_inner, at.b, row_[r].h, row_[r].i, at.key + from_), to_ - from_, T(1),
                   ds_tile_ + r * kTileStride + from_);
    }
  }

  // Adds the tile's bias gradient to sums[row of the block · row_stride + key of the block · key_stride].
  void add_bias_gradients(double* sums, int64_t row_stride, int64_t key_stride) const {
    for (int64_t r = 0; r < rows_; ++r) {
      const T* ds = ds_tile_ + r * kTileStride;
      double* to = sums + (first_row_ + r) * row_stride;
      for (int64_t j = from_; j < to_; ++j) to[j * key_stride] += static_cast<double>(ds[j]);
    }
  }

 private:
  size_t layout(char* base) {
    Carver carve(base);
    row_ = carve.take<ScoreRow>(kRows);
    left_q_ = carve.take<Left>(kRows * left_stride(p_.D));
    left_go_ = carve.take<Left>(kRows * left_stride(p_.Dv));
    if constexpr (Products::kPairs) {
      turned_q_ = carve.take<Left>(left_stride(p_.D) * kRows);
      turned_go_ = carve.take<Left>(left_stride(p_.Dv) * kRows);
      weights_ = carve.take<Left>(kRows * kNarrowStride);
      narrow_ds_ = carve.take<Left>(kRows * kNarrowStride);
      pairs_ = carve.take<Right>(Products::right_rows(kRows) * kPanel<T>);
      k_pairs_ = carve.take<Right>(Products::right_rows(kKeys) * d_);
      some_rows_ = carve.take<T>(std::max<int64_t>(Products::kRows, N) * std::max(d_, dv_));
    } else {
      k_rows_ = carve.take<T>(kKeys * d_);
    }
    k_panels_ = carve.take<Right>(kKeys * Products::right_rows(p_.D));
    v_panels_ = carve.take<Right>(kKeys * Products::right_rows(p_.Dv));
    dk_rows_ = carve.take<T>(kKeyStride * d_);
    dv_rows_ = carve.take<T>(kKeyStride * dv_);
    p_tile_ = carve.take<T>(kRows * kTileStride);
    ds_tile_ = carve.take<T>(kRows * kTileStride);
    cap_tile_ = carve.take<T>(p_.softcap != 0.0 ? kRows * kTileStride : 0);
    buffers_.numbers = carve.take<T>(kKeys);
    buffers_.bytes = carve.take<uint8_t>(kKeys);
    keep_ = carve.take<uint8_t>(kKeys + 8);
    hidden_ = carve.take<uint8_t>(kRows * kTileStride);
    return carve.used();
  }

  const T* delta_of(int64_t b, int64_t h) const {
    return delta_ + b * p_.row_max.stride_b + h * p_.row_max.stride_h + sequence_.q_row;
  }

  // Cuts the tile down to the rows and panels of keys in which something is visible by position. False: nothing is.
  bool trim(const Place& at) {
    const int64_t h = at.hkv * group_ + at.g, end = std::min(at.row + kRows, sequence_.Lq);
    int64_t lo = keys_, hi = 0, lo_max = 0, hi_min = keys_;
    rows_ = 0;
    int64_t seen = 0;  // rows up to the last one that sees a key
    for (int64_t i = at.row; i < end; ++i) {
      const KeyRange keys = visible_keys(p_, sequence_, i);
      const int64_t from = std::clamp<int64_t>(keys.lo - at.key, 0, keys_);
      const int64_t to = std::clamp<int64_t>(keys.hi - at.key, 0, keys_);
      if (from >= to && rows_ == 0) continue;
      if (rows_ == 0) first_row_ = i - at.row;
      row_[rows_++] = {at.b, h, i, keys};
      if (from >= to) {
        hi_min = 0;  // a row in between that sees nothing
        continue;
      }
      seen = rows_;
      lo = std::min(lo, from);
      hi = std::max(hi, to);
      lo_max = std::max(lo_max, from);
      hi_min = std::min(hi_min, to);
    }
    rows_ = seen;
    if (rows_ == 0) return false;
    from_ = lo / kPanel<T> * kPanel<T>;
    to_ = std::min(round_up_to(hi, kPanel<T>), keys_);
    all_visible_ = lo_max <= from_ && hi_min >= to_;
    some_hidden_ = !all_visible_ || p_.mask || p_.bias[0] || p_.bias[1];
    return true;
  }

  void load_rows(int64_t b, int64_t h) {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t row = sequence_.q_row + row_[r].i;
      load_row(p_.q, address(p_.q, p_.batch_inner, b, h, row), p_.D, units_.q_factor, r, left_q_);
      if (p_.Dv == 0) continue;
      load_row(p_.grad_out, address(p_.grad_out, p_.batch_inner, b, h, row), p_.Dv, T(1), r, left_go_);
    }
    // Only asked where something may be hidden.
    rows_finite_ = !some_hidden_ || (Products::all_finite(left_q_, rows_ * left_stride(p_.D)) &&
                                     Products::all_finite(left_go_, rows_ * left_stride(p_.Dv)));
  }

  // Row r of q or go, zeros behind it.
  static void load_row(const TensorView& view, const char* src, int64_t n, T factor, int64_t r, Left* rows) {
    Left* dst = rows + r * left_stride(n);
    Products::load_left(view, src, n, factor, dst);
    std::fill(dst + n, dst + left_stride(n), Left{});
  }

  // p and ds of one row, from x in p_tile_ and dp in ds_tile_. Where something may be hidden both are exactly 0 there.
  void weights_and_scores(int64_t r, const Stretch& s, T max, T sum, T delta) {
    T* p = p_tile_ + r * kTileStride;
    T* ds = ds_tile_ + r * kTileStride;
    const int64_t count = s.to - s.start;
    const V m = V::broadcast(max == -kInfinity<T> ? T(0) : max), c = V::broadcast(units_.c);
    const V inverse = V::broadcast(sum == T(0) ? T(0) : T(1) / sum), minus = V::broadcast(delta);
    if (p_.dropout) {
      const int64_t first = from_ / 8 * 8;  // random bits come for eight keys at a time; key blocks start at such keys
      dropout_keep(p_.dropout_seed, p_.dropout_threshold, row_[r].b, row_[r].h, row_[r].i, s.start + first,
                   count - first, keep_ + first);
    }
    const V drop_scale = V::broadcast(static_cast<T>(p_.dropout_scale)), none = V::zero();
    const V minus_infinity = V::broadcast(-kInfinity<T>);
    uint8_t* hidden = exclude_hidden() ? hidden_ + r * kTileStride : nullptr;
    for (int64_t j = from_; j < count; j += N) {
      const V x = V::load(p + j);
      const V share = exp2_nonpositive<T>((x - m) * c) * inverse;
      V dp = V::load(ds + j), used = share;
      if (p_.dropout) {
        const auto kept = V::nonzero_bytes(keep_ + j);
        dp = V::select(kept, dp * drop_scale, none);
        used = V::select(kept, share * drop_scale, none);
      }
      V gradient = share * (dp - minus);
      if (some_hidden_) {
        const auto out_of_sight = V::equal(x, minus_infinity);
        gradient = V::select(out_of_sight, none, gradient);
        used = V::select(out_of_sight, none, used);
        if (hidden) {
          T lanes[N];
          x.store(lanes);
          for (int n = 0; n < N; ++n) hidden[j + n] = lanes[n] == -kInfinity<T>;
        }
      }
      used.store(p + j);
      gradient.store(ds + j);
    }
  }

  void apply_cap_derivative() {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t j = from_; j < round_up_to(to_, N); j += N) {
        T* at = ds_tile_ + r * kTileStride + j;
        const V capped = V::load(at) * V::load(cap_tile_ + r * kTileStride + j);
        if (some_hidden_) {  // a hidden key's derivative may be NaN
          V::select(V::equal(V::load(at), V::zero()), V::zero(), capped).store(at);
        } else {
          capped.store(at);
        }
      }
    }
  }

  // A hidden pair's weight 0 must not meet a NaN or Inf of its q, go or k row in step 4.
  bool exclude_hidden() const { return some_hidden_ && !(rows_finite_ && keys_finite_); }

  // Step 4 as the same chains of multiply-adds, minus the hidden pairs.
  void add_key_gradients_visible() {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t j = from_; j < to_; ++j) {
        if (hidden_[r * kTileStride + j]) continue;
        if (p_.dv) add_row(dv_, p_tile_[r * kTileStride + j], left_go_ + r * dv_, dv_rows_ + j * dv_);
        if (p_.dk) add_row(d_, ds_tile_[r * kTileStride + j], left_q_ + r * d_, dk_rows_ + j * d_);
      }
    }
  }

  void add_query_gradients_visible(QueryGradients dq) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t j = from_; j < to_; ++j) {
        if (hidden_[r * kTileStride + j]) continue;
        const V ds = V::broadcast(ds_tile_[r * kTileStride + j]);
        for (int64_t column = 0; column < d_; column += N) {
          const int64_t panel = column / kPanel<T> * kPanel<T>;
          const int64_t width = d_ - panel > N ? kPanel<T> : N;
          T* at = dq.rows + r * dq.stride + column;
          V::fma(ds, V::load(k_rows_ + panel * kKeys + j * width + (column - panel)), V::load(at)).store(at);
        }
      }
    }
  }

  // Step 4 of products of pairs: backward_pairs-inl.h.
  void pack_keys_by_pairs(const char* k);
  void add_key_gradients_by_pairs();
  void add_query_gradients_by_pairs(QueryGradients dq);
  void narrow_tile(T* tile, Left* to);
  void add_turned(const Left* narrowed, Left* left, Left* turned, int64_t width, T* sums);
  void store_turned(const TensorView& out, const Place& at, int64_t width, T factor, const T* sums);

  static void add_row(int64_t width, T factor, const T* row, T* to) {
    for (int64_t d = 0; d < width; d += N) {
      V::fma(V::broadcast(factor), V::load(row + d), V::load(to + d)).store(to + d);
    }
  }

  const BackwardParams& p_;
  const T* delta_;
  const ScoreUnits<T> units_;
  const int64_t group_, d_, dv_;  // Hq / Hkv; D and Dv rounded up to whole vectors

  ScoreRow* row_ = nullptr;                          // [kRows]
  Left *left_q_ = nullptr, *left_go_ = nullptr;      // [kRows][left_stride(D or Dv)]
  Right *k_panels_ = nullptr, *v_panels_ = nullptr;  // transposed panels of keys
  T* k_rows_ = nullptr;                              // panels of columns
  T *dk_rows_ = nullptr, *dv_rows_ = nullptr;        // [kKeys][d_], [kKeys][dv_]; of pairs turned: [d_][kKeyStride] …
  T *p_tile_ = nullptr, *ds_tile_ = nullptr;         // [kRows][kTileStride]
  T* cap_tile_ = nullptr;                            // [kRows][kTileStride]
  RowBuffers<T> buffers_;
  uint8_t *keep_ = nullptr, *hidden_ = nullptr;  // [kKeys], [kRows][kTileStride]
  // Of products of pairs only.
  Left *turned_q_ = nullptr, *turned_go_ = nullptr;  // [left_stride(D or Dv)][kRows]
  Left *weights_ = nullptr, *narrow_ds_ = nullptr;   // [kRows][kNarrowStride]: p and ds, rounded
  Right* pairs_ = nullptr;                           // a panel of them, two rows to a word: [kRows / 2][kPanel]
  Right* k_pairs_ = nullptr;        // panels of columns, two keys to a word: [panel][kKeys / 2][columns]
  T* some_rows_ = nullptr;          // [Products::kRows or N][d_ or dv_]
  const char* key_rows_ = nullptr;  // the packed block's keys as they lie

  Scratch scratch_;
  [[no_unique_address]] typename Products::Session session_;

  Sequence sequence_;
  int64_t keys_ = 0;  // of the packed block
  // What the tile was trimmed to: rows first_row_ … of the row block (row_[0 … rows_)), keys [from_, to_) of the key block.
  int64_t first_row_ = 0, rows_ = 0, from_ = 0, to_ = 0;
  bool all_visible_ = true, some_hidden_ = false, rows_finite_ = true, keys_finite_ = true;
};

// delta of every row, laid out as row_max is.
template <class T>
void compute_delta(const BackwardParams& p, const Parallel& parallel, T* delta) {
  share_tasks(parallel, p.batch * p.Hq, [&](auto&& next) {
    Scratch scratch(2 * round_up(static_cast<size_t>(p.Dv) * sizeof(T), kCacheLine));
    Carver carve(scratch.data());
    T* go = carve.take<T>(p.Dv);
    T* out = carve.take<T>(p.Dv);
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t b = task / p.Hq, h = task % p.Hq;
      const Sequence sequence = sequence_of(p, b);
      const int64_t offset = b * p.row_max.stride_b + h * p.row_max.stride_h + sequence.q_row;
      const auto* max = static_cast<const T*>(p.row_max.data) + offset;
      const auto* sum = static_cast<const T*>(p.row_sum.data) + offset;
      const T* glse = p.grad_lse ? row_address<const T>(p.grad_lse, b, h) + sequence.q_row : nullptr;
      for (int64_t i = 0; i < sequence.Lq; ++i) {
        const int64_t row = sequence.q_row + i;
        // A row that sees no key has no gradient, whatever comes in; with a sink its lse is the sink's logit.
        const bool only_sink = p.sinks && sum[i] == T(1) && max[i] == static_cast<T>(p.sinks[h]);
        T total = 0;
        if (p.Dv > 0 && sum[i] != T(0) && !only_sink) {
          copy_row_scaled<T>(p.grad_out, address(p.grad_out, p.batch_inner, b, h, row), p.Dv, T(1), go);
          copy_row_scaled<T>(p.out, address(p.out, p.batch_inner, b, h, row), p.Dv, T(1), out);
          for (int64_t d = 0; d < p.Dv; ++d) total += go[d] * out[d];
        }
        if (glse && sum[i] != T(0)) total -= glse[i];
        delta[offset + i] = total;
      }
    }
  });
}

// dsink_h = −Σ p_sink · delta: the sink is a key whose value is 0.
template <class T>
void compute_sink_gradients(const BackwardParams& p, const Parallel& parallel, const T* delta) {
  share_tasks(parallel, p.Hq, [&](auto&& next) {
    for (int64_t h; (h = next()) >= 0;) {
      double total = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        const Sequence sequence = sequence_of(p, b);
        const int64_t offset = b * p.row_max.stride_b + h * p.row_max.stride_h + sequence.q_row;
        const auto* max = static_cast<const T*>(p.row_max.data) + offset;
        const auto* sum = static_cast<const T*>(p.row_sum.data) + offset;
        for (int64_t i = 0; i < sequence.Lq; ++i) {
          if (sum[i] == T(0)) continue;
          total -= std::exp(p.sinks[h] - static_cast<double>(max[i])) / static_cast<double>(sum[i]) *
                   static_cast<double>(delta[offset + i]);
        }
      }
      p.dsinks[h] = total;
    }
  });
}

// The gradient of a bias that several scores share, in a pass of its own that recomputes ds: a task owns entries of the
// bias and adds up all that share them in a fixed order, so nothing is added by two threads. In fp64: a number may be the
// sum of all scores' gradients, which cancel in every row.
template <class Products>
void compute_bias_gradients(const BackwardParams& p, const Parallel& parallel, const typename Products::T* delta,
                            int n) {
  constexpr int64_t kKeys = kBackwardKeys, kRows = kBackwardRows;
  using Worker = BackwardWorker<Products>;
  const bool by_b0 = p.bias_varies[n][0], by_b1 = p.bias_varies[n][1];
  const bool by_h = p.bias_varies[n][2], by_i = p.bias_varies[n][3], by_j = p.bias_varies[n][4];
  const int64_t inner = p.batch_inner, own_b0s = by_b0 ? p.batch / inner : 1, own_b1s = by_b1 ? inner : 1;
  const int64_t heads = by_h ? p.Hq : 1;
  const int64_t row_blocks = ceil_div(p.Lq, kRows), key_blocks = ceil_div(p.Lk, kKeys);
  const int64_t own_rows = by_i ? row_blocks : 1, own_keys = by_j ? key_blocks : 1;
  const int64_t group = p.Hq / p.Hkv;
  share_tasks(parallel, own_b0s * own_b1s * heads * own_rows * own_keys, [&](auto&& next) {
    Worker worker(p, delta);
    std::vector<double> sums(static_cast<size_t>((by_i ? kRows : 1) * (by_j ? kKeys : 1)));
    for (int64_t task; (task = next()) >= 0;) {
      std::fill(sums.begin(), sums.end(), 0.0);
      const int64_t own_key = task % own_keys, own_row = task / own_keys % own_rows;
      const int64_t own_h = task / (own_keys * own_rows) % heads, own_b = task / (own_keys * own_rows * heads);
      const int64_t own_b0 = own_b / own_b1s, own_b1 = own_b % own_b1s;
      for (int64_t b = 0; b < p.batch; ++b) {
        if ((by_b0 && b / inner != own_b0) || (by_b1 && b % inner != own_b1)) continue;
        worker.begin_sequence(b);
        for (int64_t h = own_h; h < (by_h ? own_h + 1 : p.Hq); ++h) {
          for (int64_t kb = own_key; kb < (by_j ? own_key + 1 : key_blocks); ++kb) {
            typename Worker::Place at{b, h / group, h % group, 0, kb * kKeys};
            worker.begin_keys(at);
            for (int64_t rb = own_row; rb < (by_i ? own_row + 1 : row_blocks); ++rb) {
              at.row = rb * kRows;
              if (worker.compute_tile(at))
                worker.add_bias_gradients(sums.data(), by_i ? (by_j ? kKeys : 1) : 0, by_j ? 1 : 0);
            }
          }
        }
      }
      const int64_t row = own_row * kRows, key = own_key * kKeys;
      for (int64_t r = 0; r < (by_i ? std::min(kRows, p.Lq - row) : 1); ++r) {
        char* to = address(p.dbias[n], inner, own_b0 * inner + own_b1, own_h, by_i ? row + r : 0, by_j ? key : 0);
        store_row<double>(p.dbias[n], to, by_j ? std::min(kKeys, p.Lk - key) : 1, 1.0,
                          sums.data() + r * (by_j ? kKeys : 1));
      }
    }
  });
}

template <class Products>
void backward_of(const BackwardParams& p, const Parallel& parallel) {
  using Worker = BackwardWorker<Products>;
  using T = typename Products::T;
  using Place = typename Worker::Place;
  const BackwardPlan plan = plan_backward(p, parallel.run ? parallel.threads : 1);
  const Parallel threads{plan.threads, parallel.run};

  const int64_t stat_rows = p.cu_q ? p.Hq * p.cu_q[p.batch] : p.batch * p.Hq * p.Lq;
  const auto delta = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(stat_rows));
  compute_delta<T>(p, threads, delta.get());
  if (p.dsinks) compute_sink_gradients<T>(p, threads, delta.get());
  bool own_bias[kMaxBiases] = {};
  for (int n = 0; n < kMaxBiases; ++n) {
    if (!p.dbias[n]) continue;
    own_bias[n] = std::all_of(std::begin(p.bias_varies[n]), std::end(p.bias_varies[n]), [](bool x) { return x; });
    if (!own_bias[n]) compute_bias_gradients<Products>(p, threads, delta.get(), n);
  }
  if (!p.dq && !p.dk && !p.dv && !own_bias[0] && !own_bias[1]) return;

  // dq is summed in the output itself where that holds T in rows of whole vectors.
  constexpr DType same = sizeof(T) == 4 ? DType::float32 : DType::float64;
  const bool in_place = p.dq && p.dq.dtype == same && p.dq.stride_d == 1 && p.D % Vec<T>::N == 0;
  const int64_t unit_dq = p.Hq / p.Hkv * p.Lq * round_up_to(p.D, Vec<T>::N);
  const bool own_memory = p.dq && !in_place;
  std::unique_ptr<T[]> shared_dq;
  std::unique_ptr<std::atomic<int64_t>[]> progress;
  if (plan.wavefront) {
    if (own_memory) shared_dq = std::make_unique<T[]>(static_cast<size_t>(plan.units * unit_dq));
    progress = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(plan.tasks));
  }

  share_tasks(threads, plan.tasks, [&](auto&& next) {
    Worker worker(p, delta.get());
    std::vector<T> unit_memory;
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t unit = plan.wavefront ? task / plan.key_blocks : task;
      Place at{unit / p.Hkv, unit % p.Hkv, 0, 0, 0};
      worker.begin_sequence(at.b);
      T* dq_memory = nullptr;
      if (own_memory) {
        if (!plan.wavefront) unit_memory.assign(static_cast<size_t>(unit_dq), T(0));
        dq_memory = plan.wavefront ? shared_dq.get() + unit * unit_dq : unit_memory.data();
      }
      // A packed sequence may have fewer key blocks than the longest one.
      const int64_t key_blocks = ceil_div(worker.sequence().Lk, kBackwardKeys);
      const int64_t first = plan.wavefront ? task % plan.key_blocks : 0;
      const int64_t last = plan.wavefront ? std::min(first + 1, key_blocks) : key_blocks;
      for (int64_t kb = first; kb < last; ++kb) {
        at.key = kb * kBackwardKeys;
        worker.begin_keys(at);
        worker.clear_key_gradients();
        int64_t step = 0;
        for (at.g = 0; at.g < p.Hq / p.Hkv; ++at.g) {
          for (int64_t rb = 0; rb < worker.row_blocks(); ++rb, ++step) {
            at.row = rb * kBackwardRows;
            const bool seen = worker.compute_tile(at);
            if (seen) {
              for (int n = 0; n < kMaxBiases; ++n) {
                if (own_bias[n]) worker.store_bias_gradients(at, n);
              }
              worker.add_key_gradients();
            }
            if (!p.dq) continue;
            if (plan.wavefront && kb > 0) {
              const std::atomic<int64_t>& before = progress[static_cast<size_t>(task - 1)];
              for (int spins = 0; before.load(std::memory_order_acquire) <= step; ++spins) {
                if (spins > 256) std::this_thread::yield();
              }
            }
            const typename Worker::QueryGradients dq = worker.query_gradients(at, dq_memory);
            if (seen) worker.add_query_gradients(dq);
            if (kb == key_blocks - 1) worker.store_query_gradients(at, dq);
            if (plan.wavefront) progress[static_cast<size_t>(task)].store(step + 1, std::memory_order_release);
          }
        }
        worker.store_key_gradients(at);
      }
    }
  });
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
