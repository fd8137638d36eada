// Where the tensors of a call live and its kernels run: one place for a whole object file, so that nothing is decided while
// a call runs. `attn_ext._C` has the CPU; where ATTN_EXT_ON_CUDA is defined the same operators are compiled for a GPU
// (`attn_ext._cuda`). Both headers have the same names: what a call's small tensors become on their way to the kernels, how
// memory is made, and the kernels.
#pragma once

#if defined(ATTN_EXT_ON_CUDA)
#include "on_cuda/device.h"
#else
#include "on_cpu/device.h"
#endif
