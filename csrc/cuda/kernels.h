// The CUDA kernels as functions over params whose pointers are device memory: queued on a stream, never waited for. forward
// writes every row, also those of packed tensors that no sequence has. Gradients and weights come in as zeros: what a kernel
// adds nothing to it does not write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/launches.h"
#include "params.h"

namespace attn_ext::cuda {

using StreamHandle = void*;  // a cudaStream_t

// `workspace` has room for forward_workspace_bytes(p), of numbers of up to 8 bytes, and may hold anything.
int64_t forward_workspace_bytes(const ForwardParams& p);
void forward(const ForwardParams& p, void* workspace, StreamHandle stream);
// `delta` has room for a number of the compute type for every row, laid out as row_max is.
void backward(const BackwardParams& p, void* delta, StreamHandle stream);

// Keys of a segment (segments.cuh) where a sequence has Lk keys at most: 1,024, and more where they would be more than 64
// segments.
ATTN_EXT_SHARED inline int64_t segment_keys_of(int64_t Lk) {
  const int64_t thousands = (Lk + 64 * 1024 - 1) / (64 * 1024);
  return 1024 * (thousands > 1 ? thousands : 1);
}

// How a call's keys are shared out: blocks that walk over all segments of their rows, or a block a segment, and then
// forward_merge.
struct Split {
  int64_t places = 0;  // for partials, of every batch entry and key/value head; 0: keys are not shared out
  void* partials = nullptr;

  ATTN_EXT_SHARED bool is_shared() const { return places > 0; }
  // Blocks that each block of rows becomes.
  ATTN_EXT_SHARED int64_t shares() const { return is_shared() ? places : 1; }
};

// What forward and backward choose from (choice.cpp). Of the gradients backward_mma has those of q, k and v, from the delta
// that backward_general has computed; fits_mma says whether the device has shared memory enough for it, as for forward_mma.
bool fits_mma(const ForwardParams& p);
bool fits_mma(const BackwardParams& p);
void forward_mma(const ForwardParams& p, const Split& split, StreamHandle stream);
void forward_general(const ForwardParams& p, const Split& split, StreamHandle stream);
void forward_merge(const ForwardParams& p, const Split& split, double weight_scale, StreamHandle stream);
void backward_mma(const BackwardParams& p, const float* delta, StreamHandle stream);
void backward_general(const BackwardParams& p, void* delta, StreamHandle stream);

void weights(const WeightsParams& p, StreamHandle stream);
void append(const AppendParams& p, StreamHandle stream);

// ---- What a call would do (attn_ext.explain) ------------------------------------------------------------------------

// What a block of a forward kernel computes at once.
struct ForwardTile {
  int64_t columns = 0;  // forward_mma: that q, k, v have room for; forward_general: of the output
  int64_t rows = 0, keys = 0;
};
ForwardTile tile_mma(const ForwardParams& p);
ForwardTile tile_general(const ForwardParams& p);
size_t shared_bytes_to_have();  // a block, on the current device

struct ForwardPlan {
  const char* why = "";  // these kernels and no others
  ForwardTile tile;
  std::vector<Launch> launches;  // as forward makes them, one after the other
};
// Reads no memory that p points to.
ForwardPlan plan_forward(const ForwardParams& p);

}  // namespace attn_ext::cuda
