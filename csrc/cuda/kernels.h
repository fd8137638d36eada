// The CUDA kernels as functions over params whose pointers are device memory: queued on a stream, never waited for. What
// a kernel adds nothing to (no rows, no keys) it does not write: outputs come in as zeros.
#pragma once

#include "params.h"

namespace attn_ext::cuda {

using StreamHandle = void*;  // a cudaStream_t

void forward(const ForwardParams& p, StreamHandle stream);
// `delta` has room for a number of the compute type for every row, laid out as row_max is.
void backward(const BackwardParams& p, void* delta, StreamHandle stream);

void weights(const WeightsParams& p, StreamHandle stream);
void append(const AppendParams& p, StreamHandle stream);

}  // namespace attn_ext::cuda
