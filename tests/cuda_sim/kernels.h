// The functions of cuda/kernels.h and cuda/checks.h as they are called where the simulator runs them: each call allows its
// tensors, exactly from their first to their last element.
//
// They are also one more ISA of the CPU's table: whatever the C++ tests ask of the CPU's kernels they ask of these.
#pragma once

#include "cuda/checks.h"
#include "cuda/kernels.h"

namespace attn_ext::cuda_sim {

void forward(const ForwardParams& p, void* workspace, cuda::StreamHandle stream);
void backward(const BackwardParams& p, void* delta, cuda::StreamHandle stream);
void weights(const WeightsParams& p, cuda::StreamHandle stream);
void append(const AppendParams& p, cuda::StreamHandle stream);

void check_lengths(const cuda::LengthsCheck& c, cuda::StreamHandle stream);
void check_boundaries(const cuda::BoundariesCheck& c, cuda::StreamHandle stream);
void check_cache(const cuda::CacheCheck& c, cuda::StreamHandle stream);
void copy_numbers(const cuda::NumbersCopy& c, cuda::StreamHandle stream);
void take_fault(int64_t* to, cuda::StreamHandle stream);

cuda::ForwardPlan plan_forward(const ForwardParams& p);

}  // namespace attn_ext::cuda_sim
