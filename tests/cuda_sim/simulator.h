// Runs CUDA kernels on the CPU and watches what they do.
//
// A block's threads are fibers: each runs until it has to wait for others (a barrier, an exchange within its warp), then
// the next one does. What a GPU leaves undefined ends the run with a Fault that names it:
//
//   out of bounds      global memory outside the tensors of the call, shared memory outside the block's
//   misaligned         an access not aligned to its own size
//   uninitialized      shared memory read before anything was written there
//   race               two threads at one place of shared memory, one of them writing, with no barrier in between; or
//                      anyone where a copy is on its way to that was not waited for
//   divergent barrier  threads of a block at different barriers, or some of them at the end of the kernel
//   divergent warp     lanes of a warp at different exchanges, or some of them elsewhere
//
// Blocks run one after the other in a shuffled order, and so do a block's threads: nothing may depend on either. One thread
// of the host at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

namespace attn_ext::cuda_sim {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 1024;

enum class FaultKind { out_of_bounds, misaligned, uninitialized, race, divergent_barrier, divergent_warp, bad_launch };

const char* name_of(FaultKind kind);

class Fault : public std::runtime_error {
 public:
  Fault(FaultKind kind, const std::string& what);  // the text begins with the kind's name
  const FaultKind kind;
};

// A place in a kernel's source.
struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  friend bool operator==(const Site& a, const Site& b) { return a.line == b.line && a.file == b.file; }
};

// Global memory that kernels may touch, for as long as the object lives. Overlapping ranges add up.
class Allow {
 public:
  enum class Access { read, read_write };

  Allow(const void* memory, size_t bytes, Access access);
  ~Allow();
  Allow(const Allow&) = delete;
  Allow& operator=(const Allow&) = delete;

 private:
  uint64_t key_;
};

struct Launch {
  const char* name = "";
  int64_t blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
};

// What the launches of a kernel, or of several, did.
struct Statistics {
  int64_t launches = 0, blocks = 0;
  std::map<std::string, int64_t> largest;       // launch of each kernel, in blocks
  int64_t global_loads = 0, global_stores = 0;  // one a thread
  // Where reset_statistics asked for them (they take a third of the time).
  int64_t shared_accesses = 0;  // one a warp, and a phase of it where lanes take 8 or 16 bytes
  int64_t bank_conflicts = 0;   // passes beyond the first that a bank had to make for such an access
};

// Runs `body` once a thread. Throws the first Fault.
void run(const Launch& launch, const std::function<void()>& body);

Statistics statistics();
void reset_statistics(bool count_conflicts = false);

// ---- What device code calls, in a thread of the block that is running ----------------------------------------------

int thread_index();
int64_t block_index();
int64_t block_count();

char* shared_memory();

enum class Use { read, write };
// What code that the CPU shares reads of a call's lengths and tables; heard inside kernels only.
void watch_read(const void* at, size_t bytes);
void check_global(const void* at, size_t bytes, Use use);
void check_shared(const void* at, size_t bytes, Use use, Site site);

// All threads of the block wait for one another. Returns whether any of them came with `flag`.
bool wait_for_block(bool flag, Site site);

// The lanes of the warp meet, each with `bytes` (at most 32) from `value`. What a lane has brought can be read until the one
// who reads has come to its next meeting.
void meet(const void* value, size_t bytes, Site site);
const void* brought_by(int lane);

// A copy of 16 bytes to shared memory, of which `bytes` come from global memory and the rest are zeros. It lands where its
// thread waits for it, and no earlier: wait_for_copies lands all but the newest `pending` groups.
void begin_copy(void* to, const void* from, size_t bytes, Site site);
void end_group_of_copies();
void wait_for_copies(int pending);

}  // namespace attn_ext::cuda_sim
