// What an ISA offers to the dispatch table: the compute type follows from the dtype of q.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Calls f with a null pointer to the products that serve a dtype.
template <class F>
void with_products(DType dtype, F&& f) {
  if (dtype == DType::float64) return f(static_cast<VectorProducts<double>*>(nullptr));
  f(static_cast<VectorProducts<float>*>(nullptr));
}

}  // namespace

void forward(const ForwardParams& p, const Parallel& parallel) {
  with_products(p.q.dtype, [&]<class Products>(Products*) { forward_of<Products>(p, parallel); });
}

void backward(const BackwardParams& p, const Parallel& parallel) {
  with_products(p.q.dtype, [&]<class Products>(Products*) { backward_of<Products>(p, parallel); });
}

void weights(const WeightsParams& p, const Parallel& parallel) {
  with_products(p.q.dtype, [&]<class Products>(Products*) { weights_of<Products>(p, parallel); });
}

void append(const AppendParams& p, const Parallel& parallel) {
  p.from.dtype == DType::float64 ? append_of<double>(p, parallel) : append_of<float>(p, parallel);
}

TileShape tile(DType dtype) {
  if (dtype == DType::float64) return {kTileRows<double>, static_cast<int>(kPanel<double>), false};
  return {kTileRows<float>, static_cast<int>(kPanel<float>), false};
}

}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
