// Whose kernels run: the GPU's, or the simulator's on the CPU.
#pragma once

#include "cuda/kernels.h"

#if defined(ATTN_EXT_CUDA_SIM)
#include "cuda_sim/kernels.h"

namespace attn_ext {
namespace kernels = cuda_sim;
}
#else
namespace attn_ext {
namespace kernels = cuda;
}
#endif
