// The tile registers of AMX: eight of 16 rows × 64 bytes, and the instruction that multiplies two of them.
//
//   C[m][n] += Σ_k A[m][2k] · B[k][2n]  +  Σ_k A[m][2k+1] · B[k][2n+1]     bf16 in A and B, fp32 in C
//
// The two sums begin at 0, each is a chain of fused multiply-adds over k in rising order, and their sum is added to C.
// Subnormal numbers count as zeros, and are stored as zeros; rounding is to nearest even whatever the thread's state says.
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.)
//
// With ATTN_EXT_EMULATE_AMX the same in plain C++, bit by bit, for machines without it and for the sanitizers, which do
// not see what these instructions read and write.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(ATTN_EXT_EMULATE_AMX)
#include <bit>
#include <cmath>
#endif

namespace attn_ext::cpu::amx {

inline constexpr int kTiles = 8;
inline constexpr int kTileRows = 16;    // of A and C, and pairs of rows of B
inline constexpr int kTileColumns = 16;  // of C; of B in pairs
inline constexpr int kTileDepth = 32;   // numbers along k

#if defined(ATTN_EXT_EMULATE_AMX)

// The registers of this thread.
struct Registers {
  alignas(64) unsigned char bytes[kTiles][kTileRows][64];
};
inline Registers& registers() {
  static thread_local Registers r;
  return r;
}

// While it lives the thread has tiles, all of full size.
class Session {};

template <int T>
void load(const void* from, int64_t stride) {
  for (int64_t r = 0; r < kTileRows; ++r) {
    std::memcpy(registers().bytes[T][r], static_cast<const char*>(from) + r * stride, 64);
  }
}

template <int T>
void store(void* to, int64_t stride) {
  for (int64_t r = 0; r < kTileRows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, registers().bytes[T][r], 64);
  }
}

template <int T>
void zero() {
  std::memset(registers().bytes[T], 0, sizeof registers().bytes[T]);
}

inline float without_subnormals(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

template <int C, int A, int B>
void multiply_add() {
  const auto number = [](const unsigned char* row, int at) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * at, sizeof bits);
    return without_subnormals(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  };
  Registers& r = registers();
  for (int m = 0; m < kTileRows; ++m) {
    for (int n = 0; n < kTileColumns; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < kTileDepth / 2; ++k) {
        even = without_subnormals(
            std::fma(number(r.bytes[A][m], 2 * k), number(r.bytes[B][k], 2 * n), even));
        odd = without_subnormals(
            std::fma(number(r.bytes[A][m], 2 * k + 1), number(r.bytes[B][k], 2 * n + 1), odd));
      }
      std::memcpy(&sum, r.bytes[C][m] + 4 * n, sizeof sum);
      sum = without_subnormals(without_subnormals(sum) + without_subnormals(even + odd));
      std::memcpy(r.bytes[C][m] + 4 * n, &sum, sizeof sum);
    }
  }
}

#else

class Session {
 public:
  Session() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < kTiles; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = kTileRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Session() { asm volatile("tilerelease"); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

template <int T>
[[gnu::always_inline]] inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
[[gnu::always_inline]] inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int T>
[[gnu::always_inline]] inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int C, int A, int B>
[[gnu::always_inline]] inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace attn_ext::cpu::amx
