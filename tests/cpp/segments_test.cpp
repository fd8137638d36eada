// Few rows against more keys than one segment has: whoever computes the segments, every option holds across their borders,
// and what one segment holds (NaN, scores that outweigh all others) meets the rest as in one pass.
#include <cmath>
#include <limits>

#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};

TEST(segments, options) {
  int64_t n = 0;
  for (const DType dtype : kDTypes) {
    // Grouped heads; keys of each sequence end at, before and behind a border, or there are none.
    Case c{.name = "lengths",
           .dtype = dtype,
           .B1 = 4,
           .Hq = 2,
           .Lq = 2,
           .Lk = 1090,
           .D = 5,
           .Dv = 3,
           .key_lengths = {1024, 1025, 0, 700},
           .poison_hidden = true};
    if (due(n++)) check_case(c);
    // Everything that scores and weights go through, with rows whose first segment is not the first of all.
    c = {.name = "many",
         .dtype = dtype,
         .Hq = 4,
         .Hkv = 2,
         .Lq = 3,
         .Lk = 2070,
         .D = 6,
         .Dv = 7,
         .mask = "hj",
         .bias = {"j", "hij"},
         .bias_hides = 0.2,
         .sinks = true,
         .causal = Causal::bottom_right,
         .window_left = 1044,
         .softcap = 2,
         .dropout_p = 0.3,
         .poison_hidden = true};
    if (due(n++)) check_case(c);
    // A segment that a mask hides altogether, and rows that see nothing anywhere.
    c = {.name = "hidden",
         .dtype = dtype,
         .Lq = 2,
         .Lk = 1100,
         .mask = "j",
         .hidden_share = 0.999,
         .sinks = n % 2 == 0,
         .poison_hidden = true,
         .seed = static_cast<uint64_t>(n)};
    if (due(n++)) check_case(c);
    // More columns than a block has, and none.
    if (due(n++)) check_case({.name = "wide", .dtype = dtype, .Lq = 1, .Lk = 1030, .D = 4, .Dv = 130});
    if (due(n++))
      check_case({.name = "no values", .dtype = dtype, .Lq = 2, .Lk = 1030, .D = 4, .Dv = 0, .sinks = true});
  }
}

// A key's NaN reaches the rows that see it, whichever segment it is in, and no other.
TEST(segments, nan_stays_with_the_rows_that_see_it) {
  for (const DType dtype : kDTypes) {
    for (const int64_t key : {3, 1023, 1024, 2048}) {
      for (const bool in_keys : {true, false}) {
        Problem problem({.name = "NaN",
                         .dtype = dtype,
                         .Hq = 2,
                         .Hkv = 2,
                         .Lq = 2,
                         .Lk = 2060,
                         .D = 4,
                         .Dv = 5,
                         .causal = Causal::bottom_right,
                         .window_left = 2058 - key});  // the first row sees it, the second does not
        const Context context("NaN in " + std::string(in_keys ? "key " : "value ") + std::to_string(key));
        (in_keys ? problem.k : problem.v).set(0, 0, 0, key, 2, std::numeric_limits<double>::quiet_NaN());
        for_each_isa([&] {
          const Forward got = run_forward(problem);
          for (int64_t i = 0; i < 2; ++i) {
            for (int64_t d = 0; d < 5; ++d) {
              const bool expected = i == 0 && (in_keys || d == 2);
              const double x = got.out.get(0, 0, 0, i, d);
              CHECK(std::isnan(x) == expected, "row %ld, column %ld is %g", long(i), long(d), x);
              CHECK(std::isfinite(got.out.get(0, 0, 1, i, d)), "the other head: %g", got.out.get(0, 0, 1, i, d));
            }
          }
        });
      }
    }
  }
}

// One key outweighs all others, in each segment in turn: sums are multiplied by next to nothing from the left or the right.
TEST(segments, one_outweighs_the_others) {
  for (const DType dtype : kDTypes) {
    for (const int64_t key : {5, 1500, 2050}) {
      Problem problem({.name = "outweighs", .dtype = dtype, .Lq = 1, .Lk = 2060, .D = 2, .Dv = 3, .scale = 1.0});
      for (int64_t d = 0; d < 2; ++d) {
        problem.q.set(0, 0, 0, 0, d, 2);
        problem.k.set(0, 0, 0, key, d, 5);
      }
      const Context context("key " + std::to_string(key));
      check_problem(problem);
    }
  }
}

}  // namespace
}  // namespace attn_ext::test
