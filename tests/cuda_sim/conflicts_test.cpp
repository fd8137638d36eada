// What the layouts of shared memory are for: how often a bank must serve twice.
#include "problem.h"
#include "simulator.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

// The share of passes that conflicts add, in per cent of the accesses.
double conflicts(const Case& c, bool gradients) {
  const Problem problem(c);
  const Forward forward = run_forward(problem);
  cuda_sim::reset_statistics(true);
  if (gradients) {
    run_backward(problem, forward);
  } else {
    run_forward(problem);
  }
  const cuda_sim::Statistics s = cuda_sim::statistics();
  cuda_sim::reset_statistics();
  CHECK(s.shared_accesses > 0, "nothing was counted");
  return 100.0 * static_cast<double>(s.bank_conflicts) / static_cast<double>(s.shared_accesses);
}

TEST(conflicts, of_the_general_kernels) {
  for (const int64_t D : {64, 128}) {
    Case c{.name = "conflicts", .Lq = 64, .Lk = 64, .D = D, .Dv = D};
    for (const bool gradients : {false, true}) {
      c.dtype = DType::float32;
      const double single = conflicts(c, gradients);
      CHECK(single == 0, "fp32, D %ld, gradients %d: %g %%", long(D), gradients, single);
      c.dtype = DType::float64;  // pitches are chosen for words of four bytes
      const double twice = conflicts(c, gradients);
      CHECK(twice < 6, "fp64, D %ld, gradients %d: %g %%", long(D), gradients, twice);
    }
  }
}

TEST(conflicts, of_the_kernels_on_tensor_cores) {
  for (const int64_t D : {64, 128, 256}) {
    for (const Causal causal : {Causal::none, Causal::top_left}) {
      const Case c{
          .name = "conflicts", .dtype = DType::bfloat16, .Lq = 64, .Lk = 64, .D = D, .Dv = D, .causal = causal};
      for (const bool gradients : {false, true}) {
        const double share = conflicts(c, gradients);
        CHECK(share == 0, "D %ld, gradients %d: %g %%", long(D), gradients, share);
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::test
