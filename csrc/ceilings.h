// What the machine itself can do: the ceilings that the benchmark's "% of ceiling" is a share of. Torch free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace attn_ext::ceilings {

// All three start `threads` threads of their own, keep them busy for about `seconds` and return the median over several
// short windows of the rate of all threads together. std::invalid_argument where threads is outside 1 … 4096, seconds
// is not in (0, 60] or another argument makes no sense.

// Returns the multiply-adds of registers alone, in GFLOP/s (a multiply-add counts two), with the widest FMA this
// CPU and OS offer: avx512f, avx2 + fma, NEON, or what the compiler makes of plain vectors elsewhere. dtype is
// "float32" or "float64".
double measure_fma_peak(int threads, double seconds, const std::string& dtype);

// Returns the same for products of bf16 numbers summed in fp32, by the instruction of an ISA: "avx512_bf16" (VDPBF16PS: 32
// products summed into 16 floats, 64 flops) or "amx_bf16" (TDPBF16PS: 8,192 products summed into 256 floats, 16,384 flops).
// Nothing where the CPU has none, or the process may not use it. std::invalid_argument for any other name.
std::optional<double> measure_bf16_peak(int threads, double seconds, const std::string& isa);

// Returns how fast memory is read, in GB/s (1e9 bytes), by the best of a few ways to prefetch. Each thread reads its
// own buffer of `bytes_per_thread` over and over, so that number, 1 MiB at least, should be far beyond the last-level
// cache's share of a thread.
double measure_read_bandwidth(int threads, int64_t bytes_per_thread, double seconds);

}  // namespace attn_ext::ceilings
