// Kernels on torch's own threads.
#pragma once

#include "cpu/parallel.h"

namespace attn_ext {

// As many threads as torch.get_num_threads(); one in a process forked from this one, where torch's pool would hang.
cpu::Parallel torch_parallel();

// Default rounding, no flush-to-zero, for as long as it lives; then what the thread had before. Results do not depend
// on torch.set_flush_denormal or on what a library left behind.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned long long saved_;
};

}  // namespace attn_ext
