// How kernels use threads, without knowing whose threads they are: torch's pool in the extension, std::thread in the
// torch-free tests. Threads only decide who runs a task, never what a task computes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace attn_ext::cpu {

using WorkerBody = void (*)(void* context, int worker);

struct Parallel {
  int threads = 1;
  // Calls body(context, w) once for every w in [0, workers), at the same time or one after the other, and returns when
  // all are done. Null: the calling thread runs everything.
  void (*run)(int workers, WorkerBody body, void* context) = nullptr;
};

// Calls worker(next) on up to `threads` threads; `next()` hands out 0, 1, … tasks-1 in order, then -1.
// A task may wait for tasks handed out before it: those have been started by a thread that is running.
template <class Worker>
void share_tasks(const Parallel& parallel, int64_t tasks, const Worker& worker) {
  const int workers = static_cast<int>(std::min<int64_t>(parallel.run ? parallel.threads : 1, tasks));
  if (workers <= 1) {
    int64_t handed_out = 0;
    worker([&]() -> int64_t { return handed_out < tasks ? handed_out++ : -1; });
    return;
  }
  struct Shared {
    std::atomic<int64_t> handed_out{0};
    int64_t tasks;
    const Worker* worker;
  } shared;
  shared.tasks = tasks;
  shared.worker = &worker;
  parallel.run(
      workers,
      [](void* context, int) {
        auto& s = *static_cast<Shared*>(context);
        (*s.worker)([&s]() -> int64_t {
          const int64_t task = s.handed_out.fetch_add(1, std::memory_order_relaxed);
          return task < s.tasks ? task : -1;
        });
      },
      &shared);
}

}  // namespace attn_ext::cpu
