// The softmax weights themselves, for whoever asks: exp2((x − m)·c) / l from the saved row max and sum, block by block,
// so that only the asked rows are ever held.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class Products>
void weights_of(const WeightsParams& p, const Parallel& parallel) {
  using T = typename Products::T;
  using V = Vec<T>;
  const ScoreUnits<T> units(p);
  const int64_t row_blocks = ceil_div(p.Lq, kRowBlock), group = p.Hq / p.Hkv;
  const int64_t keys = std::min(kKeyBlock, round_up_to(p.Lk, kPanel<T>));
  share_tasks(parallel, p.batch * p.Hq * row_blocks, [&](auto&& next) {
    typename Products::Left* q = nullptr;
    typename Products::Right* k = nullptr;
    T* scores = nullptr;
    const int64_t depth = Products::depth(p.D);
    RowBuffers<T> buffers;
    const auto layout = [&](char* base) {
      Carver carve(base);
      q = carve.take<typename Products::Left>(kRowBlock * depth);
      k = carve.take<typename Products::Right>(round_up_to(keys, kPanel<T>) * Products::right_rows(p.D));
      scores = carve.take<T>(kRowBlock * keys);
      buffers.numbers = carve.take<T>(keys);
      buffers.bytes = carve.take<uint8_t>(keys);
      return carve.used();
    };
    Scratch scratch(layout(nullptr));
    layout(scratch.data());
    [[maybe_unused]] const typename Products::Session session;
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t b = task / row_blocks / p.Hq, h = task / row_blocks % p.Hq, first = task % row_blocks * kRowBlock;
      const int64_t rows = std::min(kRowBlock, p.Lq - first);
      const Sequence sequence = sequence_of(p, b);
      for (int64_t r = 0; r < rows; ++r) {
        Products::load_left(p.q, address(p.q, p.batch_inner, b, h, first + r), p.D, units.q_factor, q + r * depth);
      }
      const auto* max = row_address<const T>(p.row_max, b, h) + first;
      const auto* sum = row_address<const T>(p.row_sum, b, h) + first;
      for (int64_t start = 0; start < p.Lk; start += keys) {
        const int64_t count = std::min(keys, p.Lk - start), padded = round_up_to(count, V::N);
        Products::pack_keys(p.k, EvenRows(p.k, address(p.k, p.batch_inner, b, h / group, start)), count, p.D, k);
        multiply_keys<Products>(rows, padded, p.D, q, depth, k, scores, keys);
        for (int64_t r = 0; r < rows; ++r) {
          T* x = scores + r * keys;
          const ScoreRow row{b, h, first + r, visible_keys(p, sequence, first + r)};
          finish_scores<T>(p, units, sequence, row, {start, start, start + padded, start + count}, buffers, x);
          const V m = V::broadcast(max[r] == -kInfinity<T> ? T(0) : max[r]), c = V::broadcast(units.c);
          const V inverse = V::broadcast(sum[r] == T(0) ? T(0) : T(1) / sum[r]);
          for (int64_t j = 0; j < padded; j += V::N) {
            const V score = V::load(x + j);
            const V weight = exp2_nonpositive<T>((score - m) * c) * inverse;
            V::select(V::equal(score, V::broadcast(-kInfinity<T>)), V::zero(), weight).store(x + j);
          }
          store_row<T>(p.weights, address(p.weights, p.batch_inner, b, h, first + r, start), count, T(1), x);
        }
      }
    }
  });
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
