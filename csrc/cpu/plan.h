// How a call is cut into tasks. Nothing here changes a result: rows are independent, and a row's keys are always taken
// in the same blocks and segments. Used by the kernels, and by explain(), which prints it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace attn_ext::cpu {

// Part of the numerics, so fixed for every ISA, shape and thread count: the row max moves at most once a block, and
// segments of a row are computed apart and merged left to right.
inline constexpr int64_t kKeyBlock = 256;
inline constexpr int64_t kSegment = 1024;

// Rows of scores held at once: kRowBlock × kKeyBlock floats (96 KB) stay in L2 beside one packed block of k and v.
inline constexpr int64_t kRowBlock = 96;

// Rows of one task at most: each packed block of k and v serves this many rows (packing is then 1 % of the work).
inline constexpr int64_t kMaxRowsPerTask = 4 * kRowBlock;

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// About how many flops of useful work pay for waking a second thread, and for handing out one more task.
inline constexpr double kThreadCost = 4e5;
inline constexpr double kTaskCost = 4e5;

// Few rows are bound by memory, and a thread that others keep from it for a while must not keep the call waiting: so many
// tasks for each thread, and not more segments in one (sequences of a batch may differ in length).
inline constexpr int64_t kFewRowsPerTask = 32;
inline constexpr int64_t kTasksPerThread = 8;
inline constexpr int64_t kMaxSegmentsPerTask = 8;

struct ForwardPlan {
  int64_t rows = 0;           // rows that share one key/value head: (Hq / Hkv) · Lq, stacked
  int64_t rows_per_task = 0;  //
  int64_t row_tasks = 0;      // per batch entry and key/value head
  int64_t segments = 1;       // > 1: the keys of a row are shared out as well, by segments that are merged afterwards
  int64_t segments_per_task = 1;
  int64_t tasks = 0;
  int64_t tasks_per_grab = 1;
  int threads = 1;

  // Tasks that have the same rows.
  int64_t key_tasks() const { return ceil_div(segments, segments_per_task); }
};

// Cuts the keys of `plan`, whose rows are cut into tasks already, where the threads would be busy for too different times.
inline void share_out_keys(ForwardPlan& plan, int64_t Lk, double segment_flops) {
  const bool few_rows = plan.rows_per_task <= kFewRowsPerTask;
  if (plan.threads == 1 || Lk <= kSegment || (plan.tasks >= plan.threads && !few_rows)) return;
  const int64_t segments = ceil_div(Lk, kSegment);
  const int64_t fair = plan.tasks * segments / (kTasksPerThread * plan.threads);
  const auto worthwhile = static_cast<int64_t>(kTaskCost / segment_flops);
  const int64_t some = std::max(std::clamp<int64_t>(fair, 1, kMaxSegmentsPerTask), worthwhile);
  if (some >= segments) return;
  plan.segments = segments;
  plan.segments_per_task = some;
  plan.tasks *= plan.key_tasks();
}

inline ForwardPlan plan_forward(const AttentionParams& p, int threads) {
  ForwardPlan plan;
  const int64_t units = p.batch * p.Hkv;
  plan.rows = p.Hkv > 0 ? p.Hq / p.Hkv * p.Lq : 0;
  const double row_flops = 2.0 * static_cast<double>(p.Lk) * static_cast<double>(p.D + p.Dv) + 1e3;
  const double unit_flops = static_cast<double>(plan.rows) * row_flops + 2e4;
  const double total = static_cast<double>(units) * unit_flops;
  plan.threads = static_cast<int>(std::clamp(total / kThreadCost, 1.0, static_cast<double>(threads)));

  plan.rows_per_task = std::min(plan.rows, kMaxRowsPerTask);
  while (plan.rows_per_task > kRowBlock &&
         units * ceil_div(plan.rows, plan.rows_per_task) < 4 * static_cast<int64_t>(plan.threads)) {
    plan.rows_per_task = std::max(kRowBlock, plan.rows_per_task / 2);
  }
  plan.rows_per_task = std::max<int64_t>(plan.rows_per_task, 1);
  plan.row_tasks = ceil_div(plan.rows, plan.rows_per_task);
  plan.tasks = units * plan.row_tasks;
  share_out_keys(plan, p.Lk,
                 static_cast<double>(plan.rows_per_task * kSegment) * row_flops / static_cast<double>(p.Lk));
  if (plan.tasks > 0) {
    const double task_flops = total / static_cast<double>(plan.tasks);
    const int64_t fair_share = std::max<int64_t>(1, plan.tasks / (8 * static_cast<int64_t>(plan.threads)));
    plan.tasks_per_grab =
        static_cast<int64_t>(std::clamp(kTaskCost / task_flops, 1.0, static_cast<double>(fair_share)));
  }
  return plan;
}

// Numbers that one forward worker holds at most (with few rows only a panel of k or nothing of it, and no v): packed q, k,
// v, scores, accumulators (twice where there are segments).
inline int64_t forward_scratch_elements(const AttentionParams& p, const ForwardPlan& plan) {
  const int64_t keys = std::min(kKeyBlock, p.Lk), rows = plan.rows_per_task;
  return rows * p.D + keys * (p.D + p.Dv) + std::min(rows, kRowBlock) * keys + rows * p.Dv * (p.Lk > kSegment ? 2 : 1);
}

// The backward's blocks: kBackwardKeys keys with their dk and dv stay in L2 while all rows pass by.
inline constexpr int64_t kBackwardKeys = 128;
inline constexpr int64_t kBackwardRows = 96;

struct BackwardPlan {
  int64_t units = 0;       // batch entries × key/value heads
  int64_t key_blocks = 0;  // per unit
  // false: a task is a whole unit. true: a task is one key block of a unit, and tasks hand dq on to one another.
  bool wavefront = false;
  int64_t tasks = 0;
  int threads = 1;
};

inline BackwardPlan plan_backward(const AttentionParams& p, int threads) {
  BackwardPlan plan;
  plan.units = p.batch * p.Hkv;
  plan.key_blocks = ceil_div(p.Lk, kBackwardKeys);
  const double rows = p.Hkv > 0 ? static_cast<double>(p.Hq / p.Hkv * p.Lq) : 0.0;
  const double unit_flops = 5.0 * rows * static_cast<double>(p.Lk) * static_cast<double>(p.D + p.Dv) + rows * 1e3 + 2e4;
  plan.threads = static_cast<int>(
      std::clamp(static_cast<double>(plan.units) * unit_flops / kThreadCost, 1.0, static_cast<double>(threads)));
  const int64_t rounds = ceil_div(plan.units, plan.threads);
  const bool unbalanced = plan.units * 10 < rounds * plan.threads * 9;
  plan.wavefront = plan.threads > 1 && unbalanced && plan.key_blocks > 1;
  plan.tasks = plan.wavefront ? plan.units * plan.key_blocks : plan.units;
  return plan;
}

}  // namespace attn_ext::cpu
