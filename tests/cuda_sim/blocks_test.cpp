// Which rows and keys the blocks of packed sequences have, and how many blocks are launched for them.
#include "cuda/blocks.cuh"

#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "problem.h"
#include "simulator.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

std::vector<int64_t> boundaries_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu(lengths.size() + 1);
  std::partial_sum(lengths.begin(), lengths.end(), cu.begin() + 1);
  return cu;
}

// A few long sequences among short ones and empty ones; two empty ones at either end.
std::vector<int64_t> mixed_lengths(size_t count, int64_t longest, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> lengths(count);
  for (size_t b = 2; b + 2 < count; ++b) {
    lengths[b] = random.below(8) == 0 ? random.below(longest) : random.chance(0.3) ? 0 : random.below(9);
  }
  return lengths;
}

enum class Of { rows, all_rows, keys };  // all rows: those that no sequence has as well

// Every row (key) of every sequence is in one block, rows from the last block of a sequence on, keys from its first; and there
// are no blocks beyond those that the total takes and one a sequence.
template <int size>
void check_places(const std::vector<int64_t>& cu, int64_t total, int64_t group, Of of) {
  constexpr int64_t kHeads = 2;
  AttentionParams p;
  p.batch = static_cast<int64_t>(cu.size()) - 1;
  p.Hkv = kHeads;
  p.Hq = kHeads * group;
  (of == Of::keys ? p.cu_k : p.cu_q) = cu.data();
  (of == Of::keys ? p.total_k : p.total_q) = total;
  if (of == Of::keys) p.cu_q = cu.data();
  const int64_t rows = of == Of::keys ? 1 : group, sequences = p.batch + (of == Of::all_rows ? 1 : 0);
  const int64_t blocks =
      of == Of::keys ? cuda::key_blocks_of<size>(p) : cuda::row_blocks_of<size>(p, of == Of::all_rows);
  CHECK(blocks == rows * total / size + sequences, "%ld blocks", long(blocks));
  CHECK(cuda::heads_of_blocks(p) == kHeads, "%ld heads", long(cuda::heads_of_blocks(p)));
  std::map<std::array<int64_t, 2>, std::vector<int64_t>> begins;  // by head and sequence
  std::map<std::array<int64_t, 2>, int64_t> idle;
  for (int64_t task = 0; task < kHeads * blocks; ++task) {
    const cuda::BlockPlace at =
        of == Of::keys ? cuda::place_of_keys<size>(p, blocks, task) : cuda::place_of_rows<size>(p, blocks, task);
    CHECK(at.b >= 0 && at.b <= p.batch && at.hkv == task / blocks && at.begin >= 0 && at.begin % size == 0,
          "task %ld: sequence %ld, head %ld, from %ld on", long(task), long(at.b), long(at.hkv), long(at.begin));
    if (at.b < 0 || at.b > p.batch) return;
    const auto b = static_cast<size_t>(at.b);
    const int64_t length = rows * ((at.b < p.batch ? cu[b + 1] : total) - cu[b]);
    if (at.begin < length) {
      begins[{at.hkv, at.b}].push_back(at.begin);
    } else {
      ++idle[{at.hkv, at.b}];
    }
  }
  for (int64_t hkv = 0; hkv < kHeads; ++hkv) {
    for (int64_t b = 0; b < sequences; ++b) {
      const auto n = static_cast<size_t>(b);
      const int64_t length = rows * ((b < p.batch ? cu[n + 1] : total) - cu[n]), needed = cuda::pieces(length, size);
      const std::vector<int64_t>& found = begins[{hkv, b}];
      CHECK(static_cast<int64_t>(found.size()) == needed, "sequence %ld of %ld rows has %zu blocks, head %ld", long(b),
            long(length), found.size(), long(hkv));
      CHECK((idle[{hkv, b}] <= 1), "sequence %ld: %ld blocks find nothing", long(b), long(idle[{hkv, b}]));
      for (size_t m = 0; m < found.size(); ++m) {
        const auto place = static_cast<int64_t>(m);
        const int64_t wanted = (of == Of::keys ? place : needed - 1 - place) * size;
        CHECK(found[m] == wanted, "sequence %ld: block %zu begins at %ld, not %ld", long(b), m, long(found[m]),
              long(wanted));
      }
    }
  }
}

TEST(blocks, have_every_row_and_key_once) {
  std::vector<std::vector<int64_t>> calls = {boundaries_of({}),
                                             boundaries_of({0}),
                                             boundaries_of({1}),
                                             boundaries_of({300}),
                                             boundaries_of({0, 0, 0}),
                                             boundaries_of({64, 128, 32, 192}),
                                             boundaries_of({63, 1, 65}),
                                             boundaries_of(std::vector<int64_t>(70, 1)),
                                             boundaries_of(std::vector<int64_t>(70, 0))};
  for (uint64_t seed = 0; seed < 40; ++seed) calls.push_back(boundaries_of(mixed_lengths(5 + seed * 2, 400, seed)));
  for (const std::vector<int64_t>& cu : calls) {
    for (const int64_t behind : {0, 1, 200}) {  // rows that no sequence has
      for (const int64_t group : {1, 2, 3, 8}) {
        const Context context(std::to_string(cu.size() - 1) + " sequences of " + std::to_string(cu.back()) +
                              " rows, and " + std::to_string(behind) + ", group " + std::to_string(group));
        for (const Of of : {Of::rows, Of::all_rows, Of::keys}) {
          check_places<32>(cu, cu.back() + behind, group, of);
          check_places<64>(cu, cu.back() + behind, group, of);
          check_places<128>(cu, cu.back() + behind, group, of);
        }
      }
    }
  }
}

// Blocks of the largest launch of each kernel since then. Of two calls one has as many blocks as tasks (kernels.cpp).
template <class Call>
std::map<std::string, int64_t> launched_by(const Call& call) {
  cuda_sim::reset_statistics();
  call();
  call();
  const std::map<std::string, int64_t> largest = cuda_sim::statistics().largest;
  cuda_sim::reset_statistics();
  return largest;
}

TEST(blocks, are_launched_for_what_there_is) {
  const std::vector<int64_t> cu_q = boundaries_of(mixed_lengths(70, 90, 3)),
                             cu_k = boundaries_of(mixed_lengths(70, 90, 4));
  const int64_t batch = 70, queries = cu_q.back(), keys = cu_k.back();
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    const Case c{.name = "launched", .dtype = dtype, .Hq = 6, .Hkv = 2, .sinks = true, .cu_q = cu_q, .cu_k = cu_k};
    const Context context(c.text());
    const Problem problem(c);
    const int64_t group = c.Hq / c.Hkv, general_rows = dtype == DType::float64 ? 32 : 64;
    const auto of_rows = [&](int64_t size) { return c.Hkv * (group * queries / size + batch); };
    const auto of_keys = [&](int64_t size) { return c.Hkv * (keys / size + batch); };
    const int64_t of_rest = c.Hkv;  // the rows that no sequence has: a block a head
    const std::map<std::string, int64_t> most = {
        {"forward_mma", of_rows(128) + of_rest},
        {"forward_general", of_rows(general_rows) + of_rest},
        {"query_gradients_mma", of_rows(64)},
        {"query_gradients", of_rows(general_rows)},
        {"key_gradients_mma", of_keys(64)},
        {"key_gradients", of_keys(32)},
        {"value_gradients", of_keys(32)},
        {"row_deltas", cuda::pieces(c.Hq * queries, 4)},
        {"sink_gradients", c.Hq},
    };
    const auto check = [&](const std::map<std::string, int64_t>& launched, size_t kernels) {
      CHECK(launched.size() == kernels, "%zu kernels were launched", launched.size());
      for (const auto& [name, blocks] : launched) {
        CHECK(most.contains(name) && blocks <= most.at(name), "%s: %ld blocks", name.c_str(), long(blocks));
      }
    };
    const Forward forward = run_forward(problem);
    check(launched_by([&] { run_forward(problem); }), 1);
    check(launched_by([&] { run_backward(problem, forward); }), dtype == DType::bfloat16 ? 4 : 5);
  }
}

TEST(blocks, are_launched_for_tokens_that_come) {
  constexpr int64_t kHeads = 2, kWidth = 4, kCapacity = 400;
  const std::vector<int64_t> cu = boundaries_of(mixed_lengths(70, 300, 5)), positions(70);
  const int64_t total = cu.back();
  std::vector<float> from(static_cast<size_t>(total * kHeads * kWidth), 1);
  std::vector<float> to(static_cast<size_t>(70 * kHeads * kCapacity * kWidth));
  AppendParams p;
  p.batch = 70;
  p.heads = kHeads;
  p.n = kCapacity;
  p.D = kWidth;
  p.cu = cu.data();
  p.total = total;
  p.positions = positions.data();
  p.from.data = from.data();
  p.from.stride_l = kHeads * kWidth;
  p.from.stride_h = kWidth;
  p.from.stride_d = 1;
  p.to = p.from;
  p.to.data = to.data();
  p.to.stride_b1 = kHeads * kCapacity * kWidth;
  p.to.stride_h = kCapacity * kWidth;
  p.to.stride_l = kWidth;
  use_isa("cuda_sim");
  const auto launched = launched_by([&] { cpu::kernels().append(p, threads(1)); });
  CHECK(launched.at("append") <= cuda::pieces(kHeads * total, 4), "%ld blocks", long(launched.at("append")));
  for (size_t b = 0; b < 70; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t j = 0; j < kCapacity; ++j) {
        const auto at = static_cast<size_t>(((static_cast<int64_t>(b) * kHeads + h) * kCapacity + j) * kWidth);
        CHECK(to[at] == (j < cu[b + 1] - cu[b] ? 1 : 0), "sequence %zu, head %ld, place %ld", b, long(h), long(j));
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::test
