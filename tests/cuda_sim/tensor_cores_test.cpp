// What only the kernels on tensor cores can get wrong: their three widths, several blocks of rows, rows that do not come in
// chunks of 16 bytes, NaN beside hidden pairs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cuda/kernels.h"
#include "cuda/primitives.cuh"
#include "cuda_sim/kernels.h"
#include "problem.h"
#include "simulator.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr DType kFormats[] = {DType::bfloat16, DType::float16};

TEST(tensor_cores, widths) {
  int64_t n = 0;
  for (const DType dtype : kFormats) {
    for (const int64_t D : {16, 40, 64, 72, 96, 128, 136, 250, 256}) {
      for (const int64_t Dv : {D, int64_t{1}, int64_t{24}, int64_t{200}}) {
        ++n;
        Case c{.name = "width",
               .dtype = dtype,
               .Hq = 2,
               .Lq = 33 + n % 3 * 40,
               .Lk = 70,
               .D = D,
               .Dv = Dv,
               .grad_lse = n % 2 == 0,
               .seed = static_cast<uint64_t>(n)};
        if (n % 3 == 1) c.causal = Causal::bottom_right;
        if (n % 3 == 2) c.scale = -0.07;
        check_case(c);
      }
    }
  }
}

// More rows than a block has, of several heads; tiles that nobody of a warp, or of a block, sees.
TEST(tensor_cores, blocks_of_rows) {
  int64_t n = 0;
  for (const DType dtype : kFormats) {
    for (const int64_t D : {32, 100, 160}) {
      for (const int64_t window : {kUnbounded, int64_t{0}, int64_t{70}}) {
        ++n;
        check_case({.name = "blocks",
                    .dtype = dtype,
                    .Hq = 4,
                    .Hkv = 2,
                    .Lq = 150,
                    .Lk = 150 + n % 2 * 101,
                    .D = D,
                    .Dv = D,
                    .causal = n % 2 ? Causal::bottom_right : Causal::top_left,
                    .window_left = window,
                    .window_right = n % 4 == 0 ? 3 : kUnbounded,
                    .grad_lse = true,
                    .seed = static_cast<uint64_t>(n)});
      }
    }
  }
}

// Everything at once, at each width; rows at odd addresses and in other orders.
TEST(tensor_cores, options) {
  int64_t n = 0;
  for (const DType dtype : kFormats) {
    for (const int64_t D : {24, 120, 144}) {
      for (const Layout layout : {Layout::plain, Layout::transposed, Layout::padded, Layout::strided}) {
        ++n;
        Case c{.name = "options",
               .dtype = dtype,
               .B1 = 2,
               .Hq = 2,
               .Lq = 70,
               .Lk = 90,
               .D = D,
               .Dv = D - 7,
               .layout = layout,
               .mask = n % 2 ? "hij" : "Bj",
               .bias = {"hij", "j"},
               .bias_dtype = n % 3 == 0   ? DType::float64
                             : n % 3 == 1 ? dtype
                                          : DType::float32,
               .bias_hides = 0.2,
               .alibi = 1,
               .sinks = n % 2 == 0,
               .key_lengths = {90, 41},
               .softcap = n % 3 == 0 ? 0.0 : 1.5,
               .dropout_p = n % 3 == 2 ? 0.0 : 0.3,
               .grad_lse = true,
               .poison_hidden = true,
               .seed = static_cast<uint64_t>(n)};
        check_case(c);
      }
    }
  }
}

// Where a block has too little shared memory the general kernels take over.
TEST(tensor_cores, small_gpus) {
  const Case c{.name = "small GPU", .dtype = DType::bfloat16, .Lq = 20, .Lk = 30, .D = 256, .Dv = 256};
  ForwardParams forward;
  BackwardParams backward;
  const Problem problem(c);
  static_cast<AttentionParams&>(forward) = static_cast<AttentionParams&>(backward) = problem.params();
  struct Device {
    size_t shared_bytes;
    bool forward_fits, backward_fits;
  };
  for (const auto& [bytes, forward_fits, backward_fits] :
       {Device{163 * 1024, true, true}, Device{99 * 1024, true, false}, Device{48 * 1024, false, false}}) {
    cuda::most_shared = bytes;
    CHECK(cuda::fits_mma(forward) == forward_fits && cuda::fits_mma(backward) == backward_fits, "%zu bytes", bytes);
    check_case(c);
  }
  cuda::most_shared = 163 * 1024;
}

// What attn_ext.explain says a forward would launch is what it launches.
TEST(tensor_cores, plans) {
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const int64_t D : {64, 128, 200}) {
      for (const size_t bytes : {size_t{163 * 1024}, size_t{48 * 1024}}) {
        cuda::most_shared = bytes;
        // Many rows, and few against keys that blocks share out.
        const bool shares = D == 128;
        const Problem problem({.name = "plan",
                               .dtype = dtype,
                               .Hq = 4,
                               .Hkv = 2,
                               .Lq = shares ? 2 : 150,
                               .Lk = shares ? 1100 : 70,
                               .D = D,
                               .Dv = D});
        ForwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        const cuda::ForwardPlan plan = cuda_sim::plan_forward(p);
        int64_t planned = 0, blocks = 0, launches = 0;
        for (const cuda::Launch& launch : plan.launches) {
          planned += launch.blocks;
          CHECK(launch.shared_bytes <= bytes, "%zu of %zu bytes", launch.shared_bytes, bytes);
        }
        for (int run = 0; run < 2; ++run) {  // one of them with all its blocks
          cuda_sim::reset_statistics();
          run_forward(problem);
          blocks = std::max(blocks, cuda_sim::statistics().blocks);
          launches = cuda_sim::statistics().launches;
        }
        CHECK(launches == (shares ? 2 : 1), "D %ld: %ld launches", long(D), long(launches));
        CHECK(static_cast<int64_t>(plan.launches.size()) == launches && planned == blocks, "D %ld: %ld blocks, not %ld",
              long(D), long(blocks), long(planned));
        const bool on_tensor_cores = dtype == DType::bfloat16 && (D == 64 || bytes > 100 * 1024);
        const std::string kernel = on_tensor_cores ? "forward_mma" : "forward_general";
        CHECK(plan.launches.front().kernel == kernel, "D %ld: %s", long(D), plan.launches.front().kernel.c_str());
        const bool of_memory = dtype == DType::bfloat16 && !on_tensor_cores;
        CHECK((std::string(plan.why).find("shared memory") != std::string::npos) == of_memory, "%s", plan.why);
      }
    }
  }
  cuda::most_shared = 163 * 1024;
}

// A block has rows that are none. Inf in k, which makes −Inf of every score that there is, must not come back through them.
TEST(tensor_cores, rows_that_are_none) {
  const Case c{.name = "no rows", .dtype = DType::bfloat16, .Lq = 5, .Lk = 64, .D = 16, .Dv = 16};
  Problem problem(c);
  for (int64_t i = 0; i < c.Lq; ++i) problem.q.set(0, 0, 0, i, 3, -1);
  problem.k.set(0, 0, 0, 7, 3, std::numeric_limits<double>::infinity());
  const Gradients g = run_backward(problem, run_forward(problem));
  for (int64_t j = 0; j < c.Lk; ++j) {
    for (int64_t d = 0; d < c.D; ++d) {
      const double dk = g.dk.get(0, 0, 0, j, d), dv = g.dv.get(0, 0, 0, j, d);
      CHECK(std::isfinite(dk) && std::isfinite(dv) && (j != 7 || (dk == 0 && dv == 0)), "key %ld, %ld: dk %g, dv %g",
            long(j), long(d), dk, dv);
    }
  }
}

}  // namespace
}  // namespace attn_ext::test
