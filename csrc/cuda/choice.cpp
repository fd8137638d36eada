// Which kernels a call is for, and whether blocks share the keys of its rows.
//
//   forward_mma, backward_mma          fp16 and bf16, head dims to 256 (on GPUs with 99 KB of shared memory a block the
//                                      gradients to 128)
//   forward_general, backward_general  everything else: fp32, fp64, wider heads, int8 caches; and the gradients of biases
//                                      and sinks
//   forward_merge                      where blocks share keys: joins what they have come to
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

// Blocks share keys where the rows that read them are so few: more than a token or two a head fill a GPU by themselves, or
// nearly, and every row costs a partial a segment, written and read. Those of 16 rows of fp32 are 1.6 % of the bytes of 16-bit
// k and v. (They fit one block of rows of every kernel.)
constexpr int64_t kMostSharedRows = 16;

// How many places for partials a batch entry and key/value head has; 0 where keys are not shared out. In packed calls the
// host does not know whose rows are few.
int64_t places_of(const ForwardParams& p) {
  if (p.cu_q != nullptr || p.Hkv == 0 || p.Hq / p.Hkv * p.Lq > kMostSharedRows) return 0;
  const int64_t keys = segment_keys_of(p.Lk), segments = (p.Lk + keys - 1) / keys;
  if (segments <= 1) return 0;
  return segments + (p.layout.ring > 0 ? 1 : 0);  // the keys of a ring begin and end anywhere in a segment
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& p) {
  const int64_t number = p.q.dtype == DType::float64 ? 8 : 4;
  return places_of(p) * p.batch * p.Hq * p.Lq * (p.Dv + 2) * number;
}

void forward(const ForwardParams& p, void* workspace, StreamHandle stream) {
  if (!p.has_rows()) return;
  const Split split{places_of(p), workspace};
  const bool on_tensor_cores = why_forward_general(p) == nullptr;
  on_tensor_cores ? forward_mma(p, split, stream) : forward_general(p, split, stream);
  if (!split.is_shared()) return;
  const bool not_scaled_yet = on_tensor_cores && p.dropout;  // forward_general scales weights as it drops others
  forward_merge(p, split, not_scaled_yet ? p.dropout_scale : 1.0, stream);
}

ForwardPlan plan_forward(const ForwardParams& p) {
  ForwardPlan plan;
  const char* general = why_forward_general(p);
  plan.why = general != nullptr ? general : "16-bit numbers and head dims to 256: tensor cores";
  plan.tile = general != nullptr ? tile_general(p) : tile_mma(p);
  const NoteLaunches note(plan.launches);
  forward(p, nullptr, nullptr);
  return plan;
}

void backward(const BackwardParams& p, void* delta, StreamHandle stream) {
  if (!p.has_rows() || p.Hkv == 0) return;
  if (why_not_tensor_cores(p) != nullptr || p.Dv == 0 || !fits_mma(p)) return backward_general(p, delta, stream);
  BackwardParams rest = p;
  rest.dq = rest.dk = rest.dv = {};
  backward_general(rest, delta, stream);
  backward_mma(p, static_cast<const float*>(delta), stream);
}

}  // namespace attn_ext::cuda
