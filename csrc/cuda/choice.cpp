// Which kernels a call is for.
//
//   forward_mma, backward_mma          fp16 and bf16, head dims to 256 (on GPUs with 99 KB of shared memory a block the
//                                      gradients to 128)
//   forward_general, backward_general  everything else: fp32, fp64, wider heads, int8 caches; and the gradients of biases
//                                      and sinks
#include <algorithm>

#include "cuda/kernels.h"

namespace attn_ext::cuda {
namespace {

bool is_for_tensor_cores(const AttentionParams& p) {
  const bool in_16_bits = p.q.dtype == DType::bfloat16 || p.q.dtype == DType::float16;
  return in_16_bits && p.k.dtype == p.q.dtype && std::max(p.D, p.Dv) <= 256;
}

}  // namespace

void forward(const ForwardParams& p, StreamHandle stream) {
  if (!p.has_rows()) return;
  is_for_tensor_cores(p) && fits_mma(p) ? forward_mma(p, stream) : forward_general(p, stream);
}

void backward(const BackwardParams& p, void* delta, StreamHandle stream) {
  if (p.batch == 0 || p.Hkv == 0) return;
  if (!is_for_tensor_cores(p) || p.Dv == 0 || !fits_mma(p)) return backward_general(p, delta, stream);
  BackwardParams rest = p;
  rest.dq = rest.dk = rest.dv = {};
  backward_general(rest, delta, stream);
  backward_mma(p, static_cast<const float*>(delta), stream);
}

}  // namespace attn_ext::cuda
