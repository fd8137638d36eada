// Forward, backward and weights of every ISA against the definition in double precision (check_case does all three).
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "cpu/plan.h"
#include "problem.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};

// Lengths around every vector and panel width (2 to 16 lanes, twice that a panel), with every kind of head dim.
TEST(lengths, small) {
  const std::vector<int64_t> widths{1, 3, 7, 8, 16, 33, 65, 2, 4, 17, 32};
  int64_t n = 0;
  for (const int64_t Lk : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48}) {
    for (const int64_t Lq : {0, 1, 2, 4, 5, 6, 7, 11, 12, 13, 25}) {
      ++n;
      if (!due(n)) continue;
      check_case({.name = "small",
                  .dtype = kDTypes[n % 4],
                  .B1 = 1 + n % 2,
                  .Hq = 2,
                  .Hkv = 1 + n / 2 % 2,
                  .Lq = Lq,
                  .Lk = Lk,
                  .D = widths[static_cast<size_t>(n) % widths.size()],
                  .Dv = widths[static_cast<size_t>(n * 5 + 3) % widths.size()],
                  .grad_lse = n % 3 == 0,
                  .seed = static_cast<uint64_t>(n)});
    }
  }
}

// Around the blocks of rows (96, 384), keys (128, 256) and segments (1024).
TEST(lengths, around_blocks) {
  int64_t n = 0;
  for (const int64_t Lk : {96, 97, 127, 128, 129, 255, 256, 257, 512, 1023, 1024, 1025, 1100, 2049}) {
    for (const int64_t Lq : {1, 3, 17}) {
      ++n;
      if (!due(n)) continue;
      const Causal causal[] = {Causal::none, Causal::bottom_right, Causal::top_left};
      check_case({.name = "keys",
                  .dtype = kDTypes[n % 4],
                  .Lq = Lq,
                  .Lk = Lk,
                  .D = 5,
                  .Dv = 9,
                  .causal = causal[n % 3],
                  .seed = static_cast<uint64_t>(n)});
    }
  }
  for (const int64_t Lq : {95, 96, 97, 191, 193, 385, 400}) {
    for (const int64_t Lk : {33, 130}) {
      ++n;
      if (!due(n)) continue;
      check_case({.name = "rows",
                  .dtype = kDTypes[n % 4],
                  .Hq = 2,
                  .Hkv = 1 + n % 2,
                  .Lq = Lq,
                  .Lk = Lk,
                  .D = 3,
                  .Dv = 4,
                  .causal = n % 4 < 2 ? Causal::bottom_right : Causal::none,
                  .seed = static_cast<uint64_t>(n)});
    }
  }
}

// As many rows of a key/value head as decoding has, and one more than fits where products of pairs take some at a time.
TEST(lengths, few_rows_of_a_head) {
  const std::vector<int64_t> D{1, 32, 31, 64, 33, 40}, Dv{1, 15, 16, 17, 33, 32, 48};
  const std::pair<int64_t, int64_t> heads_and_rows[] = {{1, 1},  {4, 1}, {5, 1}, {16, 1},
                                                        {17, 1}, {4, 4}, {8, 4}, {11, 3}};
  int64_t n = 0;
  for (const auto& [group, Lq] : heads_and_rows) {
    for (const int64_t Lk : {1, 15, 16, 17, 31, 33, 255, 257, 1025}) {
      ++n;
      if (!due(n)) continue;
      check_case({.name = "few rows",
                  .dtype = DType::bfloat16,
                  .Hq = group,
                  .Lq = Lq,
                  .Lk = Lk,
                  .D = D[static_cast<size_t>(n) % D.size()],
                  .Dv = Dv[static_cast<size_t>(n) % Dv.size()],
                  .layout = n % 4 == 3   ? Layout::strided
                            : n % 2 == 0 ? Layout::plain
                                         : Layout::padded,
                  .causal = Causal::bottom_right,
                  .seed = static_cast<uint64_t>(n)});
    }
  }
}

TEST(lengths, empty) {
  for (const DType dtype : kDTypes) {
    check_case({.name = "no keys", .dtype = dtype, .Lq = 5, .Lk = 0});
    check_case({.name = "no keys, sinks", .dtype = dtype, .Hq = 2, .Lq = 5, .Lk = 0, .sinks = true});
    check_case({.name = "no keys, mask and bias", .dtype = dtype, .Lq = 5, .Lk = 0, .mask = "ij", .bias = {"ij", "j"}});
    check_case({.name = "no queries", .dtype = dtype, .Lq = 0, .Lk = 5});
    check_case({.name = "no values", .dtype = dtype, .Lq = 5, .Lk = 7, .Dv = 0, .bias = {"ij"}});
    check_case(
        {.name = "no values", .dtype = dtype, .Hq = 4, .Hkv = 2, .Lq = 100, .Lk = 300, .Dv = 0, .grad_lse = true});
    check_case({.name = "no batch", .dtype = dtype, .B1 = 0});
  }
}

TEST(options, masks) {
  int64_t n = 0;
  for (const char* mask :
       {"", "j", "i", "ij", "h", "hj", "hi", "hij", "B", "Bj", "Bij", "Bhij", "A", "ABj", "ABhij", "Aij"}) {
    for (const Layout layout : {Layout::plain, Layout::padded, Layout::strided, Layout::columns, Layout::transposed}) {
      ++n;
      if (!due(n)) continue;
      check_case({.name = "mask",
                  .dtype = kDTypes[n % 4],
                  .B0 = 2,
                  .B1 = 2,
                  .Hq = 2,
                  .Hkv = 1 + n % 2,
                  .Lq = 5,
                  .Lk = n % 3 == 0 ? 32 : 37,
                  .options_layout = layout,
                  .mask = mask,
                  .hidden_share = n % 5 == 0 ? 0.9 : 0.4,
                  .poison_hidden = n % 2 == 0,
                  .seed = static_cast<uint64_t>(n)});
    }
  }
  // Blocks of keys that a padding mask hides as a whole.
  for (const DType dtype : kDTypes) {
    check_case({.name = "padding",
                .dtype = dtype,
                .B1 = 2,
                .Lq = 3,
                .Lk = 600,
                .mask = "Bj",
                .hidden_share = 0.995,
                .poison_hidden = true});
    check_case({.name = "all hidden",
                .dtype = dtype,
                .B1 = 2,
                .Lq = 3,
                .Lk = 300,
                .mask = "Bj",
                .hidden_share = 1.0,
                .poison_hidden = true});
  }
}

// A padding mask under which whole blocks of keys (256) are passed over, at every place among others, for few rows and many.
TEST(options, hidden_blocks) {
  const int kHidden[] = {2, 5, 1, 6, 2};  // bit n: block n
  const int64_t kRows[] = {1, 1, 7, 7, 50};
  for (const DType dtype : kDTypes) {
    for (int n = 0; n < 5; ++n) {
      Problem problem({.name = "hidden blocks",
                       .dtype = dtype,
                       .Hq = 2,
                       .Hkv = 1,
                       .Lq = kRows[n],
                       .Lk = 900,
                       .D = 4,
                       .mask = "Bj"});
      for (int64_t j = 0; j < 900; ++j) problem.mask.set(0, 0, 0, 0, j, (kHidden[n] >> j / 256 & 1) == 0);
      const Context context("blocks " + std::to_string(kHidden[n]));
      check_problem(problem);
    }
  }
}

TEST(options, biases) {
  const char* patterns[] = {"",   "j",    "i", "ij",    "h",   "hj",  "hi",  "hij", "B",  "Bj",
                            "Bi", "Bhij", "A", "ABhij", "ABj", "Aij", "Ahi", "Bh",  "AB", "ABh"};
  int64_t n = 0;
  for (const char* pattern : patterns) {
    for (const Layout layout : {Layout::plain, Layout::padded, Layout::strided, Layout::columns}) {
      ++n;
      if (!due(n)) continue;
      Case c{.name = "bias",
             .dtype = kDTypes[n % 4],
             .B0 = 2,
             .B1 = 2,
             .Hq = 4,
             .Hkv = 2,
             .Lq = 6,
             .Lk = n % 3 == 0 ? 32 : 35,
             .layout = layout == Layout::padded ? Layout::transposed : Layout::plain,
             .options_layout = layout,
             .bias = {pattern, n % 2 ? patterns[n / 4 % 20] : nullptr},
             .bias_dtype = kDTypes[n / 2 % 4],
             .bias_hides = n % 3 == 1 ? 0.4 : 0,
             .grad_lse = n % 2 == 0,
             .poison_hidden = n % 3 == 1,
             .seed = static_cast<uint64_t>(n)};
      check_case(c);
    }
  }
  // Over several blocks of rows and keys.
  for (const char* pattern : {"", "i", "j", "ij", "hij", "h"}) {
    check_case({.name = "long bias", .Hq = 2, .Hkv = 2, .Lq = 100, .Lk = 300, .bias = {pattern}});
  }
}

TEST(options, positions) {
  Random random(5);
  for (int64_t n = 0; n < 160; ++n) {
    Case c{.name = "positions",
           .dtype = kDTypes[n % 4],
           .B1 = 2,
           .Hq = random.one_of({1, 2, 6}),
           .Lq = random.one_of({1, 3, 9, 40, 100}),
           .Lk = random.one_of({1, 4, 9, 33, 70, 140}),
           .D = random.one_of({1, 4, 8, 12}),
           .Dv = random.one_of({1, 4, 8, 12}),
           .causal = random.one_of({Causal::none, Causal::top_left, Causal::bottom_right}),
           .window_left = random.one_of<int64_t>({kUnbounded, 0, 2, 5, 20, 1000}),
           .window_right = random.one_of<int64_t>({kUnbounded, kUnbounded, 0, 3, 17}),
           .grad_lse = random.chance(0.5),
           .poison_hidden = random.chance(0.5),
           .seed = static_cast<uint64_t>(n)};
    c.Hkv = c.Hq > 1 ? c.Hq / 2 : 1;
    if (random.chance(0.5)) c.alibi = random.one_of({1, 2});
    if (random.chance(0.3)) c.sinks = true;
    if (random.chance(0.4)) c.key_lengths = {random.below(c.Lk + 1), random.below(c.Lk + 1)};
    if (due(n)) check_case(c);
  }
}

TEST(options, scales_and_caps) {
  for (const DType dtype : kDTypes) {
    for (const double scale : {0.0, 1.0, -0.7, 1e-3, 3.0}) {
      check_case({.name = "scale", .dtype = dtype, .Lq = 5, .Lk = 20, .scale = scale});
      check_case({.name = "scale, bias", .dtype = dtype, .Lq = 5, .Lk = 20, .bias = {"ij"}, .scale = scale});
      check_case({.name = "scale, cap", .dtype = dtype, .Lq = 5, .Lk = 20, .scale = scale, .softcap = 1.5});
    }
    for (const double cap : {0.1, 1.0, 30.0, 1000.0}) {
      check_case({.name = "cap",
                  .dtype = dtype,
                  .Hq = 2,
                  .Lq = 7,
                  .Lk = 30,
                  .mask = "ij",
                  .sinks = true,
                  .softcap = cap,
                  .grad_lse = true,
                  .magnitude = 2});
    }
    check_case({.name = "sinks",
                .dtype = dtype,
                .B1 = 2,
                .Hq = 4,
                .Hkv = 2,
                .Lq = 9,
                .Lk = 9,
                .sinks = true,
                .causal = Causal::top_left,
                .grad_lse = true});
    check_case({.name = "sinks, dead rows",
                .dtype = dtype,
                .B1 = 2,
                .Hq = 2,
                .Lq = 9,
                .Lk = 4,
                .sinks = true,
                .causal = Causal::bottom_right,
                .grad_lse = true,
                .poison_hidden = true});
  }
}

TEST(options, layouts) {
  for (const DType dtype : kDTypes) {
    for (const Layout layout : {Layout::plain, Layout::transposed, Layout::padded, Layout::strided, Layout::columns}) {
      for (const int64_t D : {1, 8, 16, 35}) {
        check_case({.name = "layout",
                    .dtype = dtype,
                    .B0 = 2,
                    .B1 = 3,
                    .Hq = 2,
                    .Hkv = 2,
                    .Lq = 7,
                    .Lk = 19,
                    .D = D,
                    .Dv = D,
                    .layout = layout,
                    .causal = Causal::bottom_right});
      }
    }
  }
}

TEST(packed, sequences) {
  for (const DType dtype : kDTypes) {
    for (const Layout layout : {Layout::transposed, Layout::plain, Layout::padded}) {
      Case c{.name = "packed",
             .dtype = dtype,
             .Hq = 4,
             .Hkv = 2,
             .D = 8,
             .Dv = 5,
             .layout = layout,
             .cu_q = {0, 3, 3, 20, 21, 121, 124},
             .cu_k = {0, 5, 9, 9, 30, 130, 430}};
      check_case(c);
      c.causal = Causal::bottom_right;
      c.poison_hidden = true;
      c.grad_lse = true;
      check_case(c);
      c.causal = Causal::top_left;
      c.alibi = 2;
      c.sinks = true;
      check_case(c);
      c.causal = Causal::none;
      c.window_left = 3;
      c.window_right = 1;
      c.softcap = 2;
      check_case(c);
    }
    check_case({.name = "packed, one sequence",
                .dtype = dtype,
                .Hq = 6,
                .Hkv = 2,
                .D = 8,
                .cu_q = {0, 130},
                .cu_k = {0, 70},
                .causal = Causal::bottom_right});
    check_case({.name = "packed, empty", .dtype = dtype, .cu_q = {0, 0, 0}, .cu_k = {0, 0, 4}});
    check_case({.name = "packed, no sequences", .dtype = dtype, .cu_q = {0}, .cu_k = {0}});
  }
}

// Far more sequences than blocks of rows: most are short, many have no queries or no keys, and so have the first and last.
TEST(packed, many_sequences) {
  Random random(5);
  std::vector<int64_t> cu_q = {0, 0, 0, 0}, cu_k = {0, 0, 0, 7};
  while (cu_q.size() < 69) {
    const bool is_long = cu_q.size() % 20 == 0;
    cu_q.push_back(cu_q.back() + (is_long ? 60 + random.below(30) : random.chance(0.3) ? 0 : random.below(7)));
    cu_k.push_back(cu_k.back() + (is_long ? 40 + random.below(60) : random.chance(0.3) ? 0 : random.below(9)));
  }
  for (std::vector<int64_t>* cu : {&cu_q, &cu_k}) cu->insert(cu->end(), 2, cu->back());
  for (const DType dtype : kDTypes) {
    check_case({.name = "many sequences",
                .dtype = dtype,
                .Hq = 6,
                .Hkv = 2,
                .D = 8,
                .Dv = 5,
                .layout = Layout::transposed,
                .alibi = 2,
                .sinks = true,
                .cu_q = cu_q,
                .cu_k = cu_k,
                .causal = Causal::bottom_right,
                .grad_lse = true,
                .poison_hidden = true});
    check_case({.name = "many sequences, all empty",
                .dtype = dtype,
                .Hq = 2,
                .cu_q = std::vector<int64_t>(71),
                .cu_k = std::vector<int64_t>(71)});
  }
}

TEST(options, chosen_rows) {
  for (const DType dtype : kDTypes) {
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      check_case({.name = "chosen rows",
                  .dtype = dtype,
                  .Hq = 2,
                  .Lq = 4,
                  .Lk = 30,
                  .alibi = 1,
                  .row_positions = {17, 0, 5, 24},
                  .num_queries = 25,
                  .causal = causal,
                  .window_left = 9});
    }
  }
}

// Everything together, drawn at random.
TEST(options, combined) {
  Random random(7);
  const std::vector<const char*> patterns{"", "j", "i", "ij", "hij", "Bj", "Bhij", "ABhij", "h", "Ai"};
  const auto pattern = [&](double chance) -> const char* {
    const char* p = patterns[static_cast<size_t>(random.below(static_cast<int64_t>(patterns.size())))];
    return random.chance(chance) ? p : nullptr;
  };
  for (int64_t n = 0; n < 260; ++n) {
    Case c{.name = "combined", .seed = static_cast<uint64_t>(n)};
    c.dtype = kDTypes[random.below(4)];
    c.B0 = random.one_of({1, 1, 2});
    c.B1 = random.one_of({1, 2});
    c.Hkv = random.one_of({1, 2});
    c.Hq = c.Hkv * random.one_of({1, 2, 3});
    c.Lq = random.chance(0.1) ? 97 + random.below(10) : 1 + random.below(20);
    c.Lk = random.chance(0.1) ? 250 + random.below(20) : 1 + random.below(40);
    c.D = random.one_of({1, 3, 4, 8, 16, 20});
    c.Dv = random.one_of({1, 2, 8, 16, 19});
    const auto layout = [&] {
      return random.one_of({Layout::plain, Layout::transposed, Layout::padded, Layout::strided, Layout::columns});
    };
    c.layout = layout();
    c.options_layout = layout();
    c.mask = pattern(0.4);
    c.bias[0] = pattern(0.4);
    c.bias[1] = pattern(0.2);
    c.bias_dtype = kDTypes[random.below(4)];
    c.bias_hides = random.one_of({0.0, 0.2});
    c.alibi = random.one_of({0, 0, 1, 2});
    c.sinks = random.chance(0.3);
    if (random.chance(0.3)) {
      for (int64_t b = 0; b < c.B0 * c.B1; ++b) c.key_lengths.push_back(random.below(c.Lk + 1));
    }
    c.causal = random.one_of({Causal::none, Causal::none, Causal::top_left, Causal::bottom_right});
    if (random.chance(0.3)) c.window_left = random.below(15);
    if (random.chance(0.2)) c.window_right = random.below(15);
    if (random.chance(0.2)) c.scale = random.uniform(-1, 1);
    if (random.chance(0.3)) c.softcap = random.uniform(0.5, 4);
    if (random.chance(0.3)) c.dropout_p = random.uniform(0, 1);
    c.grad_lse = random.chance(0.4);
    c.poison_hidden = random.chance(0.5);
    const int thread_count = random.one_of({1, 2});  // drawn also where the case is not due
    if (due(n)) check_case(c, thread_count);
  }
}

// More than 2^31 elements between two heads. The address space is never filled, so this costs nothing.
TEST(options, far_apart) {
  if (sizeof(void*) < 8) return;
  try {
    check_case({.name = "far",
                .dtype = DType::bfloat16,
                .Hq = 2,
                .Hkv = 2,
                .Lq = 3,
                .Lk = 20,
                .D = 16,
                .Dv = 16,
                .layout = Layout::far,
                .options_layout = Layout::far,
                .mask = "hij",
                .bias = {"hij"},
                .bias_dtype = DType::bfloat16});
  } catch (const std::bad_alloc&) {
    std::printf("  not run: no address space for it\n");
  }
}

}  // namespace
}  // namespace attn_ext::test
