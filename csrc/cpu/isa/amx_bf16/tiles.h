// The tile registers of AMX: eight of 16 rows × 64 bytes, and the instruction that multiplies two of them.
//
//   C[m][n] += Σ_k A[m][2k] · B[k][2n]  +  Σ_k A[m][2k+1] · B[k][2n+1]     bf16 in A and B, fp32 in C
//   C[m][n] += Σ_k Σ_{b<4} A[m][4k+b] · B[k][4n+b]                        int8 in A and B, int32 in C
//
// Of bf16 the two sums begin at 0, each is a chain of fused multiply-adds over k in rising order, and their sum is added to C.
// Subnormal numbers count as zeros, and are stored as zeros; rounding is to nearest even whatever the thread's state says.
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD.)
//
// With ATTN_EXT_EMULATE_AMX the kernels get the same in plain C++, bit by bit, for machines without it and for the
// sanitizers, which do not see what these instructions read and write.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>

#include "cpu/isa/avx512_bf16/emulation.h"

namespace attn_ext::cpu::amx {

inline constexpr int kTiles = 8;
inline constexpr int kTileRows = 16;     // of A and C, and pairs of rows of B
inline constexpr int kTileColumns = 16;  // of C; of B in pairs
inline constexpr int kTileDepth = 32;    // numbers along k

namespace hardware {

// While it lives the thread has tiles, all of full size and zeros.
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

// As multiply_add, of bytes with a sign.
template <int C, int A, int B>
[[gnu::always_inline]] inline void multiply_add_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace hardware

namespace emulated {

// The registers of this thread.
struct Registers {
  bool configured = false;
  alignas(64) unsigned char bytes[kTiles][kTileRows][64];
};

inline Registers& all_registers() {
  static thread_local Registers r;
  return r;
}

inline Registers& registers() {
  assert(all_registers().configured);  // outside of a Session the instructions are invalid
  return all_registers();
}

class Session {
 public:
  Session() {
    all_registers().configured = true;
    std::memset(all_registers().bytes, 0, sizeof all_registers().bytes);
  }
  ~Session() { all_registers().configured = false; }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

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

// C, A and B as bytes of a register.
inline void multiply_add(unsigned char (&c)[kTileRows][64], const unsigned char (&a)[kTileRows][64],
                         const unsigned char (&b)[kTileRows][64]) {
  const auto numbers = [](const unsigned char(&bytes)[kTileRows][64], float(&to)[kTileRows][kTileDepth]) {
    for (int r = 0; r < kTileRows; ++r) {
      bf16 row[kTileDepth];
      std::memcpy(row, bytes[r], sizeof row);
      for (int k = 0; k < kTileDepth; ++k) to[r][k] = emulation::number(row[k]);
    }
  };
  float left[kTileRows][kTileDepth], right[kTileRows][kTileDepth];
  numbers(a, left);
  numbers(b, right);
  for (int m = 0; m < kTileRows; ++m) {
    float sums[kTileColumns];
    std::memcpy(sums, c[m], sizeof sums);
    for (int n = 0; n < kTileColumns; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < kTileDepth / 2; ++k) {
        even = emulation::multiply_add(left[m][2 * k], right[k][2 * n], even);
        odd = emulation::multiply_add(left[m][2 * k + 1], right[k][2 * n + 1], odd);
      }
      const float product = emulation::without_subnormals(even + odd);
      sums[n] = emulation::without_subnormals(emulation::without_subnormals(sums[n]) + product);
    }
    std::memcpy(c[m], sums, sizeof sums);
  }
}

template <int C, int A, int B>
void multiply_add() {
  Registers& r = registers();
  multiply_add(r.bytes[C], r.bytes[A], r.bytes[B]);
}

inline void multiply_add_bytes(unsigned char (&c)[kTileRows][64], const unsigned char (&a)[kTileRows][64],
                               const unsigned char (&b)[kTileRows][64]) {
  for (int m = 0; m < kTileRows; ++m) {
    uint32_t sums[kTileColumns];  // they wrap round
    std::memcpy(sums, c[m], sizeof sums);
    for (int n = 0; n < kTileColumns; ++n) {
      for (int k = 0; k < kTileRows; ++k) {
        for (int i = 0; i < 4; ++i) {
          const int left = static_cast<int8_t>(a[m][4 * k + i]), right = static_cast<int8_t>(b[k][4 * n + i]);
          sums[n] += static_cast<uint32_t>(left * right);
        }
      }
    }
    std::memcpy(c[m], sums, sizeof sums);
  }
}

template <int C, int A, int B>
void multiply_add_bytes() {
  Registers& r = registers();
  multiply_add_bytes(r.bytes[C], r.bytes[A], r.bytes[B]);
}

}  // namespace emulated

#if defined(ATTN_EXT_EMULATE_AMX)
using namespace emulated;
#else
using namespace hardware;
#endif

}  // namespace attn_ext::cpu::amx
