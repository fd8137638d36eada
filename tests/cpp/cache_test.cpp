// KV caches: what was appended to pages, rings and plain caches gives the bits of plain keys and values, whatever the
// places that no key has hold; int8 caches hold what the rule says; rotary embedding turns pairs by their positions.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A cache of any kind for the keys and values of a problem, filled token by token or all at once.
struct Cache {
  Tensor k, v;
  CacheLayout layout;
  std::vector<int32_t> table;
  std::vector<int64_t> totals;

  // page > 0: pages in an order that is none; ring > 0: a ring; neither: plain, with room left over.
  Cache(const Problem& problem, int64_t page, int64_t ring) {
    const Case& c = problem.c;
    const int64_t blocks_each = page > 0 ? (c.Lk + page - 1) / page : 1;
    const int64_t first = page > 0 ? problem.batch * blocks_each + 2 : problem.batch;
    const int64_t rows = page > 0 ? page : ring > 0 ? ring : c.Lk + 3;
    k = Tensor(c.dtype, {1, first, c.Hkv, rows, c.D}, c.layout);
    v = Tensor(c.dtype, {1, first, c.Hkv, rows, c.Dv}, c.layout);
    k.fill(kNaN);
    v.fill(kNaN);
    totals.assign(static_cast<size_t>(problem.batch), c.Lk);
    layout.ring = ring;
    if (page == 0) return;
    for (int64_t n = 0; n < problem.batch * blocks_each; ++n) {
      table.push_back(static_cast<int32_t>((n * 7 + 3) % first));
    }
    std::sort(table.begin(), table.end());
    table.erase(std::unique(table.begin(), table.end()), table.end());
    for (int32_t block = 0; table.size() < static_cast<size_t>(problem.batch * blocks_each); ++block) {
      if (std::find(table.begin(), table.end(), block) == table.end()) table.push_back(block);
    }
    std::reverse(table.begin(), table.end());
    layout.page_size = page;
    layout.block_table = table.data();
    layout.table_stride = blocks_each;
  }

  // The pages in the order in which they lie, but for two of every `some` pages, which change places.
  void order_pages(int64_t some, int64_t one, int64_t other) {
    for (size_t n = 0; n < table.size(); ++n) table[n] = static_cast<int32_t>(n);
    for (size_t n = 0; n + static_cast<size_t>(some) <= table.size(); n += static_cast<size_t>(some)) {
      std::swap(table[n + static_cast<size_t>(one)], table[n + static_cast<size_t>(other)]);
    }
  }

  // Tokens [begin, end) of the problem.
  void append(const Problem& problem, int64_t begin, int64_t end, int thread_count) {
    for (const bool keys : {true, false}) {
      const Tensor& from = keys ? problem.k : problem.v;
      AppendParams p;
      p.batch = problem.batch;
      p.heads = problem.c.Hkv;
      p.n = end - begin;
      p.D = keys ? problem.c.D : problem.c.Dv;
      p.from = from.view_from(0, 0, 0, begin, 0);
      p.to = (keys ? k : v).view();
      p.layout = layout;
      const std::vector<int64_t> positions(static_cast<size_t>(problem.batch), begin);
      p.positions = positions.data();
      cpu::kernels().append(p, threads(thread_count));
    }
  }

  Forward forward(const Problem& problem, int thread_count) const {
    return forward(problem, 0, problem.c.Lq, thread_count);
  }

  // Rows [begin, end) of the problem, as if the tokens after them had not come yet.
  Forward forward(const Problem& problem, int64_t begin, int64_t end, int thread_count) const {
    const Case& c = problem.c;
    Forward f{Tensor(c.dtype, {c.B0, c.B1, c.Hq, end - begin, c.Dv}, c.layout),
              Tensor(problem.like_rows(0).dtype(), {1, problem.batch, c.Hq, end - begin, 1}), Tensor(), Tensor()};
    f.out.fill(kNaN);
    f.lse.fill(kNaN);
    std::vector<int64_t> so_far = totals;
    for (int64_t& total : so_far) total -= c.Lq - end;
    ForwardParams p;
    static_cast<AttentionParams&>(p) = problem.params();
    p.q = problem.q.view_from(0, 0, 0, begin, 0);
    p.Lq = p.num_queries = end - begin;
    p.k = k.view();
    p.v = v.view();
    p.layout = layout;
    p.total_lengths = so_far.data();
    p.out = f.out.view();
    const TensorView lse = f.lse.view();
    p.lse = {lse.data, lse.stride_b1, lse.stride_h};
    cpu::kernels().forward(p, threads(thread_count));
    return f;
  }
};

void check_cache(const Case& c, int64_t page, int64_t ring) {
  static int64_t number = 0;
  if (!due(number++)) return;
  const Problem problem(c);
  const Context context(c.text() + (page ? ", pages of " + std::to_string(page) : "") +
                        (ring ? ", ring of " + std::to_string(ring) : ""));
  for_each_isa([&] {
    const Forward plain = run_forward(problem, 1);
    for (const int count : {1, 3}) {
      Cache cache(problem, page, ring);
      for (int64_t at = 0, step = 5; at < c.Lk; at += step) cache.append(problem, at, std::min(at + step, c.Lk), count);
      const Forward got = cache.forward(problem, count);
      check_same_bits("out", got.out, plain.out);
      check_same_bits("lse", got.lse, plain.lse);
      CHECK(cache.k.poison_intact() && cache.v.poison_intact() && got.out.poison_intact(), "poison was overwritten");
    }
  });
}

TEST(cache, same_bits_wherever_the_rows_lie) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
    for (const int64_t rows : {1, 3, 9}) {
      for (const Layout layout : {Layout::plain, Layout::transposed, Layout::padded, Layout::strided}) {
        Case c{.name = "cache",
               .dtype = dtype,
               .B1 = 2,
               .Hq = 6,
               .Hkv = 2,
               .Lq = rows,
               .Lk = 300,
               .D = 32,
               .Dv = 48,
               .layout = layout,
               .causal = Causal::bottom_right};
        for (const int64_t page : {0, 1, 7, 16}) check_cache(c, page, 0);
        c.window_left = 40;
        for (const int64_t page : {0, 7}) check_cache(c, page, 0);
        check_cache(c, 0, 40 + rows);
        check_cache(c, 0, 97);
      }
    }
    check_cache({.name = "odd",
                 .dtype = dtype,
                 .Hq = 2,
                 .Hkv = 2,
                 .Lq = 2,
                 .Lk = 1100,
                 .D = 13,
                 .Dv = 5,
                 .alibi = 1,
                 .sinks = true,
                 .causal = Causal::bottom_right,
                 .softcap = 3.0},
                16, 0);
  }
}

// Rows of which the first two and the last lie as if all of them were evenly apart, and some between do not.
TEST(cache, pages_that_changed_places) {
  int64_t number = 0;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    for (const int64_t rows : {1, 9}) {
      for (const int64_t page : {1, 2, 8, 16}) {
        const std::array<int64_t, 3> orders[] = {{4, 1, 2}, {8, 2, 5}, {8, 1, 6}};  // some, one, other
        for (const auto& order : orders) {
          if (!due(number++)) continue;
          const Case c{.name = "pages",
                       .dtype = dtype,
                       .Hq = 2,
                       .Hkv = 1,
                       .Lq = rows,
                       .Lk = 128,
                       .D = 32,
                       .Dv = 32,
                       .causal = Causal::bottom_right};
          const Problem problem(c);
          const Context context(c.text() + ", pages of " + std::to_string(page) + ", " + std::to_string(order[1]) +
                                " and " + std::to_string(order[2]) + " of " + std::to_string(order[0]) + " exchanged");
          for_each_isa([&] {
            const Forward plain = run_forward(problem, 1);
            Cache cache(problem, page, 0);
            cache.order_pages(order[0], order[1], order[2]);
            cache.append(problem, 0, c.Lk, 1);
            check_same_bits("out", cache.forward(problem, 1).out, plain.out);
          });
        }
      }
    }
  }
}

// The last rows of a full pass over a cache, as a chunk and each alone.
void check_last_rows(const Problem& problem, int64_t rows, int64_t page, int64_t ring) {
  const Case& c = problem.c;
  const Context context(c.text() + ", last " + std::to_string(rows) +
                        (page ? ", pages of " + std::to_string(page) : "") +
                        (ring ? ", ring of " + std::to_string(ring) : ""));
  for_each_isa([&] {
    const Forward full = run_forward(problem, 1);
    Cache cache(problem, page, ring);
    for (int64_t at = 0, step = 19; at < c.Lk; at += step) cache.append(problem, at, std::min(at + step, c.Lk), 1);
    const auto check = [&](int64_t begin, int64_t end) {
      const Forward got = cache.forward(problem, begin, end, 1);
      got.out.for_each([&](int64_t, int64_t, int64_t h, int64_t i, int64_t d) {
        const double x = got.out.get(0, 0, h, i, d), y = full.out.get(0, 0, h, begin + i, d);
        CHECK(x == y || (std::isnan(x) && std::isnan(y)), "[%d][%d][%d] is %a in %d rows, %a in the full pass",
              static_cast<int>(h), static_cast<int>(begin + i), static_cast<int>(d), x, static_cast<int>(end - begin),
              y);
      });
      CHECK(got.out.poison_intact(), "poison was overwritten");
    };
    check(c.Lq - rows, c.Lq);
    for (int64_t i = c.Lq - rows; i < c.Lq; ++i) check(i, i + 1);
  });
}

TEST(cache, few_rows_of_a_head_are_those_of_the_full_pass) {
  const std::vector<int64_t> D{1, 32, 31, 64, 33, 40, 96}, Dv{1, 15, 16, 17, 33, 32, 48, 64, 96, 80, 70};
  const std::pair<int64_t, int64_t> heads_and_rows[] = {{1, 1},  {4, 1}, {5, 1}, {16, 1},
                                                        {17, 1}, {4, 4}, {8, 4}, {11, 3}};
  int64_t n = 0;
  for (const auto& [group, rows] : heads_and_rows) {
    for (const int64_t Lk : {1, 15, 16, 17, 31, 33, 255, 257, 1025}) {
      ++n;
      if (Lk < rows || !due(n)) continue;
      const Layout layouts[] = {Layout::plain, Layout::transposed, Layout::padded, Layout::strided, Layout::plain};
      Case c{.name = "last rows",
             .dtype = DType::bfloat16,
             .Hq = 2 * group,
             .Hkv = 2,
             .Lq = std::min<int64_t>(Lk, 37),
             .Lk = Lk,
             .D = D[static_cast<size_t>(n) % D.size()],
             .Dv = Dv[static_cast<size_t>(n) % Dv.size()],
             .layout = layouts[n % 5],
             .causal = Causal::bottom_right,
             .seed = static_cast<uint64_t>(n)};
      const int64_t pages[] = {0, 1, 16, 48};
      check_last_rows(Problem(c), rows, pages[n % 4], 0);
      c.window_left = 20;
      check_last_rows(Problem(c), rows, 0, 20 + c.Lq + n % 3 * 16);
    }
  }
}

// Values that are rare: tiny ones, whose products and sums are subnormal, and NaN and Inf that every row sees, beside numbers
// that are none of them.
TEST(cache, few_rows_of_rare_values) {
  int64_t number = 0;
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const int64_t group : {1, 3, 8}) {
      for (const int64_t Dv : {32, 64, 70}) {
        for (const bool tiny : {true, false}) {
          if (!due(number++)) continue;
          Problem problem({.name = tiny ? "tiny" : "specials",
                           .dtype = dtype,
                           .Hq = group,
                           .Hkv = 1,
                           .Lq = 5,
                           .Lk = 300,
                           .D = 32,
                           .Dv = Dv,
                           .causal = Causal::bottom_right,
                           .seed = static_cast<uint64_t>(number)});
          problem.v.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
            const double x = problem.v.get(b0, b1, h, l, d);
            if (tiny) {
              problem.v.set(b0, b1, h, l, d, std::copysign(0x1p-126 * (1 + std::fabs(x)), x));
            } else if (l % 100 == 3 && (d == 5 || d == 40 || d == 67)) {
              problem.v.set(b0, b1, h, l, d, d == 5 ? kNaN : std::copysign(std::numeric_limits<double>::infinity(), x));
            }
          });
          check_last_rows(problem, 2, 0, 0);
        }
      }
    }
  }
}

// Keys and values that are every second number of wider rows, whose other numbers are like any: what lies between is not
// taken for a neighbour.
TEST(cache, every_second_number) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    for (const int64_t rows : {1, 7, 20}) {
      const Case c{.name = "every second", .dtype = dtype, .Lq = rows, .Lk = 70, .D = 32, .Dv = 64};
      const Problem problem(c);
      Case wide_case = c;
      wide_case.D = 64;
      wide_case.Dv = 128;
      Problem wide(wide_case);
      for (const bool keys : {true, false}) {
        const Tensor& from = keys ? problem.k : problem.v;
        from.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t l, int64_t d) {
          (keys ? wide.k : wide.v).set(b0, b1, h, l, 2 * d, from.get(b0, b1, h, l, d));
        });
      }
      const Context context(c.text());
      for_each_isa([&] {
        const Forward plain = run_forward(problem, 1);
        Forward got = run_forward(problem, 1);
        got.out.fill(kNaN);
        ForwardParams p;
        static_cast<AttentionParams&>(p) = problem.params();
        p.q = problem.q.view();
        p.k = wide.k.view();
        p.v = wide.v.view();
        p.k.stride_d = p.v.stride_d = 2;
        p.out = got.out.view();
        cpu::kernels().forward(p, threads(1));
        check_same_bits("out", got.out, plain.out);
      });
    }
  }
}

// New tokens of sequences of different lengths, end to end, over a cache: the rows of a padded call.
TEST(cache, packed_queries) {
  const Case c{.name = "packed queries",
               .B1 = 2,
               .Hq = 4,
               .Hkv = 2,
               .Lq = 3,
               .Lk = 40,
               .D = 16,
               .Dv = 24,
               .causal = Causal::bottom_right};
  const std::vector<int64_t> cu = {0, 3, 5}, totals = {40, 17};  // of the second sequence the last two tokens only
  for_each_isa([&] {
    const Problem problem(c);
    Tensor q(c.dtype, {1, 1, c.Hq, cu.back(), c.D}), out(c.dtype, {1, 1, c.Hq, cu.back(), c.Dv});
    for (size_t b = 0; b < 2; ++b) {
      const int64_t count = cu[b + 1] - cu[b], skipped = c.Lq - count;
      for (int64_t h = 0; h < c.Hq; ++h) {
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t d = 0; d < c.D; ++d) {
            q.set(0, 0, h, cu[b] + i, d, problem.q.get(0, static_cast<int64_t>(b), h, skipped + i, d));
          }
        }
      }
    }
    out.fill(kNaN);
    ForwardParams p;
    static_cast<AttentionParams&>(p) = problem.params();
    p.total_lengths = totals.data();
    Tensor want = problem.like_queries(c.Dv, kNaN);
    p.out = want.view();
    cpu::kernels().forward(p, threads(1));
    p.cu_q = cu.data();
    p.total_q = cu.back();
    p.q = q.view();
    p.out = out.view();
    cpu::kernels().forward(p, threads(1));
    for (size_t b = 0; b < 2; ++b) {
      const int64_t count = cu[b + 1] - cu[b], skipped = c.Lq - count;
      for (int64_t h = 0; h < c.Hq; ++h) {
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t d = 0; d < c.Dv; ++d) {
            const double got = out.get(0, 0, h, cu[b] + i, d);
            const double padded = want.get(0, static_cast<int64_t>(b), h, skipped + i, d);
            CHECK(got == padded, "sequence %zu, head %ld, row %ld: %g, padded %g", b, long(h), long(i), got, padded);
          }
        }
      }
    }
  });
}

// Rows [begin, end) of an array with one number a place.
TensorView numbers(std::vector<float>& x, int64_t heads, int64_t rows) {
  TensorView v;
  v.data = x.data();
  v.stride_b1 = heads * rows;
  v.stride_h = rows;
  v.stride_l = 1;
  return v;
}

TEST(cache, int8_holds_rounded_numbers_and_attends_to_those) {
  struct Rows {
    DType dtype;
    int64_t count, Hq = 4, D = 24, Dv = 40;
  };
  int64_t number = 0;
  for (const Rows& of :
       {Rows{DType::float32, 1}, Rows{DType::float32, 20}, Rows{DType::float64, 1}, Rows{DType::float64, 20},
        Rows{DType::bfloat16, 1}, Rows{DType::bfloat16, 8}, Rows{DType::bfloat16, 9}, Rows{DType::bfloat16, 20},
        // Of one head of keys: 1 to 10 rows, whole tiles of 64 features, and what is left of them.
        Rows{DType::bfloat16, 1, 2, 64, 64}, Rows{DType::bfloat16, 2, 4, 128, 128},
        Rows{DType::bfloat16, 1, 10, 80, 100}, Rows{DType::bfloat16, 2, 8, 128, 192},
        Rows{DType::bfloat16, 1, 6, 192, 1}, Rows{DType::bfloat16, 1, 8, 256, 200},
        Rows{DType::bfloat16, 1, 10, 256, 64}, Rows{DType::bfloat16, 2, 10, 64, 64}}) {
    if (!due(number++)) continue;
    const DType dtype = of.dtype;
    const int64_t rows = of.count;
    const bool few = of.Hq / 2 * rows <= 32;
    const bool is_double = dtype == DType::float64, is_bf16 = dtype == DType::bfloat16;
    Case c{.name = "int8",
           .dtype = dtype,
           .Hq = of.Hq,
           .Hkv = 2,
           .Lq = rows,
           .Lk = 300,
           .D = of.D,
           .Dv = of.Dv,
           .causal = Causal::bottom_right};
    const Problem problem(c);
    Case exact = c;  // holds what the cache stands for
    if (is_bf16) exact.dtype = DType::float32;
    for_each_isa([&] {
      Problem dequantised(exact);
      problem.q.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t i, int64_t d) {
        dequantised.q.set(b0, b1, h, i, d, problem.q.get(b0, b1, h, i, d));
      });
      const int64_t places = c.Lk + 2;
      std::vector<int8_t> data[2];
      std::vector<float> scales[2];
      for (const bool keys : {true, false}) {
        const int64_t width = keys ? c.D : c.Dv;
        auto& x = data[keys];
        auto& s = scales[keys];
        x.assign(static_cast<size_t>(c.Hkv * places * width), int8_t{77});
        s.assign(static_cast<size_t>(c.Hkv * places), std::numeric_limits<float>::quiet_NaN());
        AppendParams p;
        p.batch = 1;
        p.heads = c.Hkv;
        p.n = c.Lk;
        p.D = width;
        p.from = (keys ? problem.k : problem.v).view();
        p.to.data = x.data();
        p.to.dtype = DType::int8;
        p.to.stride_b1 = c.Hkv * places * width;
        p.to.stride_h = places * width;
        p.to.stride_l = width;
        p.to.stride_d = 1;
        p.scale = numbers(s, c.Hkv, places);
        const int64_t zero = 0;
        p.positions = &zero;
        cpu::kernels().append(p, threads(2));
        for (int64_t h = 0; h < c.Hkv; ++h) {
          for (int64_t j = 0; j < c.Lk; ++j) {
            double largest = 0;
            const Tensor& given = keys ? problem.k : problem.v;
            Tensor& rounded = keys ? dequantised.k : dequantised.v;
            for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::fabs(given.get(0, 0, h, j, d)));
            const float scale = s[static_cast<size_t>(h * places + j)];
            const float wanted = is_double ? static_cast<float>(largest / 127.0)
                                           : static_cast<float>(static_cast<float>(largest) / 127.0f);
            CHECK(scale == wanted, "scale %g for %g", scale, largest);
            for (int64_t d = 0; d < width; ++d) {
              const int8_t got = x[static_cast<size_t>((h * places + j) * width + d)];
              const double number = given.get(0, 0, h, j, d);
              const double exact = is_double ? number / static_cast<double>(scale)
                                             : static_cast<double>(static_cast<float>(number) / scale);
              CHECK(got == std::nearbyint(exact), "%d for %g", got, exact);
              rounded.set(0, 0, h, j, d, static_cast<double>(got) * static_cast<double>(scale));
            }
          }
        }
      }
      Forward f{problem.like_queries(c.Dv, kNaN), problem.like_rows(kNaN), Tensor(), Tensor()};
      ForwardParams p;
      static_cast<AttentionParams&>(p) = problem.params();
      for (const bool keys : {true, false}) {
        TensorView& view = keys ? p.k : p.v;
        const int64_t width = keys ? c.D : c.Dv;
        view.data = data[keys].data();
        view.dtype = DType::int8;
        view.stride_h = places * width;
        view.stride_l = width;
        view.stride_d = 1;
        (keys ? p.scales.k : p.scales.v) = numbers(scales[keys], c.Hkv, places);
      }
      p.total_lengths = &c.Lk;
      p.out = f.out.view();
      const TensorView lse = f.lse.view();
      p.lse = {lse.data, lse.stride_b1, lse.stride_h};
      cpu::kernels().forward(p, threads(2));
      Tensor sums;
      const Forward want = reference_forward(dequantised, &sums);
      check_close("lse", f.lse, want.lse, {.relative = 2e-6, .absolute = 2e-6});
      if (is_bf16) {  // the weights of many rows are rounded to bf16, of few rows out only
        check_close("out", f.out, want.out, {.relative = 0x1p-8, .of_sum = few ? 1e-5 : 0x1p-8}, &sums);
      } else {
        check_close("out", f.out, want.out, {.relative = 1e-5, .of_sum = 1e-5, .absolute = 1e-6});
      }

      // A query that holds NaN: its row is NaN, the others are what they were.
      if (is_bf16) {
        Problem nan(c);
        nan.q.set(0, 0, c.Hq - 1, rows - 1, c.D - 1, kNaN);
        Tensor beside = problem.like_queries(c.Dv, kNaN);
        p.q = nan.q.view();
        p.out = beside.view();
        p.lse = {};
        cpu::kernels().forward(p, threads(2));
        beside.for_each([&](int64_t, int64_t, int64_t h, int64_t i, int64_t d) {
          const double got = beside.get(0, 0, h, i, d), without = f.out.get(0, 0, h, i, d);
          const bool right = h == c.Hq - 1 && i == rows - 1 ? std::isnan(got) : got == without;
          CHECK(right, "[%d][%d][%d] is %g beside NaN, %g without", static_cast<int>(h), static_cast<int>(i),
                static_cast<int>(d), got, without);
        });
        p.q = problem.q.view();
      }

      // The last key's scales are NaN: the last row is, and no other.
      Tensor out = problem.like_queries(c.Dv, kNaN);
      p.out = out.view();
      for (auto& s : scales) {
        for (int64_t h = 0; h < c.Hkv; ++h) s[static_cast<size_t>(h * places + c.Lk - 1)] = static_cast<float>(kNaN);
      }
      cpu::kernels().forward(p, threads(2));
      out.for_each([&](int64_t, int64_t, int64_t h, int64_t i, int64_t d) {
        const double got = out.get(0, 0, h, i, d), without = f.out.get(0, 0, h, i, d);
        CHECK(i == rows - 1 ? std::isnan(got) : got == without,
              "[%d][%d][%d] is %g beside a scale that is NaN, %g without", static_cast<int>(h), static_cast<int>(i),
              static_cast<int>(d), got, without);
      });
    });
  }
}

struct Int8Layout {
  int64_t page = 0;                         // tokens; 0: all of them lie after one another
  std::array<int64_t, 3> exchanged = {};    // of some pages, one and other lie in each other's place
  int64_t stride_d = 1, more_in_a_row = 0;  // bytes

  int64_t place_of(int64_t token) const {
    const auto [some, one, other] = exchanged;
    const int64_t of = page ? page : token + 1, n = token / of;
    const bool is_one = some && n % some == one, is_other = some && n % some == other;
    return (is_one ? n - one + other : is_other ? n - other + one : n) * of + token % of;
  }
  std::string text() const {
    return "pages of " + std::to_string(page) + ", " + std::to_string(exchanged[1]) + " and " +
           std::to_string(exchanged[2]) + " of " + std::to_string(exchanged[0]) + " exchanged, numbers " +
           std::to_string(stride_d) + " apart, " + std::to_string(more_in_a_row) + " behind a row";
  }
};

// Keys or values of two heads in an int8 cache: the same numbers and scales for a seed, wherever they lie. The memory
// ends with the last one.
struct Int8Rows {
  static constexpr int64_t kHeads = 2;
  std::vector<int8_t> data;
  std::vector<float> scales;
  int64_t page;
  TensorView view;
  Int8Layout layout;

  Int8Rows(const Int8Layout& given, int64_t tokens, int64_t width, uint64_t seed)
      : page(given.page ? given.page : tokens), layout(given) {
    const int64_t row = width * layout.stride_d + layout.more_in_a_row, rows = tokens / page * page * kHeads;
    data.assign(static_cast<size_t>((rows - 1) * row + (width - 1) * layout.stride_d + 1), int8_t{77});
    scales.resize(static_cast<size_t>(rows));
    view.data = data.data();
    view.dtype = DType::int8;
    view.stride_b1 = kHeads * page * row;
    view.stride_h = page * row;
    view.stride_l = row;
    view.stride_d = layout.stride_d;
    for (int64_t h = 0; h < kHeads; ++h) {
      Random random(seed + static_cast<uint64_t>(h));
      for (int64_t j = 0; j < tokens; ++j) {
        scale(h, j) = static_cast<float>(random.uniform(0.005, 0.02));
        int8_t* numbers = &data[static_cast<size_t>(row_of(h, j) * row)];
        for (int64_t d = 0; d < width; ++d) {
          numbers[d * layout.stride_d] = static_cast<int8_t>(random.below(255) - 127);
        }
      }
    }
  }

  int64_t row_of(int64_t h, int64_t token) const {
    const int64_t place = layout.place_of(token);
    return (place / page * kHeads + h) * page + place % page;
  }
  float& scale(int64_t h, int64_t token) { return scales[static_cast<size_t>(row_of(h, token))]; }
  TensorView scale_view() { return numbers(scales, kHeads, page); }
};

// The answer of queries to such keys and values, which take the place of the problem's own.
Tensor forward_of_int8(const Problem& problem, Int8Rows& k, Int8Rows& v) {
  const Case& c = problem.c;
  Tensor out = problem.like_queries(c.Dv, kNaN);
  ForwardParams p;
  static_cast<AttentionParams&>(p) = problem.params();
  p.k = k.view;
  p.v = v.view;
  p.scales.k = k.scale_view();
  p.scales.v = v.scale_view();
  p.total_lengths = &c.Lk;
  std::vector<int32_t> table;
  if (k.layout.page) {
    for (int64_t j = 0; j < c.Lk; j += k.page) table.push_back(static_cast<int32_t>(k.layout.place_of(j) / k.page));
    p.layout.page_size = k.page;
    p.layout.block_table = table.data();
    p.layout.table_stride = static_cast<int64_t>(table.size());
  }
  p.out = out.view();
  cpu::kernels().forward(p, threads(1));
  return out;
}

TEST(cache, int8_same_bits_wherever_the_rows_lie) {
  int64_t number = 0;
  const std::array<int64_t, 4> shapes[] = {
      {1, 4, 64, 64}, {1, 8, 128, 128}, {2, 8, 128, 64}, {1, 4, 80, 100}, {1, 10, 128, 64}};  // rows, Hq, D, Dv
  for (const auto& [rows, Hq, D, Dv] : shapes) {
    const Case c{.name = "int8",
                 .dtype = DType::bfloat16,
                 .Hq = Hq,
                 .Hkv = 2,
                 .Lq = rows,
                 .Lk = 300,
                 .D = D,
                 .Dv = Dv,
                 .causal = Causal::bottom_right};
    for (const Int8Layout& layout :
         {Int8Layout{.more_in_a_row = 13}, Int8Layout{.stride_d = 2}, Int8Layout{.page = 1, .exchanged = {8, 3, 5}},
          Int8Layout{.page = 8, .exchanged = {4, 1, 2}},
          Int8Layout{.page = 16, .exchanged = {8, 2, 5}, .more_in_a_row = 64}}) {
      if (!due(number++)) continue;
      const Context context(c.text() + ", " + layout.text());
      const Problem problem(c);
      for_each_isa([&] {
        const auto out_of = [&](const Int8Layout& of_k, const Int8Layout& of_v) {
          const int64_t tokens = of_k.page ? 384 : c.Lk;
          Int8Rows k(of_k, tokens, c.D, 1), v(of_v, tokens, c.Dv, 3);
          return forward_of_int8(problem, k, v);
        };
        const Tensor plain = out_of({}, {});
        check_same_bits("out", out_of(layout, layout), plain);
        if (layout.page) return;
        check_same_bits("out, k's layout", out_of(layout, {}), plain);
        check_same_bits("out, v's layout", out_of({}, layout), plain);
      });
    }
  }
}

// A value whose scale is infinite is one that the row holds; one number of q that dwarfs the others leaves them theirs;
// the smallest numbers count as well.
TEST(cache, int8_of_rare_numbers) {
  for (const int64_t Hq : {2, 8, 10}) {
    const Case c{.name = "int8",
                 .dtype = DType::bfloat16,
                 .Hq = Hq,
                 .Hkv = 2,
                 .Lq = 1,
                 .Lk = 300,
                 .D = 64,
                 .Dv = 64,
                 .causal = Causal::bottom_right};
    const Context context(c.text());
    for_each_isa([&] {
      Problem problem(c);
      Int8Rows k({}, c.Lk, c.D, 1), v({}, c.Lk, c.Dv, 3);
      v.scale(0, 17) = std::numeric_limits<float>::infinity();
      const Tensor out = forward_of_int8(problem, k, v);
      v.scale(0, 17) = 0.01f;
      const Tensor without = forward_of_int8(problem, k, v);
      out.for_each([&](int64_t, int64_t, int64_t h, int64_t i, int64_t d) {
        const int n = v.data[static_cast<size_t>(v.row_of(0, 17) * c.Dv + d)];
        const double got = out.get(0, 0, h, i, d), wanted = n == 0 ? kNaN : std::copysign(HUGE_VAL, n);
        const bool right = h >= c.Hq / 2 ? got == without.get(0, 0, h, i, d)
                                         : got == wanted || (std::isnan(got) && std::isnan(wanted));
        CHECK(right, "[%d][%d] is %g beside %d of infinite scale", static_cast<int>(h), static_cast<int>(d), got, n);
      });

      // The large number meets zeros: the scores, and with them out, are those of the others.
      for (int64_t h = 0; h < Int8Rows::kHeads; ++h) {
        for (int64_t j = 0; j < c.Lk; ++j) k.data[static_cast<size_t>(k.row_of(h, j) * c.D + 5)] = 0;
      }
      const auto set_fifth = [&](double x) {
        for (int64_t h = 0; h < c.Hq; ++h) problem.q.set(0, 0, h, 0, 5, x);
      };
      set_fifth(0.0);
      const Tensor others = forward_of_int8(problem, k, v);
      set_fifth(64.0);
      const Tensor dwarfed = forward_of_int8(problem, k, v);
      const Tensor size = problem.like_queries(c.Dv, 1.0);
      check_close("out", dwarfed, others, {.relative = 0x1p-7, .of_sum = 1e-4}, &size);

      // Next to nothing in q weighs all keys alike; scales of v that are next to nothing make out as small.
      Tensor tiny_q = problem.like_queries(c.D, 0x1p-120), zero_q = problem.like_queries(c.D, 0.0);
      const auto out_for = [&](const Tensor& q) {
        problem.q.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t i, int64_t d) {
          problem.q.set(b0, b1, h, i, d, q.get(b0, b1, h, i, d));
        });
        return forward_of_int8(problem, k, v);
      };
      const Tensor mean = out_for(zero_q);
      check_close("out", out_for(tiny_q), mean, {.relative = 0x1p-7, .of_sum = 1e-5}, &size);
      for (float& x : v.scales) x *= 0x1p-110f;
      Tensor small_mean = problem.like_queries(c.Dv, kNaN);
      mean.for_each([&](int64_t b0, int64_t b1, int64_t h, int64_t i, int64_t d) {
        small_mean.set(b0, b1, h, i, d, mean.get(b0, b1, h, i, d) * 0x1p-110);
      });
      check_close("out", out_for(zero_q), small_mean, {.relative = 0x1p-7, .of_sum = 1e-5 * 0x1p-110}, &size);
    });
  }
}

TEST(cache, a_row_with_nan_becomes_nan_and_a_row_of_zeros_stays) {
  for_each_isa([&] {
    const std::vector<float> rows = {0, 0, 0, 1, static_cast<float>(kNaN), 2, 1, std::numeric_limits<float>::infinity(),
                                     2};
    std::vector<int8_t> x(9, int8_t{5});
    std::vector<float> scale(3, 7.0f);
    AppendParams p;
    p.batch = p.heads = 1;
    p.n = 3;
    p.D = 3;
    p.from.data = const_cast<float*>(rows.data());
    p.from.stride_l = 3;
    p.from.stride_d = 1;
    p.to = p.from;
    p.to.data = x.data();
    p.to.dtype = DType::int8;
    p.scale = numbers(scale, 1, 3);
    const int64_t zero = 0;
    p.positions = &zero;
    cpu::kernels().append(p, threads(1));
    CHECK(scale[0] == 0 && std::isnan(scale[1]) && std::isnan(scale[2]), "%g %g %g", scale[0], scale[1], scale[2]);
    CHECK(std::all_of(x.begin(), x.end(), [](int8_t n) { return n == 0; }), "numbers without a scale");
  });
}

TEST(cache, int8_rounds_halves_to_even) {
  const std::vector<double> row = {127,  0.5,  1.5, 2.5,  -0.5, -1.5, -2.5, 126.5,  -126.5, -127,
                                   63.5, 64.5, 0,   -0.0, 1,    99,   0.49, -99.51, 100.5};  // of the scale, which is 1
  const std::vector<int8_t> wanted = {127, 0, 2, 2, 0, -2, -2, 126, -126, -127, 64, 64, 0, 0, 1, 99, 0, -100, 100};
  const auto D = static_cast<int64_t>(row.size());
  for (const bool is_double : {false, true}) {
    const std::vector<float> single(row.begin(), row.end());
    for (const int64_t stride : {1, 3}) {
      for_each_isa([&] {
        std::vector<int8_t> x(static_cast<size_t>((D - 1) * stride + 1), int8_t{5});
        std::vector<float> scale(1);
        AppendParams p;
        p.batch = p.heads = p.n = 1;
        p.D = D;
        p.from.data =
            is_double ? static_cast<void*>(const_cast<double*>(row.data())) : const_cast<float*>(single.data());
        p.from.dtype = is_double ? DType::float64 : DType::float32;
        p.from.stride_d = 1;
        p.to.data = x.data();
        p.to.dtype = DType::int8;
        p.to.stride_d = stride;
        p.scale = numbers(scale, 1, 1);
        const int64_t zero = 0;
        p.positions = &zero;
        cpu::kernels().append(p, threads(1));
        CHECK(scale[0] == 1, "scale %g", scale[0]);
        for (size_t d = 0; d < x.size(); ++d) {
          const auto at = static_cast<int64_t>(d);
          const int8_t number = at % stride ? int8_t{5} : wanted[static_cast<size_t>(at / stride)];
          CHECK(x[d] == number, "byte %zu is %d, not %d", d, x[d], number);
        }
      });
    }
  }
}

TEST(cache, rotary_turns_pairs_by_their_positions) {
  constexpr int64_t D = 10, pairs = 4, count = 3, first = 5;
  for (const bool interleaved : {false, true}) {
    std::vector<float> cos(8 * pairs), sin(8 * pairs), x(count * D);
    Random random(1);
    for (auto* table : {&cos, &sin, &x}) {
      for (float& number : *table) number = static_cast<float>(random.uniform(-1, 1));
    }
    for_each_isa([&] {
      std::vector<float> got((first + count) * D, static_cast<float>(kNaN));
      AppendParams p;
      p.batch = p.heads = 1;
      p.n = count;
      p.D = D;
      p.from.data = x.data();
      p.from.stride_l = D;
      p.from.stride_d = 1;
      p.to = p.from;
      p.to.data = got.data();
      p.positions = &first;
      p.cos = cos.data();
      p.sin = sin.data();
      p.cos_stride = p.sin_stride = pairs;
      p.rotary_dim = 2 * pairs;
      p.interleaved = interleaved;
      cpu::kernels().append(p, threads(1));
      for (int64_t i = 0; i < count; ++i) {
        const float* row = x.data() + i * D;
        const float* turned = got.data() + (first + i) * D;
        for (int64_t n = 0; n < pairs; ++n) {
          const int64_t a = interleaved ? 2 * n : n, b = interleaved ? 2 * n + 1 : n + pairs;
          const double c = cos[static_cast<size_t>((first + i) * pairs + n)];
          const double s = sin[static_cast<size_t>((first + i) * pairs + n)];
          CHECK(std::fabs(turned[a] - (row[a] * c - row[b] * s)) < 1e-6, "first of pair %d", static_cast<int>(n));
          CHECK(std::fabs(turned[b] - (row[b] * c + row[a] * s)) < 1e-6, "second of pair %d", static_cast<int>(n));
        }
        CHECK(turned[8] == row[8] && turned[9] == row[9], "features past rotary_dim were turned");
      }
      CHECK(std::all_of(got.begin(), got.begin() + first * D, [](float n) { return std::isnan(n); }), "wrote before");
    });
  }
}

}  // namespace
}  // namespace attn_ext::test
