#include "torch_parallel.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>
#include <mutex>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace attn_ext {
namespace {

std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
#endif

void run_on_torch_threads(int workers, cpu::WorkerBody body, void* context) {
  // An exception that crosses torch's C interface loses its type and its words, so the first one waits here.
  std::exception_ptr error;
  std::mutex lock;
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    const FloatEnvironment environment;
    try {
      for (int64_t w = begin; w < end; ++w) body(context, static_cast<int>(w));
    } catch (...) {
      const std::lock_guard<std::mutex> guard(lock);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace

cpu::Parallel torch_parallel() {
  if (forked.load(std::memory_order_relaxed)) return {};
  return {static_cast<int>(torch::stable::get_num_threads()), run_on_torch_threads};
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(0ULL));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() = default;
#endif

}  // namespace attn_ext
