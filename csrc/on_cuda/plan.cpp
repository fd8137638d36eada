#include "on_cuda/plan.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "on_cuda/kernels.h"

namespace py = pybind11;

namespace attn_ext {
namespace {

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  if (name == "float64") return DType::float64;
  throw std::invalid_argument("no such dtype: " + name);
}

py::dict plan_cuda_forward(int64_t B, int64_t Hq, int64_t Hkv, int64_t Lq, int64_t Lk, int64_t D, int64_t Dv,
                           const std::string& dtype) {
  ForwardParams p;
  p.set_sizes(B, Hq, Hkv, Lq, Lk, D, Dv);
  p.q.dtype = p.k.dtype = p.v.dtype = dtype_named(dtype);
  const cuda::ForwardPlan plan = kernels::plan_forward(p);
  py::list launches;
  for (const cuda::Launch& launch : plan.launches) {
    launches.append(py::make_tuple(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes));
  }
  py::dict entry;
  entry["why"] = plan.why;
  entry["columns"] = plan.tile.columns;
  entry["tile_rows"] = plan.tile.rows;
  entry["tile_keys"] = plan.tile.keys;
  entry["shared_bytes_to_have"] = cuda::shared_bytes_to_have();
  entry["launches"] = launches;
  return entry;
}

}  // namespace

void add_cuda_plan(py::module_& m) {
  m.def("plan_cuda_forward", &plan_cuda_forward, py::arg("B"), py::arg("Hq"), py::arg("Hkv"), py::arg("Lq"),
        py::arg("Lk"), py::arg("D"), py::arg("Dv"), py::arg("dtype"),
        "dict: the kernels that a forward pass of this shape would launch on the current GPU, and why those.");
}

}  // namespace attn_ext
