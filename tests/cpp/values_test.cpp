// Numbers that break careless arithmetic: NaN and Inf that nothing may see, NaN that some rows see, huge scores and
// biases, rows whose sink outweighs everything.
#include <cmath>
#include <limits>

#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(values, nan_stays_with_the_rows_that_see_it) {
  for (const DType dtype : kDTypes) {
    for (const int where : {0, 1, 2, 3}) {
      for (const int what : {0, 1, 2, 3}) {
        Case c{.name = "NaN in",
               .dtype = dtype,
               .Hq = 2,
               .Lq = 40,
               .Lk = 40,
               .D = 9,
               .Dv = 17,
               .causal = Causal::top_left,
               .grad_lse = true};
        if (where == 1) c.mask = "ij";
        if (where == 2) {
          c.bias[0] = "hij";
          c.bias_hides = 0.5;
        }
        if (where == 3) c.softcap = 3;
        Problem problem(c);
        Tensor& t = what == 0 ? problem.q : what == 1 ? problem.k : what == 2 ? problem.v : problem.grad_out;
        const Context context(what == 0 ? "q" : what == 1 ? "k" : what == 2 ? "v" : "grad_out");
        for (int64_t d = 0; d < t.sizes()[4]; ++d) t.set(0, 0, 0, 21, d, kNaN);
        check_problem(problem);
      }
    }
  }
}

// Hidden by each means in turn, Inf where every other row sees finite numbers: the same gradients to the last bit as
// with zeros there, and through the path that multiplies nothing hidden.
TEST(values, hidden_numbers_do_not_matter) {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 8, 20, 130}) {
      const bool long_rows = rows == 130;
      Case c{.name = "hidden",
             .dtype = dtype,
             .Hq = 2,
             .Hkv = 1,
             .Lq = rows,
             .Lk = long_rows ? 300 : 50,
             .D = 19,
             .Dv = 35,
             .key_lengths = {long_rows ? 210 : 31},
             .causal = Causal::bottom_right,
             .grad_lse = true};
      const Problem clean(c);
      Problem dirty(c);
      for (int64_t j = c.key_lengths[0]; j < c.Lk; ++j) {
        for (int64_t d = 0; d < c.D; ++d) dirty.k.set(0, 0, 0, j, d, (j + d) % 2 ? kNaN : kInf);
        for (int64_t d = 0; d < c.Dv; ++d) dirty.v.set(0, 0, 0, j, d, (j + d) % 2 ? -kInf : kNaN);
      }
      const Context context(c.text());
      for_each_isa([&] {
        const Forward want = run_forward(clean), got = run_forward(dirty);
        check_same_bits(got, want);
        check_same_bits(run_backward(dirty, got), run_backward(clean, want));
        check_same_bits("weights", run_weights(dirty, got), run_weights(clean, want));
      });
    }
  }
}

// One key's value is NaN; the first rows see it, the last one does not. Few rows read v where it lies, and find out about
// the NaN at the last row: the rows before it must not lose keys to what scratch memory holds from an earlier call.
TEST(values, rows_before_the_one_that_hides_a_nan) {
  for (const DType dtype : kDTypes) {
    const Case c{.name = "hidden late", .dtype = dtype, .Lq = 3, .Lk = 20, .D = 8, .Dv = 16, .window_left = 1};
    Case before = c;
    before.window_left = kUnbounded;
    before.key_lengths = {10};
    Problem leaves_traces(before);  // hides keys 10 … from every row
    for (int64_t j = 10; j < c.Lk; ++j) leaves_traces.v.set(0, 0, 0, j, 0, kNaN);
    const Problem clean(c);
    Problem dirty(c);
    dirty.v.set(0, 0, 0, 17, 0, kNaN);  // rows 0 to 2 stand at keys 17 to 19
    const Context context(c.text());
    for_each_isa([&] {
      const Forward want = run_forward(clean);
      run_forward(leaves_traces);
      const Forward got = run_forward(dirty);
      for (int64_t i = 0; i < c.Lq; ++i) {
        for (int64_t d = 0; d < c.Dv; ++d) {
          const double x = got.out.get(0, 0, 0, i, d), clean_x = want.out.get(0, 0, 0, i, d);
          const bool sees = i < 2 && d == 0;
          CHECK(sees ? std::isnan(x) : x == clean_x, "row %d, column %d is %g, not %g", static_cast<int>(i),
                static_cast<int>(d), x, sees ? kNaN : clean_x);
        }
      }
    });
  }
}

// Rows of a decoding step, or of a few tokens: NaN and Inf in values that some of them see, and NaN in the last key.
TEST(values, few_rows_with_nan_and_inf) {
  for (const DType dtype : kDTypes) {
    for (const int64_t Lq : {1, 3, 8, 16, 17, 40}) {
      for (const int64_t Lk : {50, 300}) {
        Case c{.name = "few rows",
               .dtype = dtype,
               .Hq = 2,
               .Lq = Lq,
               .Lk = Lk,
               .D = 9,
               .Dv = 35,
               .causal = Causal::bottom_right};
        Problem problem(c);
        problem.v.set(0, 0, 0, 5, 0, kNaN);
        problem.v.set(0, 0, 0, 6, 1, kInf);
        problem.v.set(0, 0, 0, 7, 2, kInf);
        problem.v.set(0, 0, 0, Lk - 7, 2, -kInf);  // with the other one NaN
        problem.v.set(0, 0, 0, Lk - 2, 3, kInf);
        problem.v.set(0, 0, 0, Lk - 2, 34, kNaN);
        problem.k.set(0, 0, 0, Lk - 1, 0, kNaN);
        const Context context(c.text());
        const Forward want = reference_forward(problem);
        for_each_isa([&] {
          const Forward got = run_forward(problem);
          want.out.for_each([&](int64_t, int64_t, int64_t h, int64_t i, int64_t d) {
            const double x = got.out.get(0, 0, h, i, d), y = want.out.get(0, 0, h, i, d);
            const bool right = std::isfinite(y) ? std::fabs(x - y) < 0.02 : std::isnan(y) ? std::isnan(x) : x == y;
            CHECK(right, "[%d][%d][%d] is %g, not %g", static_cast<int>(h), static_cast<int>(i), static_cast<int>(d), x,
                  y);
          });
        });
      }
    }
  }
}

TEST(values, huge_scores) {
  // Exact products: 2^60 and small steps below it that fp32 still tells apart.
  for (const DType dtype : {DType::float32, DType::float64}) {
    for (const double size : {0x1p30, 0x1p60, 0x1p100, -0x1p60}) {
      for (const double scale : {1.0, -1.0, 0x1p-30, 0x1p-60}) {
        Case c{.name = "huge", .dtype = dtype, .Lq = 2, .Lk = 20, .D = 1, .Dv = 3, .scale = scale};
        Problem problem(c);
        problem.q.set(0, 0, 0, 0, 0, 1);
        problem.q.set(0, 0, 0, 1, 0, -1);
        for (int64_t j = 0; j < 20; ++j) {
          problem.k.set(0, 0, 0, j, 0, size * (1 + 0x1p-23 * static_cast<double>(j % 5)));
        }
        const Context context(std::to_string(size) + " times " + std::to_string(scale));
        check_problem(problem);
      }
    }
    // A bias of finfo.min everywhere: plain arithmetic, the mean of v.
    Case c{.name = "huge bias", .dtype = dtype, .Lq = 3, .Lk = 20, .bias = {"ij"}, .bias_dtype = dtype, .scale = 1e-3};
    Problem problem(c);
    problem.bias[0].fill(dtype == DType::float32 ? static_cast<double>(std::numeric_limits<float>::lowest())
                                                 : std::numeric_limits<double>::lowest());
    for_each_isa([&] {
      const Forward got = run_forward(problem);
      const Gradients g = run_backward(problem, got);
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t d = 0; d < 4; ++d) {
          double mean = 0;
          for (int64_t j = 0; j < 20; ++j) mean += problem.v.get(0, 0, 0, j, d) / 20;
          CHECK(std::fabs(got.out.get(0, 0, 0, i, d) - mean) < 1e-6, "out is %g, not the mean %g",
                got.out.get(0, 0, 0, i, d), mean);
        }
      }
      for (int64_t j = 0; j < 20; ++j) {
        double want = 0;
        for (int64_t i = 0; i < 3; ++i) want += problem.grad_out.get(0, 0, 0, i, 0) / 20;
        CHECK(std::fabs(g.dv.get(0, 0, 0, j, 0) - want) < 1e-6, "dv is %g, not %g", g.dv.get(0, 0, 0, j, 0), want);
      }
    });
  }
}

// Every score far below 0, in blocks that end within a vector: what stands behind the last key would outweigh all of them,
// or overflow (e^89 is the first to leave fp32).
TEST(values, scores_far_below_zero) {
  for (const DType dtype : kDTypes) {
    for (const int64_t Lk : {1, 21, 130}) {
      for (const double score : {-89.0, -2048.0}) {
        Problem problem({.name = "far below", .dtype = dtype, .Lq = 19, .Lk = Lk, .D = 8, .Dv = 5, .scale = 1.0});
        problem.q.fill(1);
        problem.k.fill(score / 8);
        for (int64_t j = 0; j < Lk; ++j) problem.k.set(0, 0, 0, j, 0, score / 8 - static_cast<double>(j % 3) / 8);
        const Context context(std::to_string(Lk) + " keys at " + std::to_string(score));
        check_problem(problem);
      }
    }
  }
}

// A key whose scores are −Inf, in plain sight of all rows: its weight 0 times its −Inf is NaN in dq, as in the formula.
// (CUDA's kernels without tensor cores take any score of −Inf for that of a hidden key.)
#if !defined(ATTN_EXT_CUDA_SIM)
TEST(values, a_key_at_minus_infinity) {
  for (const DType dtype : kDTypes) {
    Problem problem({.name = "at -Inf", .dtype = dtype, .Lq = 19, .Lk = 40, .D = 35, .Dv = 5});
    const Context context(problem.c.text());
    problem.q.fill(0.5);
    problem.k.set(0, 0, 0, 33, 7, -kInf);
    check_problem(problem);
  }
}
#endif

TEST(values, sinks_that_outweigh) {
  for (const DType dtype : kDTypes) {
    for (const double sink : {-kInf, -500.0, 100.0, 1e4}) {
      Case c{.name = "sink", .dtype = dtype, .Hq = 2, .Lq = 5, .Lk = 9, .sinks = true, .grad_lse = true};
      Problem problem(c);
      problem.sinks[0] = sink;
      const Context context(std::to_string(sink));
      check_problem(problem);
    }
  }
}

// A call that asks for some of the gradients gets the same ones.
TEST(values, some_gradients) {
  for (const DType dtype : kDTypes) {
    Case c{.name = "some gradients",
           .dtype = dtype,
           .B1 = 2,
           .Hq = 4,
           .Hkv = 2,
           .Lq = 20,
           .Lk = 150,
           .D = 8,
           .Dv = 5,
           .mask = "ij",
           .bias = {"Bhij", "hj"},
           .sinks = true,
           .softcap = 2,
           .dropout_p = 0.3,
           .poison_hidden = true};
    const Problem problem(c);
    for_each_isa([&] {
      const Forward forward = run_forward(problem);
      const Gradients all = run_backward(problem, forward);
      for (unsigned wanted = 0; wanted<64; wanted += thinning()> 1 ? 5 : 1) {
        const Context context("gradients " + std::to_string(wanted));
        const Gradients some = run_backward(problem, forward, 1, wanted);
        check_same_bits("dq", some.dq, all.dq);
        check_same_bits("dk", some.dk, all.dk);
        check_same_bits("dv", some.dv, all.dv);
        for (int n = 0; n < kMaxBiases; ++n) check_same_bits("dbias", some.dbias[n], all.dbias[n]);
        check_same_bits("dsinks", some.dsinks, all.dsinks);
      }
    });
  }
}

}  // namespace
}  // namespace attn_ext::test
