// The primitives of csrc/cuda/primitives.cuh as the simulator has them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "simulator.h"
#include "storage.h"

#define ATTN_EXT_KERNEL
#define ATTN_EXT_DEVICE inline
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
inline T shuffle_from(T value, int lane, Site site = Site::here()) {
  cuda_sim::meet(&value, sizeof(T), site);
  std::memcpy(&value, cuda_sim::brought_by(lane), sizeof(T));
  return value;
}

template <class T>
inline T shuffle_xor(T value, int lane_mask, Site site = Site::here()) {
  return shuffle_from(value, cuda_sim::thread_index() % cuda_sim::kWarpSize ^ lane_mask, site);
}

inline void copy_async(void* to, const void* from, int bytes, Site site = Site::here()) {
  cuda_sim::begin_copy(to, from, static_cast<size_t>(bytes), site);
}
inline void commit_copies() { cuda_sim::end_group_of_copies(); }
template <int pending>
inline void wait_copies() {
  cuda_sim::wait_for_copies(pending);
}

// ldmatrix: lane l has the address of row l % 8 of matrix l / 8 and gets of each matrix row l / 4, columns l % 4 · 2 and the
// next (transposed: column l / 4, rows l % 4 · 2 and the next).
template <bool transposed>
inline Several<uint32_t, 4> load_matrices(const void* row, Site site = Site::here()) {
  struct alignas(16) Row {
    uint16_t x[8];
  };
  const Row own = load_shared(static_cast<const Row*>(row), site);
  cuda_sim::meet(&own, sizeof(Row), site);
  const int lane = cuda_sim::thread_index() % cuda_sim::kWarpSize, outer = lane / 4, inner = lane % 4 * 2;
  Several<uint32_t, 4> result;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto number = [&](int n) -> uint32_t {
      const auto* rows = static_cast<const Row*>(cuda_sim::brought_by(matrix * 8 + (transposed ? n : outer)));
      return rows->x[transposed ? outer : n];
    };
    result.x[matrix] = number(inner) | number(inner + 1) << 16;
  }
  return result;
}

// mma.m16n8k16: acc += a · b. Lane l has, with g = l / 4 and t = l % 4 · 2: of acc (g, t), (g, t + 1), (g + 8, t), (g + 8, t +
// 1); of a the pairs of columns from t on in rows g and g + 8, then the same from t + 8 on; of b the pairs of rows from t
// and t + 8 on in column g. The sums run in double here; a GPU's order and rounding are not laid down.
template <class Storage>
inline void multiply_matrices(Several<float, 4>& acc, const Several<uint32_t, 4>& a, const Several<uint32_t, 2>& b,
                              Site site = Site::here()) {
  struct Brought {
    Several<uint32_t, 4> a;
    Several<uint32_t, 2> b;
  };
  const Brought own{a, b};
  cuda_sim::meet(&own, sizeof(Brought), site);
  const int lane = cuda_sim::thread_index() % cuda_sim::kWarpSize, g = lane / 4, t = lane % 4 * 2;
  const auto brought = [](int from) { return static_cast<const Brought*>(cuda_sim::brought_by(from)); };
  const auto number = [](uint32_t pair, int n) {
    return static_cast<double>(to_float(Storage{static_cast<uint16_t>(pair >> (16 * n))}));
  };
  double sums[4] = {};
  for (int k = 0; k < 16; ++k) {
    double left[2], right[2];
    for (int n = 0; n < 2; ++n) {
      left[n] = number(brought(g * 4 + k % 8 / 2)->a.x[k / 8 * 2 + n], k % 2);
      right[n] = number(brought((t + n) * 4 + k % 8 / 2)->b.x[k / 8], k % 2);
    }
    for (int n = 0; n < 4; ++n) sums[n] += left[n / 2] * right[n % 2];
  }
  for (int n = 0; n < 4; ++n) acc.x[n] = static_cast<float>(acc.x[n] + sums[n]);
}

// Two numbers rounded to 16 bits, the first one in the low half.
template <class Storage>
inline uint32_t pack_pair(float low, float high) {
  return convert_to<Storage>(low).bits | static_cast<uint32_t>(convert_to<Storage>(high).bits) << 16;
}

inline int computed_here(int x) { return x; }
template <class T>
inline T* out_of_registers(T* at) {
  return at;
}

// What is below the normal numbers becomes 0.
inline float exp2_approx(float x) {
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
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

inline size_t most_shared = 163 * 1024;  // an A100's; the tests make it small
inline size_t most_shared_bytes() { return most_shared; }

template <class Kernel, class... Args>
inline void launch(const char* name, Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, Stream,
                   const Args&... args) {
  if (shared_bytes > most_shared) throw std::runtime_error(std::string(name) + ": more shared memory than there is");
  cuda_sim::run({name, blocks, threads, shared_bytes}, [&] { kernel(args...); });
}

}  // namespace attn_ext::cuda
