// Everything in the kernels that only a GPU has: threads, barriers, exchanges within a warp, the two kinds of memory, the
// launch. On a GPU each is an instruction or two. Where ATTN_EXT_CUDA_SIM is defined the same kernels are plain C++, and
// tests/cuda_sim does what is asked for here and watches it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launches.h"
#include "storage.h"

namespace attn_ext::cuda {

// Neighbours that travel as one access.
template <class T, int n>
struct alignas(n * sizeof(T)) Several {
  T x[n];
};
template <class T>
using Four = Several<T, 4>;

// Blocks of one launch at most, all along x. Kernels walk over what is beyond.
#if defined(ATTN_EXT_CUDA_SIM)
inline int64_t most_blocks = 0x7fffffff;  // the tests make it small
#else
inline constexpr int64_t most_blocks = 0x7fffffff;
#endif

}  // namespace attn_ext::cuda

#if defined(ATTN_EXT_CUDA_SIM)

#include "cuda_sim/device.h"

#else

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#define ATTN_EXT_KERNEL __global__
#define ATTN_EXT_DEVICE __device__ __forceinline__
#define ATTN_EXT_GRID_CONSTANT __grid_constant__
#define ATTN_EXT_DEVICE_VARIABLE __device__  // one on each device
// Before loops over a thread's own rows, keys and columns: arrays that are indexed by constants stay in registers.
#define ATTN_EXT_UNROLL _Pragma("unroll")
// Before loops whose bodies are long: unrolled they take registers (until they spill) and minutes of compiling.
#define ATTN_EXT_ROLLED _Pragma("unroll 1")

namespace attn_ext::cuda {

// Where in the source an access stands: of use to the simulator only.
struct Site {
  __host__ __device__ static constexpr Site here() { return {}; }
};

using Stream = cudaStream_t;

ATTN_EXT_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
ATTN_EXT_DEVICE int64_t block_index() { return blockIdx.x; }
ATTN_EXT_DEVICE int64_t block_count() { return gridDim.x; }

template <class T>
ATTN_EXT_DEVICE T load_global(const T* at) {
  return *at;
}

template <class T>
ATTN_EXT_DEVICE void store_global(T* at, T value) {
  *at = value;
}

ATTN_EXT_DEVICE char* shared_memory() {
  extern __shared__ __align__(32) char memory[];  // the widest access: four doubles
  return memory;
}

template <class T>
ATTN_EXT_DEVICE T load_shared(const T* at, Site = Site::here()) {
  return *at;
}

template <class T>
ATTN_EXT_DEVICE void store_shared(T* at, T value, Site = Site::here()) {
  *at = value;
}

ATTN_EXT_DEVICE void sync_block(Site = Site::here()) { __syncthreads(); }
ATTN_EXT_DEVICE bool sync_block_or(bool flag, Site = Site::here()) { return __syncthreads_or(flag) != 0; }

// What lane `lane` of the warp has.
template <class T>
ATTN_EXT_DEVICE T shuffle_from(T value, int lane, Site = Site::here()) {
  return __shfl_sync(0xffffffffu, value, lane);
}

template <class T>
ATTN_EXT_DEVICE T shuffle_xor(T value, int lane_mask, Site = Site::here()) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// Shared memory as the instructions below want it.
ATTN_EXT_DEVICE uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// 16 bytes to shared memory, of which `bytes` come from global memory and the rest are zeros. They have arrived where their
// thread has waited for their group: wait_copies waits for all but the newest `pending` groups.
ATTN_EXT_DEVICE void copy_async(void* to, const void* from, int bytes, Site = Site::here()) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
ATTN_EXT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
ATTN_EXT_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8 × 8 matrices of 16-bit numbers: lane l has the address of row l % 8 of matrix l / 8, and gets of each matrix row
// l / 4, columns l % 4 · 2 and the next (transposed: column l / 4, rows l % 4 · 2 and the next).
template <bool transposed>
ATTN_EXT_DEVICE Four<uint32_t> load_matrices(const void* row, Site = Site::here()) {
  Four<uint32_t> r;
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
  return r;
}

// acc += a · b, (16 × 16) · (16 × 8), accumulated in fp32. Lane l has, with g = l / 4 and t = l % 4 · 2: of acc (g, t),
// (g, t + 1), (g + 8, t), (g + 8, t + 1); of a the pairs of columns from t on in rows g and g + 8, then the same from t + 8
// on; of b the pairs of rows from t and t + 8 on in column g.
template <class Storage>
ATTN_EXT_DEVICE void multiply_matrices(Four<float>& acc, const Four<uint32_t>& a, const Several<uint32_t, 2>& b,
                                       Site = Site::here()) {
  if constexpr (std::is_same_v<Storage, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc.x[0]), "+f"(acc.x[1]), "+f"(acc.x[2]), "+f"(acc.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc.x[0]), "+f"(acc.x[1]), "+f"(acc.x[2]), "+f"(acc.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
  }
}

// Two numbers rounded to 16 bits, the first one in the low half.
template <class Storage>
ATTN_EXT_DEVICE uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<Storage, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// x, hidden from the compiler: what follows from it is computed where it is needed. It would otherwise be computed once,
// before the loop, and kept in registers that there are not.
ATTN_EXT_DEVICE int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// `at`, hidden from the compiler: what lies there stays in the thread's own memory until it is asked for, for there are no
// registers for it.
template <class T>
ATTN_EXT_DEVICE T* out_of_registers(T* at) {
  asm volatile("" : "+l"(at) : : "memory");
  return at;
}

// 2^-22 relative; what is below the normal numbers becomes 0. For what is rounded to 16 bits anyway.
ATTN_EXT_DEVICE float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Of a variable of the device; both return what was there.
ATTN_EXT_DEVICE uint64_t atomic_min(uint64_t* at, uint64_t x) {
  return atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(x));
}
ATTN_EXT_DEVICE uint64_t atomic_exchange(uint64_t* at, uint64_t x) {
  return atomicExch(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(x));
}

// exp2f has 2 ulp and no fast-math flag turns it into less.
ATTN_EXT_DEVICE float exp2_of(float x) { return exp2f(x); }
ATTN_EXT_DEVICE double exp2_of(double x) { return exp2(x); }
ATTN_EXT_DEVICE float fma_of(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ATTN_EXT_DEVICE double fma_of(double a, double b, double c) { return __fma_rn(a, b, c); }

inline void expect_success(const char* name, cudaError_t status) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("attn_ext: ") + name + ": " + cudaGetErrorString(status));
}

// What a block may ask for of the current device's shared memory: 99 KB on smaller GPUs, 163 (A100) or 227 (H100) on larger.
inline size_t most_shared_bytes() {
  int device = 0, bytes = 0;
  expect_success("cudaGetDevice", cudaGetDevice(&device));
  expect_success("shared memory", cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<size_t>(bytes);
}

template <class Kernel, class... Args>
inline void launch(const char* name, Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, Stream stream,
                   const Args&... args) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    expect_success(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(shared_bytes)));
  }
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(args...);
  expect_success(name, cudaGetLastError());
}

}  // namespace attn_ext::cuda

#endif

namespace attn_ext::cuda {

inline constexpr int kWarpSize = 32;

// The one place where kernels are launched (or noted: launches.h): blocks that walk over `tasks`, or nothing where there are
// none.
template <class Kernel, class... Args>
inline void launch_tasks(const char* name, Kernel kernel, int64_t tasks, int threads, size_t shared_bytes, void* stream,
                         const Args&... args) {
  if (tasks <= 0) return;
  const int64_t blocks = tasks < most_blocks ? tasks : most_blocks;
  if (noted_launches != nullptr) return noted_launches->push_back({name, blocks, threads, shared_bytes});
  launch(name, kernel, blocks, threads, shared_bytes, static_cast<Stream>(stream), args...);
}

// The smallest number of pieces of `size` that cover n.
constexpr int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

struct Sum {
  template <class T>
  ATTN_EXT_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Largest {  // a where either is NaN
  template <class T>
  ATTN_EXT_DEVICE T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};
struct Smallest {
  template <class T>
  ATTN_EXT_DEVICE T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Either {
  ATTN_EXT_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

// x of `lanes` neighbouring lanes, a power of two, joined by one tree; all of them get the result.
template <int lanes, class Op, class T>
ATTN_EXT_DEVICE T join_lanes(T x, Site site = Site::here()) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x = Op()(x, shuffle_xor(x, mask, site));
  return x;
}

}  // namespace attn_ext::cuda
