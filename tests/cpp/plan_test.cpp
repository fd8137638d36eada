// How work is handed out: tasks, plans and scratch memory.
#include "cpu/plan.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "cpu/parallel.h"
#include "positions.h"
#include "cpu/scratch.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

using namespace cpu;

void check_tasks(const Parallel& parallel, int64_t tasks) {
  const auto done = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(tasks + 1));
  std::atomic<int> workers{0}, disorder{0}, after_end{0};
  share_tasks(parallel, tasks, [&](auto&& next) {
    ++workers;
    int64_t last = -1;
    for (int64_t task; (task = next()) >= 0;) {
      disorder += task <= last || task >= tasks;
      last = task;
      ++done[static_cast<size_t>(task)];
    }
    after_end += next() != -1;
  });
  const int most = static_cast<int>(std::min<int64_t>(parallel.run ? parallel.threads : 1, tasks));
  CHECK(workers == std::max(most, 1), "%d workers", workers.load());
  CHECK(disorder == 0, "%d tasks handed out in the wrong order", disorder.load());
  CHECK(after_end == 0, "%d workers got a task after the end", after_end.load());
  for (int64_t task = 0; task < tasks; ++task) {
    CHECK(done[static_cast<size_t>(task)] == 1, "task %lld done %d times", static_cast<long long>(task),
          done[static_cast<size_t>(task)].load());
  }
}

TEST(tasks, each_once) {
  for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
    const Context context(std::to_string(tasks) + " tasks");
    check_tasks({}, tasks);
    check_tasks({8, nullptr}, tasks);
    for (const int count : {1, 2, 3, 5}) check_tasks(threads(count), tasks);
  }
}

AttentionParams shape(int64_t batch, int64_t Hq, int64_t Hkv, int64_t Lq, int64_t Lk, int64_t D, int64_t Dv) {
  AttentionParams p;
  p.set_sizes(batch, Hq, Hkv, Lq, Lk, D, Dv);
  return p;
}

TEST(plan, forward_covers_all_rows) {
  Random random(1);
  for (int n = 0; n < 3000; ++n) {
    const int64_t Hkv = random.one_of({1, 2, 8}), group = random.one_of({1, 3, 8});
    const auto p = shape(random.one_of({1, 2, 64}), Hkv * group, Hkv, random.one_of({0, 1, 2, 95, 96, 97, 385, 4096}),
                         random.one_of({0, 1, 255, 1024, 1025, 5000, 100000}), random.one_of({1, 64, 128}),
                         random.one_of({0, 1, 64}));
    const int count = random.one_of({1, 2, 3, 5, 64});
    const ForwardPlan plan = plan_forward(p, count);
    const Context context("case " + std::to_string(n));
    CHECK(plan.rows == group * p.Lq, "%lld rows", static_cast<long long>(plan.rows));
    CHECK(plan.rows_per_task >= 1 && plan.rows_per_task <= kMaxRowsPerTask, "%lld rows a task",
          static_cast<long long>(plan.rows_per_task));
    CHECK(plan.row_tasks * plan.rows_per_task >= plan.rows && (plan.row_tasks - 1) * plan.rows_per_task < plan.rows,
          "%lld tasks of %lld rows for %lld", static_cast<long long>(plan.row_tasks),
          static_cast<long long>(plan.rows_per_task), static_cast<long long>(plan.rows));
    CHECK(plan.threads >= 1 && plan.threads <= count, "%d threads of %d", plan.threads, count);
    CHECK(plan.segments == 1 || plan.segments == ceil_div(p.Lk, kSegment), "%lld segments",
          static_cast<long long>(plan.segments));
    CHECK(plan.segments == 1 || plan.threads > 1 || plan.tasks == 0, "segments for one thread");
    CHECK(plan.segments_per_task >= 1 && plan.segments_per_task <= plan.segments, "%lld segments a task of %lld",
          static_cast<long long>(plan.segments_per_task), static_cast<long long>(plan.segments));
    CHECK(plan.tasks == p.batch * p.Hkv * plan.row_tasks * plan.key_tasks(), "%lld tasks",
          static_cast<long long>(plan.tasks));
    CHECK(plan.tasks_per_grab >= 1, "%lld tasks at a time", static_cast<long long>(plan.tasks_per_grab));
    CHECK(plan.tasks == 0 || ceil_div(plan.tasks, plan.tasks_per_grab) >= std::min<int64_t>(plan.threads, plan.tasks),
          "%lld tasks, %lld at a time, leave some of %d threads idle", static_cast<long long>(plan.tasks),
          static_cast<long long>(plan.tasks_per_grab), plan.threads);
    CHECK(forward_scratch_elements(p, plan) >= 0, "negative scratch");
  }
}

// One row for each head against a cache. A thread may be kept from its work for a while, and sequences of a batch may
// differ in length: no task is more than a small share of the call, nor a long one, and none is not worth handing out.
TEST(plan, few_rows_are_shared_out_finely) {
  for (const int64_t heads : {1, 2, 8, 32, 256}) {
    for (const int64_t Lk : {8192, 16384, 131072}) {
      for (const int count : {2, 4, 16}) {
        const ForwardPlan plan = plan_forward(shape(1, 4 * heads, heads, 1, Lk, 128, 128), count);
        const Context context(std::to_string(heads) + " heads, " + std::to_string(Lk) + " keys");
        const int64_t most = heads * ceil_div(Lk, kSegment);
        CHECK(plan.tasks >= std::min<int64_t>(most, 8 * plan.threads), "%lld tasks for %d threads",
              static_cast<long long>(plan.tasks), plan.threads);
        CHECK(plan.segments_per_task <= 8, "%lld segments a task", static_cast<long long>(plan.segments_per_task));
        CHECK(plan.segments > 1 || Lk <= 8 * kSegment, "tasks of %lld keys", static_cast<long long>(Lk));
      }
    }
  }
  const ForwardPlan thin = plan_forward(shape(1, 16, 16, 1, 8192, 8, 8), 2);
  CHECK(thin.segments_per_task * 4 * 8 * kSegment >= 400000 || thin.segments == 1, "a task of %lld segments of 1 row",
        static_cast<long long>(thin.segments_per_task));
}

TEST(plan, backward_covers_all_keys) {
  Random random(2);
  for (int n = 0; n < 3000; ++n) {
    const int64_t Hkv = random.one_of({1, 2, 8}), group = random.one_of({1, 3, 8});
    const auto p = shape(random.one_of({1, 2, 64}), Hkv * group, Hkv, random.one_of({0, 1, 96, 4096}),
                         random.one_of({0, 1, 127, 128, 129, 1024, 5000}), random.one_of({1, 64, 128}), 64);
    const int count = random.one_of({1, 2, 3, 5, 64});
    const BackwardPlan plan = plan_backward(p, count);
    const Context context("case " + std::to_string(n));
    CHECK(plan.units == p.batch * p.Hkv, "%lld units", static_cast<long long>(plan.units));
    CHECK(plan.key_blocks * kBackwardKeys >= p.Lk, "%lld key blocks", static_cast<long long>(plan.key_blocks));
    CHECK(plan.tasks == plan.units * (plan.wavefront ? plan.key_blocks : 1), "%lld tasks",
          static_cast<long long>(plan.tasks));
    CHECK(plan.threads >= 1 && plan.threads <= count, "%d threads of %d", plan.threads, count);
    CHECK(!plan.wavefront || (plan.threads > 1 && plan.key_blocks > 1), "a wavefront of one");
  }
}

TEST(plan, modes_are_reached) {
  CHECK(plan_forward(shape(1, 1, 1, 3, 5000, 64, 64), 4).segments == 5, "few rows, many keys: no segments");
  CHECK(plan_forward(shape(1, 8, 8, 512, 5000, 64, 64), 4).segments == 1, "many rows: segments");
  CHECK(plan_forward(shape(1, 8, 8, 1, 5000, 64, 64), 1).segments == 1, "segments for one thread");
  CHECK(plan_forward(shape(64, 8, 8, 1, 4096, 64, 64), 2).segments == 1, "rows enough, of few segments: cut");
  CHECK(plan_forward(shape(1, 1, 1, 1, 4, 4, 4), 4).threads == 1, "a tiny call wakes threads");
  CHECK(plan_backward(shape(1, 1, 1, 500, 500, 64, 64), 4).wavefront, "one head: no wavefront");
  CHECK(!plan_backward(shape(4, 4, 4, 500, 500, 64, 64), 4).wavefront, "16 heads for 4 threads: wavefront");
}

TEST(scratch, blocks) {
  char* first = nullptr;
  {
    const Scratch outer(1000);
    first = outer.data();
    CHECK(reinterpret_cast<uintptr_t>(first) % kCacheLine == 0, "not aligned");
    std::memset(first, 1, 1000);
    {
      const Scratch inner(500);
      CHECK(inner.data() != first, "a nested block is the outer one");
      std::memset(inner.data(), 2, 500);
    }
    CHECK(first[0] == 1 && first[999] == 1, "a nested block overwrote the outer one");
  }
  {
    const Scratch again(900);
    CHECK(again.data() == first, "the block was not kept");
    std::memset(again.data(), 3, 900);
  }
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{65}, size_t{100000}, size_t{9} << 20, size_t{10}}) {
    const Scratch block(bytes);
    CHECK(reinterpret_cast<uintptr_t>(block.data()) % kCacheLine == 0, "not aligned");
    std::memset(block.data(), 4, bytes);
  }
  const Scratch nothing(0);
}

TEST(scratch, carver) {
  const auto layout = [](char* base, float** a, double** b, uint8_t** c) {
    Carver carve(base);
    *a = carve.take<float>(17);
    *b = carve.take<double>(0);
    *c = carve.take<uint8_t>(65);
    return carve.used();
  };
  float* a;
  double* b;
  uint8_t* c;
  const size_t bytes = layout(nullptr, &a, &b, &c);
  CHECK(a == nullptr && c == nullptr, "counting hands out memory");
  CHECK(bytes == 2 * 64 + 0 + 2 * 64, "%zu bytes", bytes);
  const Scratch block(bytes);
  CHECK(layout(block.data(), &a, &b, &c) == bytes, "the second count differs");
  CHECK(reinterpret_cast<char*>(c) - block.data() == 128, "wrong place");
  std::memset(a, 0, 17 * sizeof(float));
  std::memset(c, 0, 65);
}

TEST(problem, visible_keys) {
  // Against the definition, key by key.
  Random random(3);
  for (int n = 0; n < 4000; ++n) {
    AttentionParams p = shape(1, 1, 1, random.below(9), random.below(9), 1, 1);
    p.causal = random.one_of({Causal::none, Causal::top_left, Causal::bottom_right});
    p.window_left = random.one_of<int64_t>({kUnbounded, 0, 1, 3, 100});
    p.window_right = random.one_of<int64_t>({kUnbounded, 0, 1, 3, 100});
    const int64_t length = random.below(p.Lk + 1);
    if (random.chance(0.5)) p.key_lengths = &length;
    const Sequence s = sequence_of(p, 0);
    for (int64_t i = 0; i < p.Lq; ++i) {
      const KeyRange range = visible_keys(p, s, i);
      const int64_t center = p.causal == Causal::top_left ? i : i + p.Lk - p.Lq;
      for (int64_t j = 0; j < p.Lk; ++j) {
        const bool want = (!p.key_lengths || j < length) && (p.causal == Causal::none || j <= center) &&
                          (p.window_left == kUnbounded || j >= center - p.window_left) &&
                          (p.window_right == kUnbounded || j <= center + p.window_right);
        CHECK((j >= range.lo && j < range.hi) == want, "case %d: key %lld of row %lld", n, static_cast<long long>(j),
              static_cast<long long>(i));
      }
    }
  }
}

}  // namespace
}  // namespace attn_ext::test
