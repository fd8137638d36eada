// The ISAs that this platform can be built for: one name each, used alike for folder, namespace, run-time string and
// test id.
#pragma once

#include "cpu/parallel.h"
#include "params.h"

namespace attn_ext::cpu {

// Rows × columns of a register tile, and whether it takes pairs of bf16 numbers.
struct TileShape {
  int rows = 0, columns = 0;
  bool of_pairs = false;
};

}  // namespace attn_ext::cpu

// All of them, whatever the platform, best first (dispatch.h: for which CPUs). (The tests of the CUDA kernels put those,
// run by a simulator, in their place: tests/cuda_sim.)
namespace attn_ext::cpu {
#if defined(ATTN_EXT_CUDA_SIM)
inline constexpr const char* kAllIsas[] = {"cuda_sim"};
#else
inline constexpr const char* kAllIsas[] = {"amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "scalar"};
#endif
}  // namespace attn_ext::cpu

#if defined(ATTN_EXT_CUDA_SIM)
#define ATTN_EXT_FOR_EACH_ISA(X) X(cuda_sim)
#elif defined(__x86_64__)
#define ATTN_EXT_FOR_EACH_ISA(X) X(amx_bf16) X(avx512_bf16) X(avx512) X(avx2) X(scalar)
#elif defined(__aarch64__)
#define ATTN_EXT_FOR_EACH_ISA(X) X(neon) X(scalar)
#else
#define ATTN_EXT_FOR_EACH_ISA(X) X(scalar)
#endif

#define ATTN_EXT_DECLARE_ISA(isa)                                   \
  namespace attn_ext::cpu::isa {                                    \
  void forward(const ForwardParams& p, const Parallel& parallel);   \
  void backward(const BackwardParams& p, const Parallel& parallel); \
  void weights(const WeightsParams& p, const Parallel& parallel);   \
  void append(const AppendParams& p, const Parallel& parallel);     \
  TileShape tile(DType dtype);                                      \
  }
ATTN_EXT_FOR_EACH_ISA(ATTN_EXT_DECLARE_ISA)
#undef ATTN_EXT_DECLARE_ISA
