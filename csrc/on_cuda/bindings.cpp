// `attn_ext._cuda`: loading it adds the operators for tensors on a GPU (schema.cpp). Beside that it says how it was built,
// and what a call would launch.
#include <pybind11/pybind11.h>

#include "attn_ext_build_config.h"  // written by setup.py
#include "on_cuda/plan.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = ATTN_EXT_VERSION;
  info["nvcc"] = ATTN_EXT_NVCC_VERSION;
  info["archs"] = ATTN_EXT_CUDA_ARCHS;
  return info;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "attn_ext's operators for tensors on a GPU.";
  m.def("build_info", &build_info,
        "dict: version, nvcc (its release), archs (the GPU generations it was compiled for).");
  attn_ext::add_cuda_plan(m);
}
