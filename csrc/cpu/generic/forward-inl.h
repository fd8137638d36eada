// out = softmax(scores) · v, without ever holding the Lq × Lk matrix.
//
//   for each row:  m = −Inf, l = 0, acc = 0                         row max, sum, unnormalised output
//   for each block of 256 keys:
//     1. s = q · kᵀ                                                 register tile over d
//     2. x = finish_scores(s)                                       scale, cap, biases, masks
//     3. m' = max(m, max x); p = exp2((x − m')·c);                  vector loop, scores stay in L2
//        l = l·exp2((m − m')·c) + Σ p;  acc *= exp2((m − m')·c)     (skipped where m stands still: the factor is 1)
//     4. acc += p · v                                               register tile over keys
//   out = acc / l
//
// (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.)
//
// Memory traffic of one task of R rows: each block of k and v is read once and packed (k transposed), so a packed block
// serves R ≤ 384 rows. While one 16-column panel of it (4 KB at D = 64) sits in L1, strips of 6 rows (AVX2) pass by.
// 96 × 256 scores are 96 KB: with packed k, v and the rows of q and acc everything stays inside 512 KB of L2.
//
// Where a task has few rows (a token or two against a cache) each panel of k is used as soon as it is packed, or k and v
// are read as they lie (direct-inl.h): the block never goes through L2. There the memory sets the speed, and what comes next
// is asked for on the way (requests-inl.h). Rows of keys and values are looked up one by one in either case, so that they
// may lie anywhere in a cache.
//
// Rows of all query heads that share a key/value head are stacked: row r is head r / Lq, query r % Lq.
//
// Every 1024 keys (a segment) m, l, acc start afresh and are merged left to right, also where one thread does it all:
// so that segments can be computed by different threads when there are few rows, with the same bits.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class Products>
class ForwardWorker {
  using T = typename Products::T;
  using Left = typename Products::Left;
  using Right = typename Products::Right;
  using V = Vec<T>;
  static constexpr int N = V::N;
  static constexpr int64_t kPanelKeys = kPanel<T>;
  // Where products of pairs read k as it lies: rows at most, and keys at a time.
  static constexpr int64_t kDirectRows = 2 * N, kDirectKeys = 4 * N;
  // Where v is read as it lies, too: panels of its columns at a time. Their sums are 16 vectors for 4 rows.
  static constexpr int kSpreadPanels = 2;
  // Products have units of their own, which work while the vector units do.
  static constexpr bool kTilesRunBeside = Products::kPairs && Products::kKeysAsTheyLie;
  // Rows of a strip there. Its scores and weights, and those of the strip beside, are 53 KB: with twice the rows, as a
  // product would have it, they go through L2 (D = 64: 306 → 360 GFLOP/s, D = 128: 455 → 515; Sapphire Rapids, a thread).
  static constexpr int64_t kBesideRows = N;

 public:
  // Unnormalised rows: what one segment, or several merged ones, know of a row.
  struct Partial {
    T* max = nullptr;  // [rows]
    T* sum = nullptr;  // [rows]
    T* acc = nullptr;  // [rows][padded_dv]
  };

  ForwardWorker(const ForwardParams& p, const ForwardPlan& plan)
      : p_(p),
        plan_(plan),
        units_(p),
        padded_dv_(round_up_to(p.Dv, N)),
        bytes_(multiplies_bytes(p, plan.rows_per_task)),
        direct_keys_(reads_keys_as_they_lie(p, plan.rows_per_task)),
        by_panel_(direct_keys_ || (!kTilesRunBeside && plan.rows_per_task <= kRowBlock)),
        direct_(reads_values_as_they_lie(p, plan.rows_per_task)),
        packs_values_first_(Products::kPairs ? !by_panel_ : !direct_),
        scratch_(layout(nullptr)),
        requests_(plan.rows_per_task, row_bytes(p.k, p.D), row_bytes(p.v, p.Dv), scratch_.data()) {
    layout(scratch_.data());
  }

  static int64_t partial_size(const ForwardParams& p, int64_t rows) {
    return Products::padded_rows(rows) * (round_up_to(p.Dv, N) + 2);
  }

  static Partial partial_at(const ForwardParams& p, T* memory, int64_t rows) {
    const int64_t width = round_up_to(p.Dv, N), padded = Products::padded_rows(rows);
    return {memory + padded * width, memory + padded * (width + 1), memory};
  }

  // Rows [row_begin, row_end) of key/value head hkv of batch entry b, all keys, to the end.
  void compute_rows(int64_t b, int64_t hkv, int64_t row_begin, int64_t row_end) {
    if (!begin_rows(b, hkv, row_begin, row_end)) return;
    Partial total = first_, segment = second_;
    clear(total);
    const int64_t first = key_lo_ / kSegment, last = ceil_div(key_hi_, kSegment);
    for (int64_t s = first; s < last; ++s) {
      if (s == first) {
        compute_segment(s, total);
      } else {
        clear(segment);
        compute_segment(s, segment);
        merge(segment, total);
      }
    }
    finish(total);
  }

  // Whether so many rows and an int8 cache are multiplied as bytes: forward_bytes-inl.h.
  static bool multiplies_bytes(const ForwardParams& p, int64_t rows) {
    if constexpr (Products::kBytesAsTheyLie) {
      using Bytes = typename Products::Bytes;
      return p.k.dtype == DType::int8 && rows <= Bytes::kRows &&
             ceil_div(rows, Bytes::kGroup) * ceil_div(p.D, Bytes::kDepth) <= Bytes::kHeldTiles;
    }
    return false;
  }

  // The same rows, segments [begin, end) of keys, each into its partial: partials(s).
  template <class Partials>
  void compute_partials(int64_t b, int64_t hkv, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                        Partials&& partials) {
    if (!begin_rows(b, hkv, row_begin, row_end)) return;
    keys_end_ = std::min(key_hi_, end * kSegment);
    for (int64_t s = begin; s < end; ++s) {
      clear(partials(s));
      compute_segment(s, partials(s));
    }
  }

  // The same rows again, from their partials of all segments.
  template <class Partials>
  void merge_partials(int64_t b, int64_t hkv, int64_t row_begin, int64_t row_end, Partials&& partials) {
    if (!begin_rows(b, hkv, row_begin, row_end)) return;
    clear(first_);
    for (int64_t s = 0; s < plan_.segments; ++s) merge(partials(s), first_);
    finish(first_);
  }

 private:
  static bool reads_keys_as_they_lie(const ForwardParams& p, int64_t rows) {
    if constexpr (Products::kPairs) {
      return Products::kKeysAsTheyLie && rows <= kDirectRows &&
             (p.k.dtype == DType::bfloat16 || multiplies_bytes(p, rows));
    }
    return rows <= kDirectKeyRows && direct_keys_layout<T>(p.k, p.D);
  }

  static bool reads_values_as_they_lie(const ForwardParams& p, int64_t rows) {
    // More strips than one where nothing need be converted: that would be done again for each of them.
    const int64_t most = size_of(p.v.dtype) == sizeof(T) ? kRowBlock : kTileRows<T>;
    return !Products::kPairs && rows <= most && direct_layout<T>(p.v, p.Dv);
  }

  size_t layout(char* base) {
    Carver carve(base);
    const int64_t rows = Products::padded_rows(plan_.rows_per_task);
    const int64_t block_rows = kTilesRunBeside && !direct_keys_ ? 2 * kBesideRows : std::min(rows, kRowBlock);
    const int64_t keys = std::min(kKeyBlock, round_up_to(std::max<int64_t>(p_.Lk, 1), kPanelKeys));
    const int64_t panel_size = Products::right_rows(p_.D) * kPanelKeys;
    keys_capacity_ = keys;
    scores_stride_ = Products::kPairs ? keys + N : keys;
    row_ = carve.take<ScoreRow>(rows);
    q_ = carve.take<Left>(rows * Products::depth(p_.D));
    k_rows_ = carve.take<const char*>(keys + kPanelKeys);
    v_rows_ = carve.take<const char*>(keys + kPanelKeys);
    next_k_rows_ = carve.take<const char*>(by_panel_ ? keys + kPanelKeys : 0);
    next_v_rows_ = carve.take<const char*>(by_panel_ ? keys + kPanelKeys : 0);
    k_ = carve.take<Right>(direct_keys_ ? 0 : (by_panel_ ? 1 : ceil_div(keys, kPanelKeys)) * panel_size);
    v_ = carve.take<Right>(direct_ ? 0 : Products::right_rows(keys) * (packs_values_first_ ? padded_dv_ : kPanel<T>));
    if constexpr (Products::kPairs) {
      weights_ = carve.take<Left>(block_rows * weights_stride());
      turned_q_ = carve.take<Right>(direct_keys_ ? panel_size : 0);
      some_keys_ = carve.take<Left>(direct_keys_ ? kDirectKeys * Products::depth(p_.D) : 0);
      turned_scores_ = carve.take<T>(direct_keys_ ? kDirectKeys * N : 0);
      if constexpr (Products::kKeysAsTheyLie) {
        using Tile = typename Products::Tile;
        const bool spreads = direct_keys_ && !bytes_ && plan_.rows_per_task <= Tile::kSpreadRows;
        const int64_t size = spreads ? keys / Products::kDepth * 2 * Tile::kSpreadTile : 0;
        spread_weights_ = carve.take<Left>(size);
        if (base && size > 0)
          std::fill(spread_weights_, spread_weights_ + size, Left{0});  // no row lies in some of its rows
        spread_sums_ = carve.take<T>(spreads ? 2 * kSpreadPanels * Tile::kSpreadSums : 0);
      }
    }
    if constexpr (Products::kBytesAsTheyLie) layout_bytes(carve, base != nullptr);
    k_scales_ = carve.take<T>(p_.scales.k ? keys : 0);
    v_scales_ = carve.take<T>(p_.scales.k ? keys : 0);
    scores_ = carve.take<T>(block_rows * scores_stride_);
    first_ = {carve.take<T>(rows), carve.take<T>(rows), carve.take<T>(rows * padded_dv_)};
    const int64_t more = p_.Lk > kSegment ? rows : 0;
    second_ = {carve.take<T>(more), carve.take<T>(more), carve.take<T>(more * padded_dv_)};
    buffers_.numbers = carve.take<T>(keys);
    buffers_.bytes = carve.take<uint8_t>(keys);
    keep_ = carve.take<uint8_t>(keys + 8);
    hidden_ = carve.take<uint8_t>(block_rows * scores_stride_);
    return carve.used();
  }

  // Looks up the rows and packs their q. Returns whether there is anything to do.
  bool begin_rows(int64_t b, int64_t hkv, int64_t row_begin, int64_t row_end) {
    sequence_ = sequence_of(p_, b);
    hkv_ = hkv;
    const int64_t group = p_.Hq / p_.Hkv;
    row_end = std::min(row_end, group * sequence_.Lq);
    rows_ = row_end - row_begin;
    if (rows_ <= 0) return false;
    key_lo_ = std::numeric_limits<int64_t>::max();
    key_hi_ = 0;
    int64_t g = row_begin / sequence_.Lq, i = row_begin % sequence_.Lq;
    for (int64_t r = 0; r < rows_; ++r) {
      row_[r] = {b, hkv * group + g, i, visible_keys(p_, sequence_, i)};
      if (!row_[r].keys.empty()) {
        key_lo_ = std::min(key_lo_, row_[r].keys.lo);
        key_hi_ = std::max(key_hi_, row_[r].keys.hi);
      }
      Products::load_left(p_.q, address(p_.q, p_.batch_inner, b, row_[r].h, sequence_.q_row + i), p_.D, units_.q_factor,
                          q_ + r * Products::depth(p_.D));
      if (++i == sequence_.Lq) {
        i = 0;
        ++g;
      }
    }
    if (key_lo_ >= key_hi_) key_lo_ = key_hi_ = 0;
    keys_end_ = key_hi_;
    next_start_ = -1;
    if constexpr (Products::kPairs) {
      if (direct_keys_) turn_queries();
    }
    return true;
  }

  void clear(Partial t) {
    std::fill(t.max, t.max + rows_, -kInfinity<T>);
    std::fill(t.sum, t.sum + rows_, T(0));
    std::fill(t.acc, t.acc + rows_ * padded_dv_, T(0));
  }

  void compute_segment(int64_t segment, Partial t) {
    const int64_t lo = std::max(key_lo_, segment * kSegment), hi = std::min(key_hi_, (segment + 1) * kSegment);
    for (int64_t start = lo / kKeyBlock * kKeyBlock; start < hi; start += kKeyBlock) {
      const int64_t end = std::min(start + kKeyBlock, hi);
      if (padding_mask_hides_all(p_, sequence_.b, start, end - start)) continue;
      load_block(start, end);
      if constexpr (kTilesRunBeside) {
        if (!direct_keys_) {
          compute_strips(t);
          continue;
        }
      }
      for (int64_t r = 0; r < rows_; r += kRowBlock) compute_block(r, std::min(rows_, r + kRowBlock), t);
    }
  }

  // Looks up the rows of k and v of a block, and packs them where that pays.
  void load_block(int64_t start, int64_t end) {
    block_start_ = start;
    block_keys_ = end - start;
    find_rows_of_block(start, end);
    values_finite_ = true;
    if (!by_panel_) Products::pack_keys(p_.k, k_rows_, block_keys_, p_.D, k_);
    if (packs_values_first_ && p_.Dv > 0) {
      if constexpr (Products::kPairs) {
        for (int64_t column = 0; column < p_.Dv; column += kPanel<T>) {
          values_finite_ &= Products::pack_values(p_.v, v_rows_, block_keys_, p_.Dv, column, values_panel(column));
        }
      } else {
        values_finite_ = pack_rows<T>(p_.v, v_rows_, block_keys_, p_.Dv, keys_capacity_, v_);
      }
    }
    if (p_.scales.k) load_scales();
  }

  // Where each key's row lies. Keys that no row of this task may see are not touched: they may have been overwritten in
  // a ring, or lie in a page that was given back. A row that is seen stands in for them.
  void find_rows(const TensorView& view, int64_t start, int64_t end, const char** rows) const {
    const int64_t first = std::max(start, key_lo_);
    cache_rows(p_.layout, view, p_.batch_inner, sequence_.b, hkv_, sequence_.k_row + first, sequence_.k_row + end,
               rows + (first - start));
    std::fill(rows, rows + (first - start), rows[first - start]);
    std::fill(rows + (end - start), rows + round_up_to(end - start + 1, N), rows[end - start - 1]);
  }

  // Those of k and v for keys [start, end); where memory sets the speed, those of the next block as well, so that they can
  // be asked for.
  void find_rows_of_block(int64_t start, int64_t end) {
    const auto find = [&](int64_t from, int64_t to, const char** k, const char** v) {
      find_rows(p_.k, from, to, k);
      if (p_.Dv > 0) find_rows(p_.v, from, to, v);
    };
    const auto announced = [&](const TensorView& view, int64_t width, int64_t count, const char** rows) {
      return BlockRows{rows, count, row_bytes(view, width)};
    };
    if (!by_panel_) return find(start, end, k_rows_, v_rows_);
    if (start == next_start_) {
      std::swap(k_rows_, next_k_rows_);
      std::swap(v_rows_, next_v_rows_);
      requests_.advance();
    } else {
      find(start, end, k_rows_, v_rows_);
      requests_.begin(announced(p_.k, p_.D, end - start, k_rows_), announced(p_.v, p_.Dv, end - start, v_rows_),
                      end >= keys_end_);
    }
    if (end >= keys_end_) return;
    next_start_ = end;
    const int64_t next_end = std::min(end + kKeyBlock, keys_end_);
    find(end, next_end, next_k_rows_, next_v_rows_);
    requests_.announce(announced(p_.k, p_.D, next_end - end, next_k_rows_),
                       announced(p_.v, p_.Dv, next_end - end, next_v_rows_));
  }

  // Of a row in memory; 0 where it is no stretch of it.
  static int64_t row_bytes(const TensorView& view, int64_t width) {
    return view.stride_d == 1 || width == 1 ? width * size_of(view.dtype) : 0;
  }

  void load_scales() {
    find_scales(p_.scales.k, k_scales_);
    find_scales(p_.scales.v, v_scales_);
    FiniteCheck<T> check;
    for (int64_t j = 0; j < keys_capacity_; j += N) check.see(V::load(v_scales_ + j), V::zero());
    values_finite_ = check.all_finite();
  }

  // As find_rows, and read at once; zeros behind the block.
  void find_scales(const TensorView& view, T* scales) {
    const int64_t first = std::max(block_start_, key_lo_), skipped = first - block_start_;
    for_each_run(p_.layout, view, p_.batch_inner, sequence_.b, hkv_, first, block_start_ + block_keys_,
                 [&](int64_t j, int64_t count, const char* row) {
                   copy_row<T>(reinterpret_cast<const float*>(row), view.stride_l, count, scales + (j - block_start_));
                 });
    std::fill(scales, scales + skipped, scales[skipped]);
    std::fill(scales + block_keys_, scales + keys_capacity_, T(0));
  }

  // At most MR rows, and the panels of the packed block that hold every key that one of them may see.
  struct Strip {
    int64_t row_begin = 0, row_end = 0;
    int64_t panel_begin = 0, panel_end = 0;
    bool all_visible = true;  // every row sees all of them by position

    int64_t rows() const { return row_end - row_begin; }
    bool empty() const { return panel_begin >= panel_end; }
  };
  using Strips = std::span<const Strip>;

  Strip strip_of(int64_t row_begin, int64_t row_end) const {
    int64_t lo = block_keys_, hi = 0, lo_max = 0, hi_min = block_keys_;
    for (int64_t r = row_begin; r < row_end; ++r) {
      const KeyRange keys = row_[r].keys;
      const int64_t from = std::clamp<int64_t>(keys.lo - block_start_, 0, block_keys_);
      const int64_t to = std::clamp<int64_t>(keys.hi - block_start_, 0, block_keys_);
      lo_max = std::max(lo_max, from);
      hi_min = std::min(hi_min, to);
      if (from < to) {
        lo = std::min(lo, from);
        hi = std::max(hi, to);
      }
    }
    if (lo >= hi) return {row_begin, row_end};
    Strip strip{row_begin, row_end, lo / kPanelKeys, ceil_div(hi, kPanelKeys), false};
    strip.all_visible = lo_max <= strip.panel_begin * kPanelKeys && hi_min >= padded_keys(strip.panel_end);
    return strip;
  }

  int64_t padded_keys(int64_t panel_end) const { return std::min(panel_end * kPanelKeys, round_up_to(block_keys_, N)); }

  void compute_block(int64_t row_begin, int64_t row_end, Partial t) {
    const int64_t ld = scores_stride_;
    std::array<Strip, ceil_div(kRowBlock, Products::kRows)> memory;
    const int64_t rows = row_end - row_begin, count = ceil_div(rows, Products::kRows);
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Strip strip = strip_of(row_begin + Products::strip_begin(rows, count, i),
                                   row_begin + Products::strip_begin(rows, count, i + 1));
      memory[i] = strip;
      if (strip.empty()) continue;
      first = std::min(first, strip.panel_begin);
      last = std::max(last, strip.panel_end);
    }
    if (first >= last) return;
    const Strips strips(memory.data(), count);

    // 1. s = q · kᵀ
    if (!direct_keys_) {
      multiply_packed_keys(strips, first, last);
    } else if constexpr (Products::kPairs) {
      if constexpr (Products::kKeysAsTheyLie) {
        multiply_keys_as_they_lie(rows, first * kPanelKeys, std::min(last * kPanelKeys, block_keys_));
      }
    } else {
      direct_keys<T>(p_.k.dtype, rows, p_.D, q_ + row_begin * p_.D, k_rows_, first * kPanelKeys,
                     std::min(last * kPanelKeys, block_keys_), scores_, ld, requests_);
    }

    // 2. and 3. row by row
    bool exclude_hidden = p_.Dv > 0 && !values_finite_;
    for (const Strip& strip : strips) {
      if (strip.empty()) continue;
      const Stretch s{block_start_, block_start_ + strip.panel_begin * kPanelKeys,
                      block_start_ + padded_keys(strip.panel_end), block_start_ + block_keys_};
      const bool plain = strip.all_visible && !units_.scaled && !p_.mask;
      for (int64_t i = strip.row_begin; i < strip.row_end; ++i) {
        T* x = scores_ + (i - row_begin) * ld;
        uint8_t* hidden = hidden_ + (i - row_begin) * ld;
        if (p_.scales.k) scale_row(s, k_scales_, x);
        if (!plain) finish_scores<T>(p_, units_, sequence_, row_[i], s, buffers_, x);
        if (!packs_values_first_ && p_.Dv > 0 && !exclude_hidden && hides_bad_value(s, x)) {
          exclude_hidden = true;
          // The rows before hid no key that they reach, or no bad value.
          for (int64_t before = row_begin; before < i; ++before) {
            std::memset(hidden_ + (before - row_begin) * ld, 0, static_cast<size_t>(ld));
          }
        }
        if (exclude_hidden) {
          for (int64_t j = s.from - s.start; j < s.to - s.start; ++j) hidden[j] = x[j] == -kInfinity<T>;
        }
        softmax_row(i, s, x, t);
        if (p_.scales.k) scale_weights(s, exclude_hidden ? hidden : nullptr, x);
      }
    }

    // 4. acc += p · v
    if (p_.Dv == 0) return;
    if constexpr (Products::kPairs) {
      multiply_pairs_of_values(strips, exclude_hidden, t);
    } else if (exclude_hidden) {
      accumulate_visible(strips, t);
    } else if (direct_) {
      multiply_values_as_they_lie(strips, first * kPanelKeys, std::min(last * kPanelKeys, block_keys_), t);
    } else {
      multiply_values(strips, t);
    }
  }

  // s = q · kᵀ, panel by panel.
  void multiply_packed_keys(Strips strips, int64_t first_panel, int64_t last_panel) {
    const int64_t depth = Products::depth(p_.D), panel_size = Products::right_rows(p_.D) * kPanelKeys;
    const int64_t ld = scores_stride_, count = static_cast<int64_t>(strips.size());
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const int vecs = padded_keys(panel + 1) - panel * kPanelKeys > N ? kTileVecs : 1;
      const Right* k = k_ + (by_panel_ ? 0 : panel * panel_size);
      const int64_t keys = std::min(kPanelKeys, block_keys_ - panel * kPanelKeys);
      if (by_panel_) Products::pack_keys(p_.k, k_rows_ + panel * kPanelKeys, keys, p_.D, k_);
      for (const Strip& strip : strips) {
        if (panel < strip.panel_begin || panel >= strip.panel_end) continue;
        const auto multiply_strip = [&](auto... ahead) {
          Products::template multiply<Start::zero>(
              strip.rows(), vecs, depth, q_ + strip.row_begin * depth, depth, k, vecs * N,
              scores_ + (strip.row_begin - strips[0].row_begin) * ld + panel * kPanelKeys, ld, ahead...);
        };
        if (by_panel_) {
          multiply_strip(requests_.beside<kPanelKeys * sizeof(Right)>(Products::right_rows(p_.D), count));
        } else {
          multiply_strip();
        }
      }
    }
  }

  // Of products of pairs: forward_pairs-inl.h.
  void compute_strips(Partial t);
  void weigh_row(const Strip& strip, int64_t r, int64_t half, bool exclude_hidden, Partial t);
  void multiply_panel(const Strip& strip, int64_t panel, int64_t half);
  void multiply_values_panel(const Strip& strip, int64_t column, int64_t half, Partial t);
  struct SomeKeys {
    const Left* first;
    int64_t stride;
  };
  SomeKeys keys_as_they_lie(int64_t j, int64_t count, int64_t most);
  void multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to);
  template <class Sums, int tiles>
  void multiply_keys_as_they_lie(int64_t rows, int64_t from, int64_t to);
  template <int steps>
  void multiply_keys_by_held_queries(int64_t rows, int64_t from, int64_t to);
  void turn_scores(const T* turned, int64_t stride, int64_t rows, int64_t j);
  void turn_queries();
  void multiply_pairs_of_values(Strips strips, bool exclude_hidden, Partial t);
  void multiply_values_while_packing(const Strip& strip, int64_t from, int64_t to, int64_t column, bool exclude_hidden,
                                     Partial t);
  void multiply_few_rows_with_values(const Strip& strip, bool exclude_hidden, Partial t);
  void spread_weights(const Strip& strip, int64_t from, int64_t to);
  template <int R, int panels>
  bool multiply_spread_weights(const Strip& strip, int64_t from, int64_t to, int64_t column, Partial t);
  void add_visible_specials(const Strip& strip, int64_t first, Partial t);

  // Of int8 caches as bytes: forward_bytes-inl.h.
  struct SomeBytes {
    const int8_t* first;
    int64_t stride;
  };
  void layout_bytes(Carver& carve, bool exists);
  void split_queries();
  SomeBytes bytes_as_they_lie(const TensorView& view, const char* const* rows, int64_t count, int64_t width);
  template <int steps, int groups>
  void multiply_keys_of_bytes(int64_t rows, int64_t from, int64_t to);
  void multiply_keys_of_bytes(int64_t rows, int64_t from, int64_t to);
  void multiply_values_of_bytes(const Strip& strip, Partial t);
  template <int panels, int groups>
  void multiply_values_of_bytes(const Strip& strip, int64_t column, Partial t);
  static void add_sums_of_bytes(const int32_t* sums, T unit, int64_t columns, T* acc);

  // As scores_stride_.
  int64_t weights_stride() const { return keys_capacity_ + kPanelKeys; }

  Right* values_panel(int64_t column) const {
    return v_ + (packs_values_first_ ? column * Products::right_rows(keys_capacity_) : 0);
  }

  // acc += weights · v for keys [from, to) of the block, v as it lies.
  void multiply_values_as_they_lie(Strips strips, int64_t from, int64_t to, Partial t) {
    const int64_t ld = scores_stride_, first_row = strips[0].row_begin;
    const int64_t count = static_cast<int64_t>(strips.size());
    for_some_values<T>(p_.v.dtype, v_rows_, from, to, [&](auto v, int64_t j) {
      for (const Strip& strip : strips) {
        auto seen = v;
        const int64_t begin = std::max(j, strip.panel_begin * kPanelKeys);
        seen.count = std::min(j + v.count, strip.panel_end * kPanelKeys) - begin;
        if (seen.count <= 0) continue;
        seen.first += (begin - j) * v.stride;
        direct_values<T>(strip.rows(), p_.Dv, scores_ + (strip.row_begin - first_row) * ld + begin, ld, seen, count,
                         t.acc + strip.row_begin * padded_dv_, requests_);
      }
    });
  }

  void multiply_values(Strips strips, Partial t) {
    const int64_t ld = scores_stride_, count = static_cast<int64_t>(strips.size());
    for (int64_t column = 0; column < padded_dv_; column += kPanel<T>) {
      const int vecs = padded_dv_ - column > N ? kTileVecs : 1;
      const T* v = v_ + column * keys_capacity_;
      for (const Strip& strip : strips) {
        const int64_t from = strip.panel_begin * kPanelKeys;
        const int64_t to = std::min(strip.panel_end * kPanelKeys, block_keys_);
        if (from >= to) continue;
        const auto multiply_strip = [&](auto... ahead) {
          multiply<T, Start::from_c, Along::k>(
              strip.rows(), vecs, to - from, scores_ + (strip.row_begin - strips[0].row_begin) * ld + from, ld,
              v + from * vecs * N, vecs * N, t.acc + strip.row_begin * padded_dv_ + column, padded_dv_, ahead...);
        };
        if (by_panel_) {
          multiply_strip(requests_.beside<kPanel<T> * sizeof(T)>(to - from, count));
        } else {
          multiply_strip();
        }
      }
    }
  }

  // x *= scales of an int8 cache.
  static void scale_row(const Stretch& s, const T* scales, T* x) {
    for (int64_t j = s.from - s.start; j < s.to - s.start; j += N) (V::load(x + j) * V::load(scales + j)).store(x + j);
  }

  // x *= v's scales for the weights of a row. A hidden key's stays 0, whose scale may be NaN; hidden: null where all are seen.
  void scale_weights(const Stretch& s, const uint8_t* hidden, T* x) const {
    scale_row(s, v_scales_, x);
    if (!hidden) return;
    for (int64_t j = s.from - s.start; j < s.to - s.start; ++j) x[j] = hidden[j] ? T(0) : x[j];
  }

  // Whether a key of a block that was not packed is hidden from this row, and the block's values hold NaN or Inf.
  bool hides_bad_value(const Stretch& s, const T* x) const {
    const int64_t from = s.from - s.start, to = std::min(s.to, s.end) - s.start;
    V hidden = V::zero();  // per lane, the number of keys
    for (int64_t j = from; j < s.to - s.start; j += N) {
      hidden = hidden + V::select(V::equal(V::load(x + j), V::broadcast(-kInfinity<T>)), V::broadcast(T(1)), V::zero());
    }
    return hidden.sum() > static_cast<T>(s.to - s.start - to) &&
           !direct_values_finite<T>(p_.v, p_.Dv, v_rows_, from, to);
  }

  // Turns the scores of one row into unnormalised weights, in place or into `narrowed`, and moves the row's max, sum and
  // acc along.
  void softmax_row(int64_t r, const Stretch& s, T* x, Partial t, Left* narrowed = nullptr) {
    const int64_t from = s.from - s.start, to = s.to - s.start;
    const T block_max = row_max(x, from, to);
    const T before = t.max[r], now = std::max(before, block_max);
    t.max[r] = now;
    const T offset = now == -kInfinity<T> ? T(0) : now;  // nothing seen yet: −Inf − (−Inf) would be NaN
    const V m = V::broadcast(offset), c = V::broadcast(units_.c);
    V sums = V::zero();
    const auto weight_of = [&](int64_t j) __attribute__((always_inline)) {
      const V weight = exp2_nonpositive<T>((V::load(x + j) - m) * c);
      sums = sums + weight;
      return weight;
    };
    int64_t j = from;
    if constexpr (Products::kPairs) {
      if (narrowed) {
        for (; j + 2 * N <= to; j += 2 * N) {
          const V first = weight_of(j), second = weight_of(j + N);
          Products::narrow(first, second, narrowed + j);
        }
        if (j < to) Products::narrow(weight_of(j), V::zero(), narrowed + j);
        j = to;
      }
    }
    if (by_panel_ && j < to) {
      const auto ahead = requests_.template beside_softmax<N>((to - from) / N);
      for (int64_t step = 0; j < to; j += N, ++step) {
        weight_of(j).store(x + j);
        ahead.ask(step);
      }
    }
    for (; j < to; j += N) weight_of(j).store(x + j);
    if (now != before) {
      const T factor = exp2_nonpositive<T>((before - now) * units_.c);
      t.sum[r] *= factor;
      T* acc = t.acc + r * padded_dv_;
      for (int64_t d = 0; d < padded_dv_; d += N) (V::load(acc + d) * V::broadcast(factor)).store(acc + d);
    }
    t.sum[r] += sums.sum();
    if (p_.dropout) drop(r, s, x);
  }

  // The largest score; NaNs are passed over here and come back through the weights.
  static T row_max(const T* x, int64_t from, int64_t to) {
    V a = V::broadcast(-kInfinity<T>), b = a, c = a, d = a;
    int64_t j = from;
    for (; j + 4 * N <= to; j += 4 * N) {
      a = V::max(V::load(x + j), a);
      b = V::max(V::load(x + j + N), b);
      c = V::max(V::load(x + j + 2 * N), c);
      d = V::max(V::load(x + j + 3 * N), d);
    }
    for (; j < to; j += N) a = V::max(V::load(x + j), a);
    return V::max(V::max(a, b), V::max(c, d)).largest();
  }

  void drop(int64_t r, const Stretch& s, T* x) {
    const int64_t first = s.from / 8 * 8;  // random bits come for eight keys at a time
    dropout_keep(p_.dropout_seed, p_.dropout_threshold, row_[r].b, row_[r].h, row_[r].i, first, s.to - first, keep_);
    const V scale = V::broadcast(static_cast<T>(p_.dropout_scale));
    for (int64_t j = s.from; j < s.to; j += N) {
      T* at = x + (j - s.start);
      V::select(V::nonzero_bytes(keep_ + (j - first)), V::load(at) * scale, V::zero()).store(at);
    }
  }

  // Step 4 where v holds NaN or Inf: a hidden key's weight 0 times its NaN must not reach the row. The same chain of
  // multiply-adds for every element, minus the hidden keys (whose products are zeros elsewhere).
  void accumulate_visible(Strips strips, Partial t) {
    for (const Strip& strip : strips) {
      const int64_t from = strip.panel_begin * kPanelKeys;
      const int64_t to = std::min(strip.panel_end * kPanelKeys, block_keys_);
      for (int64_t r = strip.row_begin; r < strip.row_end; ++r) {
        const int64_t at = (r - strips[0].row_begin) * scores_stride_;
        accumulate_visible_row(from, to, scores_ + at, hidden_ + at, t.acc + r * padded_dv_);
      }
    }
  }

  void accumulate_visible_row(int64_t from, int64_t to, const T* weights, const uint8_t* hidden, T* sums) {
    for (int64_t column = 0; column < padded_dv_; column += N) {
      const int64_t panel = column / kPanel<T> * kPanel<T>;
      const int64_t width = padded_dv_ - panel > N ? kPanel<T> : N;
      const T* v = v_ + panel * keys_capacity_ + (column - panel);
      const auto value = [&](int64_t j) {
        return direct_ ? direct_value<T>(p_.v.dtype, v_rows_[j], column) : V::load(v + j * width);
      };
      V acc = V::load(sums + column);
      for (int64_t j = from; j < to; ++j) {
        if (!hidden[j]) acc = V::fma(V::broadcast(weights[j]), value(j), acc);
      }
      acc.store(sums + column);
    }
  }

  // total = total merged with the next segment to its right.
  void merge(const Partial& next, Partial total) {
    for (int64_t r = 0; r < rows_; ++r) {
      const T now = std::max(total.max[r], next.max[r]);
      const T a = total.max[r] == now ? T(1) : exp2_nonpositive<T>((total.max[r] - now) * units_.c);
      const T b = next.max[r] == now ? T(1) : exp2_nonpositive<T>((next.max[r] - now) * units_.c);
      total.max[r] = now;
      total.sum[r] = total.sum[r] * a + next.sum[r] * b;
      const V va = V::broadcast(a), vb = V::broadcast(b);
      T* acc = total.acc + r * padded_dv_;
      const T* add = next.acc + r * padded_dv_;
      for (int64_t d = 0; d < padded_dv_; d += N) V::fma(V::load(add + d), vb, V::load(acc + d) * va).store(acc + d);
    }
  }

  // Adds the sink, divides by the sum, stores the rows and their statistics.
  void finish(Partial t) {
    for (int64_t r = 0; r < rows_; ++r) {
      const ScoreRow& row = row_[r];
      T* acc = t.acc + r * padded_dv_;
      T max = t.max[r], sum = t.sum[r];
      const T sink = p_.sinks ? static_cast<T>(p_.sinks[row.h]) : -kInfinity<T>;
      T factor = 1;
      if (sink != -kInfinity<T>) {
        const T now = std::max(max, sink);
        factor = max == now ? T(1) : exp2_nonpositive<T>((max - now) * units_.c);
        sum = sum * factor + (sink == now ? T(1) : exp2_nonpositive<T>((sink - now) * units_.c));
        max = now;
      }
      // A row without a key stays 0 whatever its sink, a NaN included.
      const T inverse = t.sum[r] == T(0) ? T(0) : T(1) / sum;
      if (p_.Dv > 0) {
        store_row<T>(p_.out, address(p_.out, p_.batch_inner, row.b, row.h, sequence_.q_row + row.i), p_.Dv,
                     inverse == T(0) ? T(0) : factor * inverse, acc);
      }
      const int64_t at = sequence_.q_row + row.i;
      if (p_.row_max) row_address<T>(p_.row_max, row.b, row.h)[at] = max;
      if (p_.row_sum) row_address<T>(p_.row_sum, row.b, row.h)[at] = sum;
      if (p_.lse) {
        row_address<T>(p_.lse, row.b, row.h)[at] =
            sum == T(0) ? -kInfinity<T> : static_cast<T>(max * units_.unit + std::log(sum));
      }
    }
  }

  const ForwardParams& p_;
  const ForwardPlan& plan_;
  const ScoreUnits<T> units_;
  const int64_t padded_dv_;
  const bool bytes_;               // an int8 cache is multiplied as bytes
  const bool direct_keys_;         // k is read as it lies
  const bool by_panel_;            // or it is packed a panel at a time, when its turn comes
  const bool direct_;              // v is
  const bool packs_values_first_;  // all of a block's v is packed before the block's turn comes
  int64_t keys_capacity_ = 0;
  int64_t scores_stride_ = 0;  // a power of two between rows would put a tile's rows into few sets of L1

  ScoreRow* row_ = nullptr;  // [rows]
  Left* q_ = nullptr;        // [rows][D]
  const char** k_rows_ = nullptr;
  const char** v_rows_ = nullptr;       // [keys] the block's rows as they lie
  const char** next_k_rows_ = nullptr;  // those of the block that starts at next_start_
  const char** next_v_rows_ = nullptr;
  Right* k_ = nullptr;  // panels of kPanelKeys keys: [panel][D][keys]
  Right* v_ = nullptr;  // panels of kPanel columns: [panel][keys][columns]
  T* k_scales_ = nullptr;
  T* v_scales_ = nullptr;  // [keys]
  T* scores_ = nullptr;    // [kRowBlock][scores_stride_]
  Partial first_, second_;
  RowBuffers<T> buffers_;
  uint8_t* keep_ = nullptr;    // [keys]
  uint8_t* hidden_ = nullptr;  // [kRowBlock][keys]
  // Of products of pairs only: the weights, rounded; and where k is read as it lies, q turned, keys that do not lie
  // evenly, and the scores before they are turned.
  Left* weights_ = nullptr;          // [kRowBlock][weights_stride()]
  Right* turned_q_ = nullptr;        // [D][kPanelKeys]
  Left* some_keys_ = nullptr;        // [kDirectKeys][D]
  Left* spread_weights_ = nullptr;   // [keys / 32][2 tiles][2 · kSpreadRows][32]
  T* spread_sums_ = nullptr;         // [2][kSpreadPanels][2 · kSpreadRows][N]
  int8_t* digit_q_ = nullptr;        // [kHeldTiles][16][64]
  int8_t* digit_weights_ = nullptr;  // [2][2 groups][3 digits][16][64]
  int8_t* some_bytes_ = nullptr;     // [16][D or Dv]
  int32_t* digit_sums_ = nullptr;    // [6][16][16]
  T* q_units_ = nullptr;             // [kRows]: what a digit of 1 stands for; NaN for a row without digits
  T* largest_weights_ = nullptr;     // [kRows], likewise
  T* turned_scores_ = nullptr;       // [kDirectKeys][N], or half the keys and twice the rows

  Scratch scratch_;
  Requests requests_;
  [[no_unique_address]] typename Products::Session session_;

  // The rows being worked on.
  Sequence sequence_;
  int64_t hkv_ = 0, rows_ = 0;
  int64_t key_lo_ = 0, key_hi_ = 0;  // keys that any of them may see
  int64_t keys_end_ = 0;             // those of this task end here
  // The packed block.
  int64_t block_start_ = 0, block_keys_ = 0;
  int64_t next_start_ = -1;
  bool values_finite_ = true;
};

template <class Products>
void forward_of(const ForwardParams& p, const Parallel& parallel) {
  const ForwardPlan plan = plan_forward(p, parallel.run ? parallel.threads : 1);
  using Worker = ForwardWorker<Products>;
  using T = typename Products::T;
  const Parallel threads{plan.threads, parallel.run};

  // Long rows first: with causal masks later rows see more keys.
  struct Place {
    int64_t b, hkv, row_begin, row_end, row_task;
  };
  const auto place_of = [&](int64_t unit, int64_t row_task) -> Place {
    row_task = plan.row_tasks - 1 - row_task;
    return {unit / p.Hkv, unit % p.Hkv, row_task * plan.rows_per_task, (row_task + 1) * plan.rows_per_task, row_task};
  };

  if (plan.segments == 1) {
    share_tasks(threads, ceil_div(plan.tasks, plan.tasks_per_grab), [&](auto&& next) {
      Worker worker(p, plan);
      for (int64_t grab; (grab = next()) >= 0;) {
        const int64_t end = std::min(plan.tasks, (grab + 1) * plan.tasks_per_grab);
        for (int64_t task = grab * plan.tasks_per_grab; task < end; ++task) {
          const Place at = place_of(task / plan.row_tasks, task % plan.row_tasks);
          worker.compute_rows(at.b, at.hkv, at.row_begin, at.row_end);
        }
      }
    });
    return;
  }

  // Segments of keys are tasks too. Whoever ends the last one of some rows merges theirs.
  const int64_t key_tasks = plan.key_tasks(), row_tasks = plan.tasks / key_tasks;
  const int64_t partial_size = Worker::partial_size(p, plan.rows_per_task);
  const auto memory =
      std::make_unique_for_overwrite<T[]>(static_cast<size_t>(row_tasks * plan.segments * partial_size));
  const auto open_tasks = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(row_tasks));
  for (int64_t n = 0; n < row_tasks; ++n) open_tasks[static_cast<size_t>(n)] = key_tasks;
  share_tasks(threads, ceil_div(plan.tasks, plan.tasks_per_grab), [&](auto&& next) {
    Worker worker(p, plan);
    for (int64_t grab; (grab = next()) >= 0;) {
      const int64_t end = std::min(plan.tasks, (grab + 1) * plan.tasks_per_grab);
      for (int64_t task = grab * plan.tasks_per_grab; task < end; ++task) {
        const int64_t rows = task / key_tasks, begin = task % key_tasks * plan.segments_per_task;
        const Place at = place_of(rows / plan.row_tasks, rows % plan.row_tasks);
        const auto partials = [&](int64_t segment) {
          T* partial = memory.get() + (rows * plan.segments + segment) * partial_size;
          return Worker::partial_at(p, partial, plan.rows_per_task);
        };
        worker.compute_partials(at.b, at.hkv, at.row_begin, at.row_end, begin,
                                std::min(begin + plan.segments_per_task, plan.segments), partials);
        if (open_tasks[static_cast<size_t>(rows)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
          worker.merge_partials(at.b, at.hkv, at.row_begin, at.row_end, partials);
        }
      }
    }
  });
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
