// What an ISA offers to the dispatch table: the compute type follows from the dtype of q.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {

void forward(const ForwardParams& p, const Parallel& parallel) {
  p.q.dtype == DType::float64 ? forward_of<double>(p, parallel) : forward_of<float>(p, parallel);
}

void backward(const BackwardParams& p, const Parallel& parallel) {
  p.q.dtype == DType::float64 ? backward_of<double>(p, parallel) : backward_of<float>(p, parallel);
}

void weights(const WeightsParams& p, const Parallel& parallel) {
  p.q.dtype == DType::float64 ? weights_of<double>(p, parallel) : weights_of<float>(p, parallel);
}

void append(const AppendParams& p, const Parallel& parallel) {
  p.from.dtype == DType::float64 ? append_of<double>(p, parallel) : append_of<float>(p, parallel);
}

TileShape tile(bool is_double) {
  if (is_double) return {kTileRows<double>, static_cast<int>(kPanel<double>)};
  return {kTileRows<float>, static_cast<int>(kPanel<float>)};
}

}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
