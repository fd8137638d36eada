#include "simulator.h"

#include <algorithm>
#include <array>
#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace attn_ext::cuda_sim {
namespace {

namespace fiber = boost::context::detail;

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kGranule = 2;  // bytes of shared memory that are watched as one
constexpr int kBanks = 32;
constexpr size_t kBankBytes = 4;

std::string text_of(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

// ---- Global memory -------------------------------------------------------------------------------------------------

struct Range {
  uintptr_t begin, end;
  bool writable;
};

std::map<uint64_t, Range> ranges;
uint64_t next_range = 0;

// ---- One block -----------------------------------------------------------------------------------------------------

constexpr size_t kMostBrought = 32;
constexpr size_t kCopyBytes = 16;

enum class State { ready, at_barrier, in_meeting, done };

struct Copy {
  size_t offset = 0;  // in shared memory
  const void* from = nullptr;
  size_t bytes = 0;
};

struct Thread {
  fiber::fcontext_t context = nullptr;
  State state = State::ready;
  Site site;  // where it waits
  bool flag = false;
  // What it brings to a meeting of its warp, by the parity of how many there were: a lane may arrive at the next one
  // before all have read this one's.
  struct alignas(16) Brought {
    std::array<unsigned char, kMostBrought> bytes;
  };
  std::array<Brought, 2> brought{};
  int64_t meetings = 0;
  // Copies on their way: those not yet in a group, and the groups, oldest first.
  std::vector<Copy> ungrouped;
  std::deque<std::vector<Copy>> groups;
};

// Everything before a barrier comes before everything after it. Nothing else puts accesses of two threads in order: an
// exchange within a warp is no fence.
struct Moment {
  int thread = -1;
  int64_t barrier = -1;

  // Whether an access at this moment is ordered with one that another thread makes at `later`.
  bool before(const Moment& later) const { return thread < 0 || thread == later.thread || barrier < later.barrier; }
};

struct Granule {
  Moment written;
  Moment read;                  // the last one
  bool read_by_others = false;  // by several threads since its barrier
  int copied_by = -1;           // whose copy is on its way here

  void add_read(const Moment& moment) {
    const bool since = read.thread >= 0 && read.barrier == moment.barrier;
    read_by_others = since && (read_by_others || read.thread != moment.thread);
    read = moment;
  }
  // Whether a write now comes after all reads.
  bool reads_before(const Moment& moment) const {
    return read.before(moment) && !(read_by_others && read.barrier == moment.barrier);
  }
};

// The shared accesses of a warp at one place of the source, lane by lane, since the last time its lanes met.
struct Accesses {
  size_t bytes = 0;
  std::array<std::vector<uint32_t>, kWarpSize> offsets;
};

class Block {
 public:
  Block(const Launch& launch, const std::function<void()>& body, int64_t index, uint64_t seed);

  void run();

  int thread_index() const { return current_; }
  int64_t block_index() const { return index_; }
  int64_t block_count() const { return launch_.blocks; }
  char* shared_memory() { return shared_.get(); }
  const char* name() const { return launch_.name; }

  void check_shared(const void* at, size_t bytes, Use use, Site site);
  bool wait_for_block(bool flag, Site site);
  void meet(const void* value, size_t bytes, Site site);
  const void* brought_by(int lane) const;
  void begin_copy(void* to, const void* from, size_t bytes, Site site);
  void end_group_of_copies();
  void wait_for_copies(int pending);

  Statistics counted;

 private:
  static void enter(fiber::transfer_t transfer);
  void wait(State state, Site site);
  bool release_warps();
  bool release_block();
  [[noreturn]] void stuck() const;
  std::string who(int thread) const {
    return std::string(launch_.name) + ", block " + std::to_string(index_) + ", thread " + std::to_string(thread);
  }
  std::string at(int thread) const;
  Moment now() const;
  void count_conflicts(int warp);

  const Launch& launch_;
  const std::function<void()>& body_;
  const int64_t index_;
  std::vector<Thread> threads_;
  std::vector<int> order_;
  std::unique_ptr<char[], decltype(&std::free)> shared_;
  std::vector<Granule> granules_;
  std::vector<std::map<std::pair<const char*, int>, Accesses>> accesses_;  // by warp and place
  int64_t barriers_ = 0;
  bool any_flag_ = false;
  int current_ = -1;
  fiber::fcontext_t scheduler_ = nullptr;
  std::exception_ptr error_;
};

Block* running = nullptr;

// Makes a block the one that device code belongs to, for as long as it lives.
class Running {
 public:
  explicit Running(Block* block) { running = block; }
  ~Running() { running = nullptr; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

Statistics total;
bool counting = false;

Block& block() {
  if (running == nullptr) throw std::logic_error("cuda_sim: device code outside a kernel");
  return *running;
}

// Stacks are kept from block to block.
char* stack_of(int thread) {
  static const std::unique_ptr<char[]> memory(new char[kStackBytes * kMaxThreads]);
  return memory.get() + kStackBytes * static_cast<size_t>(thread);
}

Block::Block(const Launch& launch, const std::function<void()>& body, int64_t index, uint64_t seed)
    : launch_(launch),
      body_(body),
      index_(index),
      threads_(static_cast<size_t>(launch.threads)),
      order_(static_cast<size_t>(launch.threads)),
      shared_(static_cast<char*>(std::aligned_alloc(128, (launch.shared_bytes + 127) / 128 * 128 + 128)), &std::free),
      granules_((launch.shared_bytes + kGranule - 1) / kGranule),
      accesses_(static_cast<size_t>(launch.threads / kWarpSize)) {
  std::memset(shared_.get(), 0xff, launch.shared_bytes);  // NaN in every format
  std::iota(order_.begin(), order_.end(), 0);
  std::shuffle(order_.begin(), order_.end(), std::mt19937_64(seed));
  for (int t = 0; t < launch.threads; ++t) {
    threads_[static_cast<size_t>(t)].context = fiber::make_fcontext(stack_of(t) + kStackBytes, kStackBytes, &enter);
  }
}

void Block::enter(fiber::transfer_t transfer) {
  auto* self = static_cast<Block*>(transfer.data);
  self->scheduler_ = transfer.fctx;
  Thread& thread = self->threads_[static_cast<size_t>(self->current_)];
  try {
    self->body_();
  } catch (...) {  // nothing can unwind out of a fiber's stack: run() throws it again on its own
    self->error_ = std::current_exception();
  }
  thread.state = State::done;
  fiber::jump_fcontext(self->scheduler_, nullptr);
  std::abort();  // a finished fiber is never entered again
}

void Block::run() {
  const Running here(this);
  const auto all_done = [&] {
    return std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.state == State::done; });
  };
  while (!all_done()) {
    bool ran = false;
    for (const int t : order_) {
      Thread& thread = threads_[static_cast<size_t>(t)];
      if (thread.state != State::ready) continue;
      ran = true;
      current_ = t;
      thread.context = fiber::jump_fcontext(thread.context, this).fctx;
      if (error_) std::rethrow_exception(error_);
    }
    if (!release_warps() && !release_block() && !ran) stuck();
  }
  for (int warp = 0; warp < static_cast<int>(accesses_.size()); ++warp) count_conflicts(warp);
}

void Block::wait(State state, Site site) {
  Thread& thread = threads_[static_cast<size_t>(current_)];
  thread.state = state;
  thread.site = site;
  const int self = current_;
  scheduler_ = fiber::jump_fcontext(scheduler_, nullptr).fctx;
  current_ = self;
}

// Lets the lanes of every warp go on whose lanes all wait at one exchange.
bool Block::release_warps() {
  bool released = false;
  for (size_t warp = 0; warp < accesses_.size(); ++warp) {
    const size_t first = warp * kWarpSize, last = std::min(first + kWarpSize, threads_.size());
    bool all = true;
    for (size_t t = first; t < last; ++t) {
      all &= threads_[t].state == State::in_meeting && threads_[t].site == threads_[first].site;
    }
    if (!all) continue;
    count_conflicts(static_cast<int>(warp));
    for (size_t t = first; t < last; ++t) threads_[t].state = State::ready;
    released = true;
  }
  return released;
}

bool Block::release_block() {
  const bool all = std::all_of(threads_.begin(), threads_.end(), [&](const Thread& t) {
    return t.state == State::at_barrier && t.site == threads_[0].site;
  });
  if (!all) return false;
  for (int warp = 0; warp < static_cast<int>(accesses_.size()); ++warp) count_conflicts(warp);
  any_flag_ = std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.flag; });
  for (Thread& thread : threads_) thread.state = State::ready;
  ++barriers_;
  return true;
}

std::string Block::at(int thread) const {
  const Thread& t = threads_[static_cast<size_t>(thread)];
  switch (t.state) {
    case State::done:
      return "thread " + std::to_string(thread) + " is at the end of the kernel";
    case State::at_barrier:
      return "thread " + std::to_string(thread) + " waits at the barrier of " + text_of(t.site);
    default:
      return "thread " + std::to_string(thread) + " waits for its warp at " + text_of(t.site);
  }
}

// Nobody can go on: says who stands where.
void Block::stuck() const {
  for (size_t t = 0; t < threads_.size(); ++t) {
    if (threads_[t].state != State::in_meeting) continue;
    const size_t first = t / kWarpSize * kWarpSize, last = std::min(first + kWarpSize, threads_.size());
    for (size_t other = first; other < last; ++other) {
      if (threads_[other].state == State::in_meeting && threads_[other].site == threads_[t].site) continue;
      throw Fault(FaultKind::divergent_warp, std::string(launch_.name) + ", block " + std::to_string(index_) + ": " +
                                                 at(static_cast<int>(t)) + ", but " + at(static_cast<int>(other)));
    }
  }
  for (size_t other = 1; other < threads_.size(); ++other) {
    if (threads_[other].state == threads_[0].state && threads_[other].site == threads_[0].site) continue;
    throw Fault(FaultKind::divergent_barrier, std::string(launch_.name) + ", block " + std::to_string(index_) + ": " +
                                                  at(0) + ", but " + at(static_cast<int>(other)));
  }
  throw std::logic_error("cuda_sim: nobody can go on, and nobody stands elsewhere");
}

Moment Block::now() const { return {current_, barriers_}; }

void Block::check_shared(const void* at, size_t bytes, Use use, Site site) {
  const auto offset = static_cast<const char*>(at) - shared_.get();
  if (offset < 0 || static_cast<size_t>(offset) + bytes > launch_.shared_bytes) {
    throw Fault(FaultKind::out_of_bounds, who(current_) + " at " + text_of(site) + ": shared bytes " +
                                              std::to_string(offset) + " … " +
                                              std::to_string(offset + static_cast<int64_t>(bytes) - 1) + " of " +
                                              std::to_string(launch_.shared_bytes));
  }
  if (static_cast<size_t>(offset) % bytes != 0) {
    throw Fault(FaultKind::misaligned, who(current_) + " at " + text_of(site) + ": " + std::to_string(bytes) +
                                           " bytes of shared memory at offset " + std::to_string(offset));
  }
  const Moment moment = now();
  for (size_t g = static_cast<size_t>(offset) / kGranule; g * kGranule < static_cast<size_t>(offset) + bytes; ++g) {
    Granule& granule = granules_[g];
    const auto race = [&](const Moment& other, const char* did) {
      throw Fault(FaultKind::race, who(current_) + (use == Use::read ? " reads" : " writes") + " shared byte " +
                                       std::to_string(g * kGranule) + " at " + text_of(site) + ", which thread " +
                                       std::to_string(other.thread) + " " + did + " with no barrier in between");
    };
    if (granule.written.thread < 0 && use == Use::read) {
      throw Fault(FaultKind::uninitialized, who(current_) + " at " + text_of(site) + " reads shared byte " +
                                                std::to_string(g * kGranule) + ", which nothing wrote");
    }
    if (granule.copied_by >= 0) {
      throw Fault(FaultKind::race, who(current_) + (use == Use::read ? " reads" : " writes") + " shared byte " +
                                       std::to_string(g * kGranule) + " at " + text_of(site) +
                                       ", where a copy of thread " + std::to_string(granule.copied_by) +
                                       " is on its way to that nobody waited for");
    }
    if (!granule.written.before(moment)) race(granule.written, "wrote");
    if (use == Use::write) {
      if (!granule.reads_before(moment)) race(granule.read, "read");
      granule.written = moment;
    } else {
      granule.add_read(moment);
    }
  }
  if (!counting) return;
  Accesses& accesses = accesses_[static_cast<size_t>(current_ / kWarpSize)][{site.file, site.line}];
  accesses.bytes = bytes;
  accesses.offsets[static_cast<size_t>(current_ % kWarpSize)].push_back(static_cast<uint32_t>(offset));
}

// A warp's n-th access at one place is one instruction. Lanes that take 8 (16) bytes are served by halves (quarters) of a
// warp; in each phase a bank gives one word in a pass, to however many lanes want it.
void Block::count_conflicts(int warp) {
  for (auto& [place, accesses] : accesses_[static_cast<size_t>(warp)]) {
    const size_t words = std::max<size_t>(accesses.bytes / kBankBytes, 1);
    const size_t lanes_a_phase = kWarpSize / words;
    size_t longest = 0;
    for (const auto& lane : accesses.offsets) longest = std::max(longest, lane.size());
    for (size_t n = 0; n < longest; ++n) {
      for (size_t first = 0; first < kWarpSize; first += lanes_a_phase) {
        std::array<std::set<size_t>, kBanks> wanted;
        for (size_t lane = first; lane < first + lanes_a_phase; ++lane) {
          if (n >= accesses.offsets[lane].size()) continue;
          const size_t word = accesses.offsets[lane][n] / kBankBytes;
          for (size_t w = word; w < word + words; ++w) wanted[w % kBanks].insert(w);
        }
        size_t passes = 0;
        for (const auto& of_bank : wanted) passes = std::max(passes, of_bank.size());
        if (passes == 0) continue;
        ++counted.shared_accesses;
        counted.bank_conflicts += static_cast<int64_t>(passes) - 1;
      }
    }
    for (auto& lane : accesses.offsets) lane.clear();
  }
}

bool Block::wait_for_block(bool flag, Site site) {
  threads_[static_cast<size_t>(current_)].flag = flag;
  wait(State::at_barrier, site);
  return any_flag_;
}

void Block::meet(const void* value, size_t bytes, Site site) {
  if (bytes > kMostBrought) throw std::logic_error("cuda_sim: a lane brings more than there is room for");
  Thread& self = threads_[static_cast<size_t>(current_)];
  std::memcpy(self.brought[static_cast<size_t>(self.meetings++ % 2)].bytes.data(), value, bytes);
  wait(State::in_meeting, site);
}

const void* Block::brought_by(int lane) const {
  const auto parity = static_cast<size_t>((threads_[static_cast<size_t>(current_)].meetings - 1) % 2);
  return threads_[static_cast<size_t>(current_ / kWarpSize * kWarpSize + lane)].brought[parity].bytes.data();
}

void Block::begin_copy(void* to, const void* from, size_t bytes, Site site) {
  check_shared(to, kCopyBytes, Use::write, site);
  const auto offset = static_cast<size_t>(static_cast<const char*>(to) - shared_.get());
  for (size_t g = offset / kGranule; g * kGranule < offset + kCopyBytes; ++g) granules_[g].copied_by = current_;
  threads_[static_cast<size_t>(current_)].ungrouped.push_back({offset, from, bytes});
}

void Block::end_group_of_copies() {
  Thread& self = threads_[static_cast<size_t>(current_)];
  self.groups.push_back(std::move(self.ungrouped));
  self.ungrouped.clear();
}

void Block::wait_for_copies(int pending) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  while (self.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : self.groups.front()) {
      std::memset(shared_.get() + copy.offset, 0, kCopyBytes);
      if (copy.bytes > 0) std::memcpy(shared_.get() + copy.offset, copy.from, copy.bytes);
      for (size_t g = copy.offset / kGranule; g * kGranule < copy.offset + kCopyBytes; ++g) {
        granules_[g].copied_by = -1;
        granules_[g].written = now();
      }
    }
    self.groups.pop_front();
  }
}

}  // namespace

const char* name_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::out_of_bounds:
      return "out of bounds";
    case FaultKind::misaligned:
      return "misaligned";
    case FaultKind::uninitialized:
      return "uninitialized";
    case FaultKind::race:
      return "race";
    case FaultKind::divergent_barrier:
      return "divergent barrier";
    case FaultKind::divergent_warp:
      return "divergent warp";
    default:
      return "bad launch";
  }
}

Fault::Fault(FaultKind kind, const std::string& what)
    : std::runtime_error(std::string(name_of(kind)) + ": " + what), kind(kind) {}

Allow::Allow(const void* memory, size_t bytes, Access access) {
  key_ = next_range++;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  ranges.emplace(key_, Range{begin, begin + bytes, access == Access::read_write});
}

Allow::~Allow() { ranges.erase(key_); }

void run(const Launch& launch, const std::function<void()>& body) {
  if (running != nullptr) throw std::logic_error("cuda_sim: a kernel launched from a kernel");
  if (launch.threads < 1 || launch.threads > kMaxThreads || launch.threads % kWarpSize != 0 || launch.blocks < 1 ||
      launch.blocks > 0x7fffffff) {
    throw Fault(FaultKind::bad_launch, std::string(launch.name) + ": " + std::to_string(launch.blocks) + " blocks of " +
                                           std::to_string(launch.threads) + " threads");
  }
  std::vector<int64_t> order(static_cast<size_t>(launch.blocks));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(static_cast<uint64_t>(launch.blocks) * 1000 + static_cast<uint64_t>(launch.threads));
  std::shuffle(order.begin(), order.end(), random);
  ++total.launches;
  int64_t& largest = total.largest[launch.name];
  largest = std::max(largest, launch.blocks);
  for (const int64_t index : order) {
    Block block(launch, body, index, random());
    block.run();
    ++total.blocks;
    total.shared_accesses += block.counted.shared_accesses;
    total.bank_conflicts += block.counted.bank_conflicts;
    total.global_loads += block.counted.global_loads;
    total.global_stores += block.counted.global_stores;
  }
}

Statistics statistics() { return total; }
void reset_statistics(bool count_conflicts) {
  total = {};
  counting = count_conflicts;
}

int thread_index() { return block().thread_index(); }
int64_t block_index() { return block().block_index(); }
int64_t block_count() { return block().block_count(); }
char* shared_memory() { return block().shared_memory(); }

namespace {

std::string text_of_access(size_t bytes, Use use) {
  return std::string(block().name()) + ", block " + std::to_string(block().block_index()) + ", thread " +
         std::to_string(block().thread_index()) + (use == Use::read ? " reads " : " writes ") + std::to_string(bytes) +
         " bytes of global memory";
}

// That the call may touch them.
void check_range(const void* at, size_t bytes, Use use) {
  Block& b = block();
  ++(use == Use::read ? b.counted.global_loads : b.counted.global_stores);
  const auto begin = reinterpret_cast<uintptr_t>(at);
  for (const auto& [key, range] : ranges) {
    if (begin >= range.begin && begin + bytes <= range.end && (use == Use::read || range.writable)) return;
  }
  throw Fault(FaultKind::out_of_bounds, text_of_access(bytes, use) + " outside what the call may touch");
}

}  // namespace

void check_global(const void* at, size_t bytes, Use use) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) {
    throw Fault(FaultKind::misaligned, text_of_access(bytes, use) + " at an address that is no multiple of that");
  }
  check_range(at, bytes, use);
}

void watch_read(const void* at, size_t bytes) {
  if (running != nullptr) check_global(at, bytes, Use::read);
}

void check_shared(const void* at, size_t bytes, Use use, Site site) { block().check_shared(at, bytes, use, site); }
bool wait_for_block(bool flag, Site site) { return block().wait_for_block(flag, site); }
void meet(const void* value, size_t bytes, Site site) { block().meet(value, bytes, site); }
const void* brought_by(int lane) { return block().brought_by(lane); }

void begin_copy(void* to, const void* from, size_t bytes, Site site) {
  if (bytes > kCopyBytes) throw std::logic_error("cuda_sim: a copy of more than 16 bytes");
  if (reinterpret_cast<uintptr_t>(from) % kCopyBytes != 0) {
    throw Fault(FaultKind::misaligned,
                std::string(block().name()) + " copies from an address that is no multiple of 16");
  }
  if (bytes > 0) check_range(from, bytes, Use::read);
  block().begin_copy(to, from, bytes, site);
}
void end_group_of_copies() { block().end_group_of_copies(); }
void wait_for_copies(int pending) { block().wait_for_copies(pending); }

}  // namespace attn_ext::cuda_sim
