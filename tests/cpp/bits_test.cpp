// The same bits whoever computes them: any number of threads, a row alone or among others, a batch entry alone or among
// others, a packed sequence or a padded one, segments of keys apart or in one go. Under the thread sanitizer this is also
// the test of what the threads share.
#include <algorithm>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/plan.h"
#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};

void check_threads(const Case& c, bool (*reaches)(const AttentionParams&)) {
  const Problem problem(c);
  const Context context(c.text());
  CHECK(reaches(problem.params()), "the case is too small for what it is meant to test");
  for_each_isa([&] {
    const Forward one = run_forward(problem, 1);
    const Gradients gradients = run_backward(problem, one, 1);
    const Tensor weights = problem.packed() ? Tensor() : run_weights(problem, one, 1);
    for (const int count : {2, 3, 5}) {
      const Context threads_context(std::to_string(count) + " threads");
      check_same_bits(run_forward(problem, count), one);
      check_same_bits(run_backward(problem, one, count), gradients);
      if (weights) check_same_bits("weights", run_weights(problem, one, count), weights);
    }
  });
}

TEST(threads, many_heads) {
  const auto reaches = [](const AttentionParams& p) { return cpu::plan_forward(p, 3).threads == 3; };
  for (const DType dtype : kDTypes) {
    check_threads({.name = "heads",
                   .dtype = dtype,
                   .B1 = 2,
                   .Hq = 4,
                   .Hkv = 2,
                   .Lq = 100,
                   .Lk = 60,
                   .D = 17,
                   .Dv = 16,
                   .mask = "j",
                   .bias = {"hij", "hj"},
                   .alibi = 1,
                   .sinks = true,
                   .causal = Causal::bottom_right,
                   .dropout_p = 0.2,
                   .grad_lse = true},
                  reaches);
  }
  check_threads({.name = "packed",
                 .Hq = 4,
                 .Hkv = 2,
                 .D = 16,
                 .Dv = 16,
                 .layout = Layout::transposed,
                 .sinks = true,
                 .cu_q = {0, 100, 103, 103, 300},
                 .cu_k = {0, 120, 120, 130, 330},
                 .causal = Causal::bottom_right},
                reaches);
}

// Few rows and many keys: the segments of a row are computed by different threads.
TEST(threads, segments) {
  const auto reaches = [](const AttentionParams& p) {
    return cpu::plan_forward(p, 2).segments > 1 && cpu::plan_forward(p, 5).threads > 2;
  };
  for (const DType dtype : kDTypes) {
    check_threads({.name = "segments", .dtype = dtype, .Lq = 4, .Lk = 3000, .D = 33, .Dv = 40}, reaches);
    check_threads({.name = "segments",
                   .dtype = dtype,
                   .Hq = 3,
                   .Lq = 2,
                   .Lk = 3000,
                   .D = 16,
                   .Dv = 17,
                   .bias = {"j"},
                   .sinks = true,
                   .causal = Causal::bottom_right,
                   .window_left = 1500,
                   .dropout_p = 0.1},
                  reaches);
  }
  check_threads({.name = "segments, packed",
                 .Hq = 2,
                 .D = 32,
                 .Dv = 32,
                 .layout = Layout::transposed,
                 .cu_q = {0, 2, 2, 5},
                 .cu_k = {0, 2500, 2600, 2700}},
                [](const AttentionParams& p) { return cpu::plan_forward(p, 5).segments > 1; });
}

// One head and many keys: the key blocks of a head hand dq on to one another.
TEST(threads, wavefront) {
  const auto reaches = [](const AttentionParams& p) {
    return cpu::plan_backward(p, 2).wavefront && cpu::plan_backward(p, 3).wavefront;
  };
  for (const DType dtype : kDTypes) {
    for (const int64_t D : {16, 13, 100}) {  // dq summed in place, or apart
      check_threads({.name = "wavefront",
                     .dtype = dtype,
                     .Lq = 210,
                     .Lk = 500,
                     .D = D,
                     .Dv = 8,
                     .bias = {"hij"},
                     .grad_lse = true},
                    reaches);
      check_threads({.name = "wavefront",
                     .dtype = dtype,
                     .Hq = 2,
                     .Lq = 190,
                     .Lk = 390,
                     .D = D,
                     .Dv = 9,
                     .mask = "hij",
                     .causal = Causal::top_left,
                     .window_left = 150,
                     .softcap = 2,
                     .dropout_p = 0.2},
                    reaches);
    }
  }
  check_threads({.name = "wavefront, packed",
                 .D = 16,
                 .Dv = 16,
                 .layout = Layout::transposed,
                 .cu_q = {0, 200, 300, 340},
                 .cu_k = {0, 100, 400, 900},
                 .causal = Causal::bottom_right},
                [](const AttentionParams& p) { return cpu::plan_backward(p, 2).wavefront; });
}

// Row i of batch entry b as a call of its own, in its own memory of one row.
void check_rows_alone(const Case& c) {
  const Problem problem(c);
  const Context context(c.text());
  for_each_isa([&] {
    const Forward full = run_forward(problem, 2);
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t b0 = b / c.B1, b1 = b % c.B1;
      for (int64_t i = 0; i < c.Lq; i += i % 3 == 2 ? 4 * thinning() : 1) {
        ForwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        p.batch = 1;
        p.batch_inner = 1;
        p.Lq = 1;
        p.q = problem.q.view_from(b0, b1, 0, i, 0);
        p.k = problem.k.view_from(b0, b1, 0, 0, 0);
        p.v = problem.v.view_from(b0, b1, 0, 0, 0);
        p.mask = problem.mask.view_from(b0, b1, 0, i, 0);
        for (int n = 0; n < kMaxBiases; ++n) p.bias[n] = problem.bias[n].view_from(b0, b1, 0, i, 0);
        if (p.key_lengths) p.key_lengths += b;
        if (p.alibi_slopes) p.alibi_slopes += b * p.alibi_stride_b;
        p.row_positions = &i;
        p.num_queries = c.Lq;
        Tensor out(c.dtype, {1, 1, c.Hq, 1, c.Dv}), lse(full.lse.dtype(), {1, 1, c.Hq, 1, 1});
        p.out = out.view();
        p.lse = {lse.view().data, c.Hq, 1};
        cpu::kernels().forward(p, threads(1));
        for (int64_t h = 0; h < c.Hq; ++h) {
          CHECK(lse.get(0, 0, h, 0, 0) == full.lse.get(0, b, h, i, 0), "lse of row %d alone is %a, not %a",
                static_cast<int>(i), lse.get(0, 0, h, 0, 0), full.lse.get(0, b, h, i, 0));
          for (int64_t d = 0; d < c.Dv; ++d) {
            const double alone = out.get(0, 0, h, 0, d), among = full.out.get(b0, b1, h, i, d);
            CHECK(alone == among, "[%d][%d][%d][%d] alone is %a, among others %a", static_cast<int>(b),
                  static_cast<int>(h), static_cast<int>(i), static_cast<int>(d), alone, among);
          }
        }
      }
    }
  });
}

TEST(rows, alone_or_among_others) {
  for (const DType dtype : kDTypes) {
    check_rows_alone({.name = "rows",
                      .dtype = dtype,
                      .B0 = 2,
                      .B1 = 2,
                      .Hq = 6,
                      .Hkv = 2,
                      .Lq = 30,
                      .Lk = 70,
                      .D = 20,
                      .Dv = 21,
                      .mask = "ABhij",
                      .bias = {"hij", "j"},
                      .alibi = 2,
                      .sinks = true,
                      .key_lengths = {70, 0, 33, 64},
                      .causal = Causal::bottom_right,
                      .window_left = 31});
    check_rows_alone({.name = "rows",
                      .dtype = dtype,
                      .B1 = 2,
                      .Hq = 2,
                      .Lq = 100,
                      .Lk = 530,
                      .D = 8,
                      .Dv = 8,
                      .layout = Layout::transposed,
                      .causal = Causal::bottom_right,
                      .window_left = 300});
    check_rows_alone({.name = "rows",
                      .dtype = dtype,
                      .Hq = 1,
                      .Lq = 40,
                      .Lk = 2100,
                      .D = 8,
                      .Dv = 8,
                      .causal = Causal::bottom_right});
    // Windows that begin and end around the borders of segments, in other ones for some rows than for others.
    check_rows_alone({.name = "rows",
                      .dtype = dtype,
                      .Hq = 2,
                      .Lq = 40,
                      .Lk = 2068,
                      .D = 4,
                      .Dv = 70,
                      .sinks = true,
                      .causal = Causal::bottom_right,
                      .window_left = 1023});
    check_rows_alone({.name = "rows", .dtype = dtype, .Lq = 410, .Lk = 40, .D = 4, .Dv = 4});
    // Sums over more features, and values in more columns, than any tile takes at once.
    check_rows_alone({.name = "rows", .dtype = dtype, .Hq = 2, .Lq = 40, .Lk = 300, .D = 100, .Dv = 70, .mask = "ij"});
  }
}

// Decoding: the last row of the first n keys is row n - 1 of the causal pass over all.
TEST(rows, decoded) {
  const auto check = [](DType dtype, int64_t length, int64_t D, int64_t Dv) {
    Case c{.name = "decode",
           .dtype = dtype,
           .Hq = 4,
           .Hkv = 2,
           .Lq = length,
           .Lk = length,
           .D = D,
           .Dv = Dv,
           .layout = Layout::transposed,
           .causal = Causal::top_left};
    const Problem problem(c);
    const Context context(c.text());
    for_each_isa([&] {
      const Forward full = run_forward(problem, 2);
      for (const int64_t n : {1, 2, 17, 96, 97, 256, 257, 600, 1024, 1025, 1100}) {
        if (n > length) break;
        ForwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        p.causal = Causal::bottom_right;
        p.Lq = 1;
        p.Lk = n;
        p.num_queries = 1;
        p.q = problem.q.view_from(0, 0, 0, n - 1, 0);
        Tensor out(c.dtype, {1, 1, c.Hq, 1, c.Dv});
        p.out = out.view();
        cpu::kernels().forward(p, threads(2));
        for (int64_t h = 0; h < c.Hq; ++h) {
          for (int64_t d = 0; d < c.Dv; ++d) {
            CHECK(out.get(0, 0, h, 0, d) == full.out.get(0, 0, h, n - 1, d),
                  "token %d: %a decoded, %a in the full pass", static_cast<int>(n), out.get(0, 0, h, 0, d),
                  full.out.get(0, 0, h, n - 1, d));
          }
        }
      }
    });
  };
  for (const DType dtype : kDTypes) {
    check(dtype, 1100, 8, 8);
    check(dtype, 280, 96, 72);
  }
}

// Gradients of a batch entry alone.
TEST(rows, gradients_of_a_batch_entry) {
  const auto check_entries = [](DType dtype, int64_t D, int64_t Dv) {
    Case c{.name = "batch",
           .dtype = dtype,
           .B1 = 3,
           .Hq = 4,
           .Hkv = 2,
           .Lq = 40,
           .Lk = 150,
           .D = D,
           .Dv = Dv,
           .mask = "Bj",
           .causal = Causal::bottom_right};
    const Problem problem(c);
    for_each_isa([&] {
      const Forward forward = run_forward(problem, 2);
      const Gradients all = run_backward(problem, forward, 2);
      for (int64_t b = 0; b < c.B1; ++b) {
        BackwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        p.batch = p.batch_inner = 1;
        p.q = problem.q.view_from(0, b, 0, 0, 0);
        p.k = problem.k.view_from(0, b, 0, 0, 0);
        p.v = problem.v.view_from(0, b, 0, 0, 0);
        p.mask = problem.mask.view_from(0, b, 0, 0, 0);
        p.out = forward.out.view_from(0, b, 0, 0, 0);
        p.grad_out = problem.grad_out.view_from(0, b, 0, 0, 0);
        p.row_max = {forward.row_max.view_from(0, b, 0, 0, 0).data, c.Hq * c.Lq, c.Lq};
        p.row_sum = {forward.row_sum.view_from(0, b, 0, 0, 0).data, c.Hq * c.Lq, c.Lq};
        Tensor dq(c.dtype, {1, 1, c.Hq, c.Lq, c.D}), dk(c.dtype, {1, 1, c.Hkv, c.Lk, c.D});
        Tensor dv(c.dtype, {1, 1, c.Hkv, c.Lk, c.Dv});
        for (Tensor* t : {&dq, &dk, &dv}) t->fill(0);
        p.dq = dq.view();
        p.dk = dk.view();
        p.dv = dv.view();
        cpu::kernels().backward(p, threads(1));
        const auto check = [&](const char* what, const Tensor& alone, const Tensor& among) {
          alone.for_each([&](int64_t, int64_t, int64_t h, int64_t l, int64_t d) {
            CHECK(alone.get(0, 0, h, l, d) == among.get(0, b, h, l, d),
                  "%s[%d][%d][%d][%d] alone is %a, among others %a", what, static_cast<int>(b), static_cast<int>(h),
                  static_cast<int>(l), static_cast<int>(d), alone.get(0, 0, h, l, d), among.get(0, b, h, l, d));
          });
        };
        check("dq", dq, all.dq);
        check("dk", dk, all.dk);
        check("dv", dv, all.dv);
      }
    });
  };
  for (const DType dtype : kDTypes) {
    check_entries(dtype, 12, 8);
    check_entries(dtype, 100, 70);
  }
}

// Packed sequences and the same ones, each a call of its own.
TEST(rows, packed_or_alone) {
  const auto compare = [](const Case& c) {
    const Problem problem(c);
    for_each_isa([&] {
      const Forward forward = run_forward(problem, 2);
      for (size_t s = 0; s + 1 < c.cu_q.size(); ++s) {
        ForwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        const int64_t q0 = c.cu_q[s], k0 = c.cu_k[s];
        p.batch = p.batch_inner = 1;
        p.cu_q = p.cu_k = nullptr;
        p.Lq = p.num_queries = problem.Lq(static_cast<int64_t>(s));
        p.Lk = problem.Lk(static_cast<int64_t>(s));
        p.q = problem.q.view_from(0, 0, 0, q0, 0);
        p.k = problem.k.view_from(0, 0, 0, k0, 0);
        p.v = problem.v.view_from(0, 0, 0, k0, 0);
        Tensor out(c.dtype, {1, 1, c.Hq, p.Lq, c.Dv});
        p.out = out.view();
        if (p.has_rows()) cpu::kernels().forward(p, threads(1));
        out.for_each([&](int64_t, int64_t, int64_t h, int64_t l, int64_t d) {
          CHECK(out.get(0, 0, h, l, d) == forward.out.get(0, 0, h, q0 + l, d), "[%d][%d][%d]: %a alone, %a packed",
                static_cast<int>(h), static_cast<int>(q0 + l), static_cast<int>(d), out.get(0, 0, h, l, d),
                forward.out.get(0, 0, h, q0 + l, d));
        });
      }
    });
  };
  for (const DType dtype : kDTypes) {
    Case c{.name = "packed",
           .dtype = dtype,
           .Hq = 4,
           .Hkv = 2,
           .D = 12,
           .Dv = 8,
           .layout = Layout::transposed,
           .alibi = 1,
           .cu_q = {0, 0, 5, 105, 105, 106, 170, 172},
           .cu_k = {0, 3, 40, 150, 180, 450, 460, 475},
           .causal = Causal::bottom_right};
    compare(c);
    // Of several segments each, which a GPU's blocks share out where a sequence is alone, and in packed calls do not.
    compare({.name = "packed, long",
             .dtype = dtype,
             .Hq = 2,
             .D = 4,
             .Dv = 3,
             .cu_q = {0, 3, 3, 9},
             .cu_k = {0, 2100, 2150, 3300},
             .causal = Causal::bottom_right});
  }
}

}  // namespace
}  // namespace attn_ext::test
