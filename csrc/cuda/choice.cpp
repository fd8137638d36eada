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

// Why a call is none for tensor cores; null where it is one, as far as its numbers and its width go.
const char* why_not_tensor_cores(const AttentionParams& p) {
  if (p.q.dtype != DType::bfloat16 && p.q.dtype != DType::float16) {
    return "fp32 and fp64 keep their accuracy, which tensor cores do not have: plain multiply-adds";
  }
  if (p.k.dtype != p.q.dtype) return "an int8 cache is multiplied out in fp32: plain multiply-adds";
  if (std::max(p.D, p.Dv) > 256) return "head dims beyond 256 have no kernel on tensor cores: plain multiply-adds";
  return nullptr;
}

// The same for forward, the device included.
const char* why_forward_general(const ForwardParams& p) {
  if (const char* why = why_not_tensor_cores(p)) return why;
  return fits_mma(p) ? nullptr
                     : "the GPU has too little shared memory for the tiles of tensor cores: plain multiply-adds";
}

}  // namespace

void forward(const ForwardParams& p, StreamHandle stream) {
  if (!p.has_rows()) return;
  why_forward_general(p) == nullptr ? forward_mma(p, stream) : forward_general(p, stream);
}

ForwardPlan plan_forward(const ForwardParams& p) {
  ForwardPlan plan;
  const char* general = why_forward_general(p);
  plan.why = general != nullptr ? general : "16-bit numbers and head dims to 256: tensor cores";
  plan.tile = general != nullptr ? tile_general(p) : tile_mma(p);
  const NoteLaunches note(plan.launches);
  forward(p, nullptr);
  return plan;
}

void backward(const BackwardParams& p, void* delta, StreamHandle stream) {
  if (p.batch == 0 || p.Hkv == 0) return;
  if (why_not_tensor_cores(p) != nullptr || p.Dv == 0 || !fits_mma(p)) return backward_general(p, delta, stream);
  BackwardParams rest = p;
  rest.dq = rest.dk = rest.dv = {};
  backward_general(rest, delta, stream);
  backward_mma(p, static_cast<const float*>(delta), stream);
}

}  // namespace attn_ext::cuda
