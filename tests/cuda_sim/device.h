// The primitives of csrc/cuda/primitives.cuh as the simulator has them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "simulator.h"

#define ATTN_EXT_KERNEL
#define ATTN_EXT_DEVICE
#define ATTN_EXT_GRID_CONSTANT
#define ATTN_EXT_DEVICE_VARIABLE
#define ATTN_EXT_UNROLL
#define ATTN_EXT_ROLLED

namespace attn_ext::cuda {

using Site = cuda_sim::Site;
using Stream = void*;

inline int thread_index() { return cuda_sim::thread_index(); }
inline int64_t block_index() { return cuda_sim::block_index(); }
inline int64_t block_count() { return cuda_sim::block_count(); }

template <class T>
inline T load_global(const T* at) {
  cuda_sim::check_global(at, sizeof(T), cuda_sim::Use::read);
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
inline void store_global(T* at, T value) {
  cuda_sim::check_global(at, sizeof(T), cuda_sim::Use::write);
  std::memcpy(at, &value, sizeof(T));
}

inline char* shared_memory() { return cuda_sim::shared_memory(); }

template <class T>
inline T load_shared(const T* at, Site site = Site::here()) {
  cuda_sim::check_shared(at, sizeof(T), cuda_sim::Use::read, site);
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
inline void store_shared(T* at, T value, Site site = Site::here()) {
  cuda_sim::check_shared(at, sizeof(T), cuda_sim::Use::write, site);
  std::memcpy(at, &value, sizeof(T));
}

inline void sync_block(Site site = Site::here()) { cuda_sim::wait_for_block(false, site); }
inline bool sync_block_or(bool flag, Site site = Site::here()) { return cuda_sim::wait_for_block(flag, site); }

template <class T>
inline T shuffle_xor(T value, int lane_mask, Site site = Site::here()) {
  static_assert(sizeof(T) <= 16);
  cuda_sim::exchange(&value, sizeof(T), (cuda_sim::thread_index() % cuda_sim::kWarpSize) ^ lane_mask, site);
  return value;
}

// Of a variable of the device, which is no memory of a call's: there are no bounds to check. Threads take turns.
inline uint64_t atomic_min(uint64_t* at, uint64_t x) {
  const uint64_t before = *at;
  if (x < before) *at = x;
  return before;
}
inline uint64_t atomic_exchange(uint64_t* at, uint64_t x) { return std::exchange(*at, x); }

inline float exp2_of(float x) { return std::exp2(x); }
inline double exp2_of(double x) { return std::exp2(x); }
inline float fma_of(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma_of(double a, double b, double c) { return std::fma(a, b, c); }

template <class Kernel, class... Args>
inline void launch(const char* name, Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, Stream,
                   const Args&... args) {
  cuda_sim::run({name, blocks, threads, shared_bytes}, [&] { kernel(args...); });
}

}  // namespace attn_ext::cuda
