// The Python side of the extension: `attn_ext._C`, made by pybind11. No torch header here, so that nothing in it
// depends on the torch it was built against. The operators are registered by schema.cpp when this object is loaded;
// what this module offers is what is not an operator: how the build came out, what the CPU can do, which instruction
// set runs, and what the machine's ceilings are.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "attn_ext_build_config.h"  // written by setup.py
#include "ceilings.h"
#include "cpu/dispatch.h"
#include "cpu/features.h"
#include "cpu/plan.h"

#if defined(ATTN_EXT_ON_CUDA)  // the build with the simulator
#include "on_cuda/plan.h"
#endif

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

std::string torch_target() {
  constexpr unsigned long long version = TORCH_TARGET_VERSION;
  return std::to_string(version >> 56) + "." + std::to_string((version >> 48) & 0xff);
}

py::list isas() {
  py::list all;
  for (const attn_ext::cpu::IsaInfo& isa : attn_ext::cpu::isas()) {
    py::dict entry;
    entry["name"] = isa.name;
    entry["compiled"] = isa.compiled;
    entry["supported"] = isa.supported;
    entry["by_default"] = isa.by_default;
    entry["why_not"] = isa.why_not.empty() ? py::object(py::none()) : py::object(py::str(isa.why_not));
    all.append(entry);
  }
  return all;
}

py::dict build_info() {
  py::dict info;
  info["version"] = ATTN_EXT_VERSION;
  info["compiler"] = kCompiler;
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["debug"] = static_cast<bool>(ATTN_EXT_DEBUG_BUILD);
  info["torch_target"] = torch_target();
  info["built_with_torch"] = ATTN_EXT_BUILT_WITH_TORCH;
  info["isas"] = attn_ext::cpu::compiled_isas();
  info["cuda"] = std::string(ATTN_EXT_WHY_NO_CUDA).empty();
  info["cuda_reason"] = ATTN_EXT_WHY_NO_CUDA;
  return info;
}

attn_ext::DType dtype_named(const std::string& name) {
  using attn_ext::DType;
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  if (name == "float64") return DType::float64;
  throw std::invalid_argument("plan_forward: no kernel computes in dtype \"" + name + "\"");
}

// What is multiplied, and in which format products are summed.
const char* arithmetic_of(attn_ext::DType dtype, const attn_ext::cpu::TileShape& tile) {
  if (tile.of_pairs) return "pairs of bfloat16, sums in float32; weights rounded to bfloat16 before v";
  return dtype == attn_ext::DType::float64 ? "float64" : "float32";
}

// How the kernels would cut up a forward pass of this shape; the keys are the fields of explain.Plan.
py::dict plan_forward(int64_t B, int64_t Hq, int64_t Hkv, int64_t Lq, int64_t Lk, int64_t D, int64_t Dv,
                      const std::string& dtype, int threads) {
  attn_ext::AttentionParams p;
  p.set_sizes(B, Hq, Hkv, Lq, Lk, D, Dv);
  const attn_ext::cpu::ForwardPlan plan = attn_ext::cpu::plan_forward(p, threads);
  const attn_ext::DType type = dtype_named(dtype);
  const attn_ext::cpu::TileShape tile = attn_ext::cpu::kernels().tile(type);
  const int64_t element = type == attn_ext::DType::float64 ? 8 : 4;
  py::dict entry;
  entry["threads"] = plan.threads;
  entry["tasks"] = plan.tasks;
  entry["rows_per_task"] = plan.rows_per_task;
  entry["key_block"] = attn_ext::cpu::kKeyBlock;
  entry["segments"] = plan.segments;
  entry["register_tile"] = std::to_string(tile.rows) + " x " + std::to_string(tile.columns);
  entry["arithmetic"] = arithmetic_of(type, tile);
  entry["scratch_bytes"] = plan.threads * element * attn_ext::cpu::forward_scratch_elements(p, plan);
  return entry;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "How attn_ext was built, what this CPU can do, which instruction set runs, the machine's ceilings.";

  m.def("build_info", &build_info,
        "dict: version, compiler, cxx_standard, debug, torch_target (oldest torch it loads into), built_with_torch, "
        "isas (compiled, best first), cuda (whether attn_ext._cuda was built with it) and cuda_reason (why not).");
  m.def("cpu_features", &attn_ext::cpu::cpu_features, "Names of the CPU and OS features that kernels ask for.");
  m.def(
      "isas", &isas,
      "list of dict, best first for this machine: name, compiled, supported, by_default (whether it runs where nobody "
      "asks for another), why_not.");
  m.def("active_isa", &attn_ext::cpu::active_isa,
        "Name of the instruction set whose kernels run. Raises ValueError where ATTN_EXT_ISA names one that cannot.");
  m.def("use_isa", &attn_ext::cpu::use_isa, py::arg("name"),
        "Runs the kernels of the instruction set `name` from now on. Raises ValueError that names the choices.");

  m.def("plan_forward", &plan_forward, py::arg("B"), py::arg("Hq"), py::arg("Hkv"), py::arg("Lq"), py::arg("Lk"),
        py::arg("D"), py::arg("Dv"), py::arg("dtype"), py::arg("threads"),
        "dict: how a forward pass of this shape is cut into tasks.");
#if defined(ATTN_EXT_ON_CUDA)
  attn_ext::add_cuda_plan(m);
#endif

  // They run for `seconds` on threads of their own, so other Python threads go on meanwhile.
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("measure_fma_peak", &attn_ext::ceilings::measure_fma_peak, py::arg("threads"), py::arg("seconds"),
        py::arg("dtype"), no_gil, "GFLOP/s of fused multiply-adds in registers; dtype 'float32' or 'float64'.");
  m.def("measure_bf16_peak", &attn_ext::ceilings::measure_bf16_peak, py::arg("threads"), py::arg("seconds"),
        py::arg("isa"), no_gil,
        "GFLOP/s of products of bf16 in registers; isa 'amx_bf16' (tiles) or 'avx512_bf16' (dot product). None where "
        "this "
        "machine has no such instruction, or the process may not use it.");
  m.def("measure_read_bandwidth", &attn_ext::ceilings::measure_read_bandwidth, py::arg("threads"),
        py::arg("bytes_per_thread"), py::arg("seconds"), no_gil, "GB/s read from memory.");
}
