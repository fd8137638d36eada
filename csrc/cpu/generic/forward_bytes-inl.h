// What the forward pass does otherwise where few rows read an int8 cache and the ISA multiplies tiles of bytes: nothing of
// the cache is converted, packed or turned.
//
// A number of q, and a weight, becomes a whole one of 23 bits in units of its row (its block of keys) and that three
// digits of 8 bits. Each digit has a column (rows) of its own in the tiles, most of which would be idle with few rows:
//
//   scores   16 keys as they lie × 64 features  ·  columns of q's digits: 4 rows × 3
//   out      4 rows × 4 places × 64 bytes of a digit's weights  ·  16 keys × 64 features as they lie. Four neighbouring
//            features are one word there: a weight stands at one place of a word of zeros, and makes that feature.
//
// The sums are whole numbers, exact in any order. Rounding q and the weights to 2^-23 of the largest is less than what
// fp32 sums lose. A row of q or of weights that holds NaN or Inf has no digits: it is multiplied number by number.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class Products>
void ForwardWorker<Products>::layout_bytes(Carver& carve, bool exists) {
  using Bytes = typename Products::Bytes;
  const int64_t width = round_up_to(std::max(p_.D, p_.Dv), Bytes::kDepth);
  const int64_t weights = bytes_ ? 2 * 2 * Bytes::kDigits * Bytes::kTileBytes : 0;
  digit_q_ = carve.take<int8_t>(bytes_ ? Bytes::kHeldTiles * Bytes::kTileBytes : 0);
  digit_weights_ = carve.take<int8_t>(weights);
  some_bytes_ = carve.take<int8_t>(bytes_ ? Bytes::kKeys * width : 0);
  digit_sums_ = carve.take<int32_t>(bytes_ ? 6 * Bytes::kTileSums : 0);
  q_units_ = carve.take<T>(bytes_ ? Bytes::kRows : 0);
  largest_weights_ = carve.take<T>(bytes_ ? Bytes::kRows : 0);
  if (exists) std::fill(digit_weights_, digit_weights_ + weights, int8_t{0});  // no row lies in some of its rows
}

// q's digits as tiles: tile group · steps + step holds 64 features, 4 to a word, of columns digit · 4 + row.
template <class Products>
void ForwardWorker<Products>::split_queries() {
  using Bytes = typename Products::Bytes;
  const int64_t depth = Products::depth(p_.D), steps = ceil_div(p_.D, Bytes::kDepth);
  alignas(kCacheLine) int8_t columns[N][Bytes::kDepth];
  alignas(kCacheLine) T numbers[Bytes::kHeldTiles * Bytes::kDepth];
  typename Bytes::Unit units[Bytes::kRows];
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t d = 0; d < depth; d += N) V::load(q_ + r * depth + d).store(numbers + d);
    const T largest = largest_magnitude(numbers, depth);
    units[r] = Bytes::unit_for(largest);
    q_units_[r] = std::isfinite(largest) ? units[r].to_number : largest;
  }
  for (int64_t group = 0; group < ceil_div(rows_, Bytes::kGroup); ++group) {
    const int64_t first = group * Bytes::kGroup, count = std::min<int64_t>(Bytes::kGroup, rows_ - first);
    for (int64_t step = 0; step < steps; ++step) {
      std::memset(columns, 0, sizeof columns);
      for (int64_t r = first; r < first + count; ++r) {
        if (!std::isfinite(q_units_[r])) continue;
        for (int64_t d = step * Bytes::kDepth; d < std::min(depth, (step + 1) * Bytes::kDepth); d += N) {
          Bytes::split_numbers(units[r].whole_numbers(V::load(q_ + r * depth + d)),
                               columns[r - first] + d % Bytes::kDepth, Bytes::kGroup * Bytes::kDepth);
        }
      }
      V words[N];
      V::load_transposed([&](int n) { return reinterpret_cast<const float*>(columns[n]); }, words);
      int8_t* tile = digit_q_ + (group * steps + step) * Bytes::kTileBytes;
      for (int k = 0; k < N; ++k) words[k].store(reinterpret_cast<float*>(tile + k * 64));
    }
  }
}

// Up to 16 rows of k or v: their bytes, and zeros up to the next multiple of 64 features and of 16 rows.
template <class Products>
auto ForwardWorker<Products>::bytes_as_they_lie(const TensorView& view, const char* const* rows, int64_t count,
                                                int64_t width) -> SomeBytes {
  using Bytes = typename Products::Bytes;
  const int64_t padded = round_up_to(width, Bytes::kDepth);
  if (view.stride_d == 1 && width == padded && count == Bytes::kKeys && evenly_apart(rows, count)) {
    return {reinterpret_cast<const int8_t*>(rows[0]), rows[1] - rows[0]};
  }
  for (int64_t r = 0; r < Bytes::kKeys; ++r) {
    int8_t* to = some_bytes_ + r * padded;
    const auto* from = reinterpret_cast<const int8_t*>(r < count ? rows[r] : nullptr);
    if (from && view.stride_d == 1) {
      std::memcpy(to, from, static_cast<size_t>(width));
    } else {
      for (int64_t d = 0; d < width; ++d) to[d] = from ? from[d * view.stride_d] : int8_t{0};
    }
    std::fill(to + width, to + padded, int8_t{0});
  }
  return {some_bytes_, padded};
}

// scores = q · kᵀ for keys [from, to) of the block.
template <class Products>
void ForwardWorker<Products>::multiply_keys_of_bytes(int64_t rows, int64_t from, int64_t to) {
  using Bytes = typename Products::Bytes;
  const int64_t steps = ceil_div(p_.D, Bytes::kDepth);
  if (rows > Bytes::kGroup) {
    steps == 1 ? multiply_keys_of_bytes<1, 2>(rows, from, to) : multiply_keys_of_bytes<2, 2>(rows, from, to);
  } else if (steps <= 2) {
    steps == 1 ? multiply_keys_of_bytes<1, 1>(rows, from, to) : multiply_keys_of_bytes<2, 1>(rows, from, to);
  } else {
    steps == 3 ? multiply_keys_of_bytes<3, 1>(rows, from, to) : multiply_keys_of_bytes<4, 1>(rows, from, to);
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (std::isfinite(q_units_[r])) continue;
    for (int64_t j = from; j < to; ++j) {
      T sum = 0;
      for (int64_t d = 0; d < p_.D; ++d) {
        sum += to_float(q_[r * Products::depth(p_.D) + d]) * Products::number(p_.k, k_rows_[j], d);
      }
      scores_[r * scores_stride_ + j] = sum;
    }
  }
}

template <class Products>
template <int steps, int groups>
void ForwardWorker<Products>::multiply_keys_of_bytes(int64_t rows, int64_t from, int64_t to) {
  using Bytes = typename Products::Bytes;
  constexpr int64_t kKeys = Bytes::kKeys, kSums = groups * Bytes::kTileSums;
  Bytes::template hold<steps * groups>(digit_q_);
  const auto ahead = requests_.template beside<Bytes::kAsked>(ceil_div(to - from, kKeys) * steps);
  one_tile_late<kKeys>(
      from, to,
      [&]<int c>(int64_t j) {
        const SomeBytes keys = bytes_as_they_lie(p_.k, k_rows_ + j, std::min(kKeys, to - j), p_.D);
        Bytes::template multiply_keys<steps, groups, c>(keys.first, keys.stride, digit_sums_ + c * kSums,
                                                        ahead.from((j - from) / kKeys * steps));
      },
      [&]<int c>(int64_t j) {
        for (int64_t group = 0; group < groups; ++group) {
          const auto* sums = reinterpret_cast<const float*>(digit_sums_ + c * kSums + group * Bytes::kTileSums);
          V digits[Bytes::kDigits][4];
          for (int t = 0; t < Bytes::kDigits; ++t) Products::Words::turn_four(sums + t * Bytes::kGroup, N, digits[t]);
          for (int64_t r = 0; r < std::min<int64_t>(Bytes::kGroup, rows - group * Bytes::kGroup); ++r) {
            const int64_t row = group * Bytes::kGroup + r;
            const V score = Bytes::join(digits[0][r], digits[1][r], digits[2][r]) * V::broadcast(q_units_[row]);
            score.store(scores_ + row * scores_stride_ + j);
          }
        }
      });
}

// Step 4 for one strip, whose scores are weights times the scales of v.
template <class Products>
void ForwardWorker<Products>::multiply_values_of_bytes(const Strip& strip, Partial t) {
  using Bytes = typename Products::Bytes;
  const int64_t from = strip.panel_begin * kPanelKeys, to = padded_keys(strip.panel_end);
  for (int64_t r = 0; r < strip.rows(); ++r) {
    largest_weights_[r] = largest_magnitude(scores_ + r * scores_stride_ + from, to - from);
  }
  const bool two_groups = strip.rows() > Bytes::kGroup;
  for (int64_t column = 0; column < p_.Dv;) {
    const bool two_panels = !two_groups && column + Bytes::kDepth < p_.Dv;
    if (two_groups) {
      multiply_values_of_bytes<1, 2>(strip, column, t);
    } else if (two_panels) {
      multiply_values_of_bytes<2, 1>(strip, column, t);
    } else {
      multiply_values_of_bytes<1, 1>(strip, column, t);
    }
    column += two_panels ? 2 * Bytes::kDepth : Bytes::kDepth;
  }
  for (int64_t r = 0; r < strip.rows(); ++r) {
    if (std::isfinite(largest_weights_[r])) continue;
    T* acc = t.acc + (strip.row_begin + r) * padded_dv_;
    for (int64_t j = from; j < std::min(to, block_keys_); ++j) {
      const T weight = scores_[r * scores_stride_ + j];
      for (int64_t d = 0; d < p_.Dv; ++d) acc[d] += weight * Products::number(p_.v, v_rows_[j], d);
    }
  }
}

// acc += weights · v for panels of 64 columns. The digits of the next 16 keys' weights are made while those before are
// multiplied.
template <class Products>
template <int panels, int groups>
void ForwardWorker<Products>::multiply_values_of_bytes(const Strip& strip, int64_t column, Partial t) {
  using Bytes = typename Products::Bytes;
  using Sums = typename Bytes::template ValueSums<panels, groups>;
  constexpr int64_t kKeys = Bytes::kKeys, kWeights = groups * Bytes::kDigits * Bytes::kTileBytes;
  const int64_t from = strip.panel_begin * kPanelKeys, to = std::min(strip.panel_end * kPanelKeys, block_keys_);
  const auto ahead = requests_.template beside<Bytes::kAsked>(ceil_div(to - from, kKeys) * panels);
  typename Bytes::Unit units[Bytes::kRows];
  for (int64_t r = 0; r < strip.rows(); ++r) units[r] = Bytes::unit_for(largest_weights_[r]);
  const auto weights_of = [&](int64_t j) { return digit_weights_ + j / kKeys % 2 * kWeights; };
  const auto spread = [&](int64_t j) {
    for (int64_t r = 0; r < strip.rows(); ++r) {
      if (!std::isfinite(largest_weights_[r])) continue;
      const V x = units[r].whole_numbers(V::load(scores_ + r * scores_stride_ + j));
      Bytes::spread(x, r % Bytes::kGroup, weights_of(j) + r / Bytes::kGroup * (Bytes::kDigits * Bytes::kTileBytes));
    }
  };
  Sums::begin();
  spread(from);
  for (int64_t j = from; j < to; j += kKeys) {
    if (j + kKeys < to) spread(j + kKeys);
    const SomeBytes values = bytes_as_they_lie(p_.v, v_rows_ + j, std::min(kKeys, to - j), p_.Dv);
    Sums::add(weights_of(j), values.first + column, values.stride, ahead.from((j - from) / kKeys * panels));
  }
  Sums::end(digit_sums_);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t r = 0; r < strip.rows(); ++r) {
      if (!std::isfinite(largest_weights_[r])) continue;
      const int64_t group = r / Bytes::kGroup, first = column + panel * Bytes::kDepth;
      const int32_t* sums = digit_sums_ + (panel * groups + group) * (Bytes::kDigits * Bytes::kTileSums);
      add_sums_of_bytes(sums + r % Bytes::kGroup * N, units[r].to_number, std::min(Bytes::kDepth, padded_dv_ - first),
                        t.acc + (strip.row_begin + r) * padded_dv_ + first);
    }
  }
}

// acc[0 … columns) += the sums of a row's digits: places 0 to 3 of 16 words are 4 rows of the tile apart.
template <class Products>
void ForwardWorker<Products>::add_sums_of_bytes(const int32_t* sums, T unit, int64_t columns, T* acc) {
  using Bytes = typename Products::Bytes;
  V place[4];
  for (int64_t i = 0; i < 4; ++i) {
    const auto digit = [&](int64_t t) {
      return V::load(reinterpret_cast<const float*>(sums + t * Bytes::kTileSums + i * Bytes::kGroup * N));
    };
    place[i] = Bytes::join(digit(0), digit(1), digit(2)) * V::broadcast(unit);
  }
  alignas(kCacheLine) T even[2 * N], odd[2 * N], all[4 * N];
  Products::Words::zip(place[0], place[2], even);
  Products::Words::zip(place[1], place[3], odd);
  for (int64_t n = 0; n < 2; ++n) Products::Words::zip(V::load(even + n * N), V::load(odd + n * N), all + 2 * n * N);
  for (int64_t d = 0; d < columns; d += N) (V::load(acc + d) + V::load(all + d)).store(acc + d);
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
