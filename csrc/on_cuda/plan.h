// The plan of a call on a GPU, for Python (attn_ext.explain): what csrc/cuda/choice.cpp says of it.
#pragma once

#include <pybind11/pybind11.h>

namespace attn_ext {

// Adds plan_cuda_forward to a module.
void add_cuda_plan(pybind11::module_& m);

}  // namespace attn_ext
