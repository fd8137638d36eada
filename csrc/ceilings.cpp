// Measures peak FMA, peak bf16 products and read bandwidth. Each kernel below is compiled for its own instruction
// set by a target attribute and runs only after the CPU and the OS (XGETBV, in __builtin_cpu_supports) were asked.
#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/isa/amx_bf16/tiles.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/features.h"

namespace attn_ext::ceilings {
namespace {

using Clock = std::chrono::steady_clock;

// ---- 1. Who runs: threads, windows, median -------------------------------------------------------------------------

constexpr int kWindows = 9;  // after one more that only warms up (clock frequency, page tables)

// Work a thread had done by the end of a window, and when that was.
struct Mark {
  double work = 0;
  Clock::time_point at;
};

// Returns work per second of all threads together. Each thread calls prepare(thread) once, then chunk(thread), which
// returns the work it did, until the time is over. Windows end at fixed times of the common clock, so that threads need
// no barrier between them, and a thread's rate in a window is its own work over its own time.
template <class Prepare, class Chunk>
double median_rate(int threads, double seconds, const Prepare& prepare, const Chunk& chunk) {
  std::vector<std::vector<Mark>> marks(threads, std::vector<Mark>(kWindows + 2));
  std::vector<std::exception_ptr> errors(threads);
  std::atomic<int> ready{0};
  enum : int { kWait, kGo, kAbort };
  std::atomic<int> gate{kWait};
  Clock::time_point start;  // written before the gate opens
  const auto window =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds / (kWindows + 1)));

  const auto body = [&](int thread) {
    try {
      prepare(thread);
    } catch (...) {
      errors[thread] = std::current_exception();
    }
    ready.fetch_add(1);
    while (gate.load(std::memory_order_acquire) == kWait) std::this_thread::yield();
    if (gate.load() == kAbort) return;
    double work = 0;
    marks[thread][0] = {0, Clock::now()};
    for (int w = 1; w < kWindows + 2; ++w) {
      const auto end = start + w * window;
      auto now = Clock::now();
      do {  // at least one chunk, however late this thread is
        work += chunk(thread);
        now = Clock::now();
      } while (now < end);
      marks[thread][w] = {work, now};
    }
  };

  std::vector<std::thread> pool;
  pool.reserve(threads);
  try {
    for (int t = 0; t < threads; ++t) pool.emplace_back(body, t);
  } catch (...) {
    gate.store(kAbort);
    for (auto& thread : pool) thread.join();
    throw;
  }
  while (ready.load() < threads) std::this_thread::yield();
  const bool failed = std::any_of(errors.begin(), errors.end(), [](const auto& error) { return error != nullptr; });
  start = Clock::now();
  gate.store(failed ? kAbort : kGo, std::memory_order_release);
  for (auto& thread : pool) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }

  std::vector<double> rates(kWindows, 0.0);
  for (const auto& mark : marks) {
    for (int w = 0; w < kWindows; ++w) {
      const std::chrono::duration<double> took = mark[w + 2].at - mark[w + 1].at;
      rates[w] += (mark[w + 2].work - mark[w + 1].work) / std::max(took.count(), 1e-9);
    }
  }
  std::nth_element(rates.begin(), rates.begin() + kWindows / 2, rates.end());
  return rates[kWindows / 2];
}

void check_common(const char* who, int threads, double seconds) {
  if (threads < 1 || threads > 4096) {
    throw std::invalid_argument(std::string(who) + ": threads must be 1 to 4096, got " + std::to_string(threads));
  }
  if (!(seconds > 0 && seconds <= 60)) {  // also refuses NaN
    throw std::invalid_argument(std::string(who) + ": seconds must be above 0 and at most 60, got " +
                                std::to_string(seconds));
  }
}

// ---- 2. Peak FMA ---------------------------------------------------------------------------------------------------

// Runs `rounds` rounds of `kChains` independent multiply-adds, x ← x·m + a, over registers and returns a sum of all x,
// so that none of it is dead. The chains start at different values and m, a come from memory: nothing folds, and with
// m = a = ½ each x tends to 1, never to a denormal, NaN or Inf. kChains covers latency × ports (4 × 2 on x86, 4 × 4 on
// wide ARM cores), and leaves two registers for m and a.
template <class T>
using FmaKernel = double (*)(int64_t rounds, const T* m_and_a);

#define ATTN_EXT_UNROLL _Pragma("GCC unroll 16")  // without it some gccs keep x in memory; clang reads it too

#define ATTN_EXT_FMA_KERNEL(name, target_attribute, T, Vec, kChains, set1, fma)       \
  target_attribute double name(int64_t rounds, const T* m_and_a) {                    \
    const Vec m = set1(m_and_a[0]), a = set1(m_and_a[1]);                             \
    Vec x[kChains];                                                                   \
    ATTN_EXT_UNROLL for (int c = 0; c < kChains; ++c) x[c] = set1(static_cast<T>(c)); \
    for (int64_t round = 0; round < rounds; ++round) {                                \
      ATTN_EXT_UNROLL for (int c = 0; c < kChains; ++c) x[c] = fma(x[c], m, a);       \
    }                                                                                 \
    Vec total = x[0];                                                                 \
    ATTN_EXT_UNROLL for (int c = 1; c < kChains; ++c) total += x[c];                  \
    T lanes[sizeof(Vec) / sizeof(T)];                                                 \
    std::memcpy(lanes, &total, sizeof(Vec));                                          \
    double sum = 0;                                                                   \
    for (const T lane : lanes) sum += static_cast<double>(lane);                      \
    return sum;                                                                       \
  }

// For any other machine: 16-byte vectors of the compiler's own, a multiply and an add where there is no FMA to call.
template <class T>
struct Portable {
  typedef T Vec __attribute__((vector_size(16)));
  static inline Vec set1(T x) { return Vec{} + x; }
  static inline Vec fma(Vec x, Vec m, Vec a) { return x * m + a; }
};
ATTN_EXT_FMA_KERNEL(fma_f32_portable, , float, Portable<float>::Vec, 8, Portable<float>::set1, Portable<float>::fma)
ATTN_EXT_FMA_KERNEL(fma_f64_portable, , double, Portable<double>::Vec, 8, Portable<double>::set1, Portable<double>::fma)

#if defined(__x86_64__)
#define ATTN_EXT_AVX2 __attribute__((target("avx2,fma")))
#define ATTN_EXT_AVX512 __attribute__((target("avx512f")))
ATTN_EXT_FMA_KERNEL(fma_f32_avx2, ATTN_EXT_AVX2, float, __m256, 12, _mm256_set1_ps, _mm256_fmadd_ps)
ATTN_EXT_FMA_KERNEL(fma_f64_avx2, ATTN_EXT_AVX2, double, __m256d, 12, _mm256_set1_pd, _mm256_fmadd_pd)
ATTN_EXT_FMA_KERNEL(fma_f32_avx512, ATTN_EXT_AVX512, float, __m512, 16, _mm512_set1_ps, _mm512_fmadd_ps)
ATTN_EXT_FMA_KERNEL(fma_f64_avx512, ATTN_EXT_AVX512, double, __m512d, 16, _mm512_set1_pd, _mm512_fmadd_pd)
#elif defined(__aarch64__)
// FMLA overwrites its addend: x ← x + m·a, where x grows by ¼ a round, needs no copy.
inline float32x4_t fma_f32x4(float32x4_t x, float32x4_t m, float32x4_t a) { return vfmaq_f32(x, m, a); }
inline float64x2_t fma_f64x2(float64x2_t x, float64x2_t m, float64x2_t a) { return vfmaq_f64(x, m, a); }
ATTN_EXT_FMA_KERNEL(fma_f32_neon, , float, float32x4_t, 16, vdupq_n_f32, fma_f32x4)
ATTN_EXT_FMA_KERNEL(fma_f64_neon, , double, float64x2_t, 16, vdupq_n_f64, fma_f64x2)
#endif

struct WidestFma {
  FmaKernel<float> f32;
  FmaKernel<double> f64;
  int vector_bytes;
  int chains;
};

WidestFma widest_fma() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {fma_f32_avx512, fma_f64_avx512, 64, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {fma_f32_avx2, fma_f64_avx2, 32, 12};
#elif defined(__aarch64__)
  return {fma_f32_neon, fma_f64_neon, 16, 16};
#endif
  return {fma_f32_portable, fma_f64_portable, 16, 8};
}

// What the kernels' sums are stored in: a volatile store cannot be left out.
template <class T>
class Sink {
 public:
  void keep(T value) { kept_ = value; }

 private:
  alignas(64) volatile T kept_ = T{};  // one cache line a thread
};

constexpr int64_t kRoundsPerChunk =
    4096;  // ten to a hundred microseconds: far above the clock's cost, far below a window

// Returns the GFLOP/s of a kernel that does `flops_per_round` in each round.
template <class T>
double kernel_gflops(FmaKernel<T> kernel, double flops_per_round, int threads, double seconds) {
  volatile T half = static_cast<T>(0.5);  // read once, opaque to the optimizer
  const T m_and_a[2] = {half, half};
  std::vector<Sink<double>> sinks(threads);
  const double rate = median_rate(
      threads, seconds, [](int) {},
      [&](int thread) {
        sinks[thread].keep(kernel(kRoundsPerChunk, m_and_a));
        return flops_per_round * kRoundsPerChunk;
      });
  return rate / 1e9;
}

// ---- 3. Peak bf16 products -----------------------------------------------------------------------------------------

#if defined(__x86_64__)
// The same kernel over x ← x + Σ of two products a lane. A float ½ read as two bf16 numbers is (0, ½), so x grows by ¼
// a round and stays a normal number for all rounds of a chunk.
#define ATTN_EXT_BF16 __attribute__((target("avx512f,avx512bf16")))
ATTN_EXT_BF16 inline __m512 dot_bf16(__m512 x, __m512 m, __m512 a) {
  return _mm512_dpbf16_ps(x, (__m512bh)m, (__m512bh)a);
}
ATTN_EXT_FMA_KERNEL(dot_bf16_avx512, ATTN_EXT_BF16, float, __m512, 16, _mm512_set1_ps, dot_bf16)
constexpr double kDotFlops = 64.0 * 16;  // a round: 16 chains

// Four products of tiles a round, each into sums of its own: their latency is a little over three of them. The tiles hold
// pairs (0, ½) as above, so a sum grows by 4 a round.
double products_of_tiles(int64_t rounds, const float* m_and_a) {
  using namespace cpu::amx;
  alignas(64) float numbers[kTileRows][kTileColumns];
  std::fill(&numbers[0][0], &numbers[0][0] + kTileRows * kTileColumns, m_and_a[0]);
  const Session session;
  load<4>(numbers, sizeof numbers[0]);
  load<5>(numbers, sizeof numbers[0]);
  load<6>(numbers, sizeof numbers[0]);
  load<7>(numbers, sizeof numbers[0]);
  zero<0>();
  zero<1>();
  zero<2>();
  zero<3>();
  for (int64_t round = 0; round < rounds; ++round) {
    multiply_add<0, 4, 6>();
    multiply_add<1, 4, 7>();
    multiply_add<2, 5, 6>();
    multiply_add<3, 5, 7>();
  }
  store<3>(numbers, sizeof numbers[0]);
  return static_cast<double>(numbers[0][0]);
}
constexpr double kTileFlops = 2.0 * cpu::amx::kTileRows * cpu::amx::kTileColumns * cpu::amx::kTileDepth * 4;
#endif

// ---- 4. Read bandwidth ---------------------------------------------------------------------------------------------

constexpr int64_t kStreams = 4;              // places of a buffer read side by side, as K and V of two heads would be
constexpr int64_t kSliceBytes = 256 * 1024;  // of each stream, read between two looks at the clock

// How far ahead of its loads each stream prefetches. What is best differs from machine to machine (0: the hardware's
// own prefetchers alone), so each is measured and the fastest is the ceiling.
constexpr int64_t kPrefetchBytes[] = {0, 2048, 8192};
constexpr int64_t kFarthestPrefetch = 8192;

// Returns the xor of `lines` cache lines in each of kStreams streams that start `stride` bytes apart.
using ReadKernel = uint64_t (*)(const std::byte* from, int64_t stride, int64_t lines, int64_t prefetch_bytes);

#define ATTN_EXT_READ_KERNEL(name, target_attribute, kVectorBytes)                                               \
  target_attribute uint64_t name(const std::byte* from, int64_t stride, int64_t lines, int64_t prefetch_bytes) { \
    typedef uint64_t Vec __attribute__((vector_size(kVectorBytes), may_alias));                                  \
    constexpr int kPerLine = 64 / kVectorBytes;                                                                  \
    Vec sums[kStreams][kPerLine] = {};                                                                           \
    for (int64_t line = 0; line < lines; ++line) {                                                               \
      for (int64_t s = 0; s < kStreams; ++s) {                                                                   \
        const std::byte* at = from + s * stride + line * 64;                                                     \
        __builtin_prefetch(at + prefetch_bytes);                                                                 \
        for (int i = 0; i < kPerLine; ++i) sums[s][i] ^= reinterpret_cast<const Vec*>(at)[i];                    \
      }                                                                                                          \
    }                                                                                                            \
    uint64_t all = 0;                                                                                            \
    for (const auto& stream : sums) {                                                                            \
      for (const Vec& sum : stream) {                                                                            \
        for (size_t i = 0; i < sizeof(Vec) / 8; ++i) all ^= sum[i];                                              \
      }                                                                                                          \
    }                                                                                                            \
    return all;                                                                                                  \
  }

ATTN_EXT_READ_KERNEL(read_portable, , 16)
#if defined(__x86_64__)
ATTN_EXT_READ_KERNEL(read_avx2, ATTN_EXT_AVX2, 32)
ATTN_EXT_READ_KERNEL(read_avx512, ATTN_EXT_AVX512, 64)
#endif

ReadKernel widest_read() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return read_avx2;
#endif
  return read_portable;
}

struct FreeBytes {
  void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte[], FreeBytes>;

}  // namespace

// ---- 5. The three questions ----------------------------------------------------------------------------------------

double measure_fma_peak(int threads, double seconds, const std::string& dtype) {
  check_common("measure_fma_peak", threads, seconds);
  const WidestFma fma = widest_fma();
  const double bytes_per_round = fma.chains * fma.vector_bytes;
  if (dtype == "float32") return kernel_gflops<float>(fma.f32, 2 * bytes_per_round / sizeof(float), threads, seconds);
  if (dtype == "float64") return kernel_gflops<double>(fma.f64, 2 * bytes_per_round / sizeof(double), threads, seconds);
  throw std::invalid_argument("measure_fma_peak: dtype must be \"float32\" or \"float64\", got \"" + dtype + "\"");
}

std::optional<double> measure_bf16_peak(int threads, double seconds, const std::string& isa) {
  check_common("measure_bf16_peak", threads, seconds);
  if (isa != "amx_bf16" && isa != "avx512_bf16") {
    throw std::invalid_argument("measure_bf16_peak: isa must be \"amx_bf16\" or \"avx512_bf16\", got \"" + isa + "\"");
  }
#if defined(__x86_64__)
  if (isa == "amx_bf16" && cpu::has_feature("amx_bf16")) {
    return kernel_gflops<float>(products_of_tiles, kTileFlops, threads, seconds);
  }
  if (isa == "avx512_bf16" && cpu::has_feature("avx512f") && cpu::has_feature("avx512bf16")) {
    return kernel_gflops<float>(dot_bf16_avx512, kDotFlops, threads, seconds);
  }
#endif
  return std::nullopt;
}

double measure_read_bandwidth(int threads, int64_t bytes_per_thread, double seconds) {
  check_common("measure_read_bandwidth", threads, seconds);
  if (bytes_per_thread < (1 << 20) || bytes_per_thread > (int64_t{1} << 40)) {
    throw std::invalid_argument("measure_read_bandwidth: bytes_per_thread must be 1 MiB to 1 TiB, got " +
                                std::to_string(bytes_per_thread));
  }
  // Whole slices only. The last prefetches reach past the last stream: the buffer is that much longer.
  const int64_t slices = std::max<int64_t>(1, bytes_per_thread / (kStreams * kSliceBytes));
  const int64_t stride = slices * kSliceBytes;
  const int64_t bytes = kStreams * stride;
  const ReadKernel read = widest_read();
  std::vector<Buffer> buffers(threads);
  for (Buffer& buffer : buffers) {
    buffer.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes + kFarthestPrefetch)));
    if (!buffer) throw std::bad_alloc();
  }
  std::vector<Sink<uint64_t>> sinks(threads);
  std::vector<int64_t> next(threads * 8, 0);  // the next slice of a thread; 8 apart: one cache line a thread
  double best = 0;
  for (const int64_t prefetch_bytes : kPrefetchBytes) {
    const double rate = median_rate(
        threads, seconds / std::size(kPrefetchBytes),
        // Written first by a thread of its own (on a NUMA machine: near it), with bytes the compiler does not know.
        [&](int thread) {
          if (prefetch_bytes == kPrefetchBytes[0]) std::memset(buffers[thread].get(), 1 + thread % 255, bytes);
        },
        [&](int thread) {
          int64_t& slice = next[thread * 8];
          sinks[thread].keep(
              read(buffers[thread].get() + slice * kSliceBytes, stride, kSliceBytes / 64, prefetch_bytes));
          slice = (slice + 1) % slices;
          return static_cast<double>(kStreams * kSliceBytes);
        });
    best = std::max(best, rate);
  }
  return best / 1e9;
}

}  // namespace attn_ext::ceilings
