// What a kernel is launched with, noted in the place of a launch where somebody only asks (choice.cpp: plan_forward).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace attn_ext::cuda {

struct Launch {
  std::string kernel;
  int64_t blocks = 0;
  int threads = 0;          // a block
  size_t shared_bytes = 0;  // a block
};

// Where this thread's launches are noted, and then not made; null: they are made.
inline thread_local std::vector<Launch>* noted_launches = nullptr;

// Notes this thread's launches while it lives.
class NoteLaunches {
 public:
  explicit NoteLaunches(std::vector<Launch>& to) { noted_launches = &to; }
  ~NoteLaunches() { noted_launches = nullptr; }
  NoteLaunches(const NoteLaunches&) = delete;
  NoteLaunches& operator=(const NoteLaunches&) = delete;
};

}  // namespace attn_ext::cuda
