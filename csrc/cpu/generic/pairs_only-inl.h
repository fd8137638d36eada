// The algorithms over PairProducts, for an ISA that has instructions for bf16 on top of avx512, which serves all other
// dtypes. Include after vec.h and pairs.h, with ATTN_EXT_PAIR_TILE naming the file of the ISA's PairTile.
#pragma once

// clang-format off
#include "cpu/generic/math-inl.h"
#include "cpu/generic/gemm-inl.h"
#include "cpu/generic/requests-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/generic/scores-inl.h"
#include "cpu/generic/direct-inl.h"
#include "cpu/generic/products-inl.h"
#include ATTN_EXT_PAIR_TILE
#include "cpu/generic/pair_products-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/forward_pairs-inl.h"
#include "cpu/generic/forward_bytes-inl.h"
#include "cpu/generic/backward-inl.h"
#include "cpu/generic/backward_pairs-inl.h"
#include "cpu/generic/weights-inl.h"
// clang-format on

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {

void forward(const ForwardParams& p, const Parallel& parallel) {
  // Where few rows read an int8 cache, making bf16 of its numbers costs more than the products save. Fewer still are
  // multiplied as bytes.
  constexpr int64_t kFewRows = 2 * Vec<float>::N;
  const int64_t rows = p.Hkv > 0 ? p.Hq / p.Hkv * p.Lq : 0;
  const bool few_for_int8 =
      p.k.dtype == DType::int8 && rows <= kFewRows && !ForwardWorker<PairProducts>::multiplies_bytes(p, rows);
  const bool in_pairs = p.q.dtype == DType::bfloat16 && !few_for_int8;
  in_pairs ? forward_of<PairProducts>(p, parallel) : avx512::forward(p, parallel);
}

void backward(const BackwardParams& p, const Parallel& parallel) {
  p.q.dtype == DType::bfloat16 ? backward_of<PairProducts>(p, parallel) : avx512::backward(p, parallel);
}

void weights(const WeightsParams& p, const Parallel& parallel) {
  p.q.dtype == DType::bfloat16 ? weights_of<PairProducts>(p, parallel) : avx512::weights(p, parallel);
}

void append(const AppendParams& p, const Parallel& parallel) { avx512::append(p, parallel); }

TileShape tile(DType dtype) {
  if (dtype != DType::bfloat16) return avx512::tile(dtype);
  return {PairTile::kRows, static_cast<int>(kPanel<float>), true};
}

}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
