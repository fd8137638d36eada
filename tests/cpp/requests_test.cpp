// What a task of few rows asks memory for: the rows of its keys and values, each once, in the order of their use, and some
// way ahead of it.
#include <cstdint>
#include <vector>

#include "cpu/generic/std_headers.h"
#include "cpu/plan.h"
#include "testing.h"

#define ATTN_EXT_ISA_NAMESPACE scalar
#include "cpu/isa/scalar/vec.h"
// vec.h comes first: it says how far ahead.
#include "cpu/generic/requests-inl.h"

namespace attn_ext::cpu::scalar {
namespace {

constexpr int64_t kBlocks = 6, kRows = 4, kRowBytes = 256, kStepKeys = 16;
constexpr int kStepBytes = kStepKeys * kRowBytes;
constexpr int64_t kBlockBytes = kKeyBlock * kRowBytes;

// A sequence whose rows lie `page` together, pages in any order; k and v in two places.
class Sequence {
 public:
  explicit Sequence(int64_t page) : memory_(2 * kBlocks * kBlockBytes) {
    const int64_t pages = kBlocks * kKeyBlock / page;
    for (int64_t j = 0; j < kBlocks * kKeyBlock; ++j) {
      const int64_t at = (j / page * 7 + 3) % pages * page + j % page;  // 7 divides no number of pages used here
      keys_.push_back(memory_.data() + at * kRowBytes);
      values_.push_back(keys_.back() + kBlocks * kBlockBytes);
    }
  }
  BlockRows keys(int64_t block) const { return {keys_.data() + block * kKeyBlock, kKeyBlock, kRowBytes}; }
  BlockRows values(int64_t block) const { return {values_.data() + block * kKeyBlock, kKeyBlock, kRowBytes}; }
  const char* idle() const { return memory_.data(); }

  // Where in the order of use an address lies; −1 for what is no row.
  int64_t position(const char* address) const {
    for (int64_t j = 0; j < kBlocks * kKeyBlock; ++j) {
      for (const bool is_value : {false, true}) {
        const char* row = is_value ? values_[j] : keys_[j];
        if (address < row || address >= row + kRowBytes) continue;
        return (2 * (j / kKeyBlock) + is_value) * kBlockBytes + j % kKeyBlock * kRowBytes + (address - row);
      }
    }
    return -1;
  }

 private:
  std::vector<char> memory_;
  std::vector<const char*> keys_, values_;
};

// What the stretches handed out so far look like.
struct Walk {
  const Sequence& sequence;
  int64_t end = 0;  // of the last one
  int64_t spread = 0, idle = 0;

  template <int bytes>
  void see(const Ahead<bytes>& ahead, int64_t steps) {
    if (ahead.step == 0) {
      ++idle;
      return;
    }
    CHECK(ahead.step <= bytes, "a step of %lld bytes, of which %d are asked for", static_cast<long long>(ahead.step),
          bytes);
    const int64_t begin = sequence.position(ahead.start);
    CHECK(begin >= end, "at byte %lld of the order of use, after byte %lld", static_cast<long long>(begin),
          static_cast<long long>(end));
    spread += ahead.step * steps;
    end = begin + ahead.step * steps;
    CHECK(sequence.position(ahead.start + (end - begin) - 1) == end - 1, "%lld bytes from byte %lld on are no stretch",
          static_cast<long long>(end - begin), static_cast<long long>(begin));
  }
};

// Goes through all blocks as a task does; calls after(block, walk) at the end of each.
template <class F>
Walk go_through(const Sequence& sequence, F&& after) {
  Requests requests(kRows, kRowBytes, kRowBytes, sequence.idle());
  Walk walk{sequence};
  for (int64_t block = 0; block < kBlocks; ++block) {
    block == 0 ? requests.begin(sequence.keys(0), sequence.values(0), false) : requests.advance();
    if (block + 1 < kBlocks) requests.announce(sequence.keys(block + 1), sequence.values(block + 1));
    constexpr int64_t kSteps = 2;
    for (int64_t j = 0; j < kKeyBlock; j += kSteps * kStepKeys) walk.see(requests.beside<kStepBytes>(kSteps), kSteps);
    for (int64_t r = 0; r < kRows; ++r) walk.see(requests.beside_softmax<16>(kKeyBlock / 16), kKeyBlock / 16);
    for (int64_t j = 0; j < kKeyBlock; j += kSteps * kStepKeys) walk.see(requests.beside<kStepBytes>(kSteps), kSteps);
    after(block, walk);
  }
  return walk;
}

void test_end_to_end() {
  const Sequence sequence(kBlocks * kKeyBlock);
  const Walk walk = go_through(sequence, [&](int64_t block, const Walk& so_far) {
    if (block + 1 == kBlocks) return;
    const int64_t used = (block + 1) * 2 * kBlockBytes, lead = so_far.end - used;
    // Within a stretch: it ends where a block ends, and what it lacked is made up for later.
    CHECK(std::abs(lead - kPrefetchLead) <= 2 * kStepBytes, "%lld bytes ahead of block %lld",
          static_cast<long long>(lead), static_cast<long long>(block));
  });
  const int64_t all = kBlocks * 2 * kBlockBytes;
  CHECK(walk.end >= all, "asked up to byte %lld of %lld", static_cast<long long>(walk.end),
        static_cast<long long>(all));
  // All but the lead, and what was made up for, was spread over the steps of some work.
  CHECK(walk.spread > all * 8 / 10, "%lld bytes of %lld were asked for step by step",
        static_cast<long long>(walk.spread), static_cast<long long>(all));
  CHECK(walk.idle > 0, "nothing is left to be asked for beside the last block, but something was");
}

void test_pages() {
  for (const int64_t page : {1, 16, 48, 64, 256}) {
    const Sequence sequence(page);
    const Walk walk = go_through(sequence, [](int64_t, const Walk&) {});
    CHECK(walk.spread > 0, "pages of %lld: nothing asked for", static_cast<long long>(page));
    CHECK(walk.idle > 0, "pages of %lld: never idle", static_cast<long long>(page));
  }
}

// A task of one block: its values while it works on its keys.
void test_one_block() {
  const Sequence sequence(kBlocks * kKeyBlock);
  Requests requests(kRows, kRowBytes, kRowBytes, sequence.idle());
  requests.begin(sequence.keys(0), sequence.values(0), true);
  Walk walk{sequence, kBlockBytes};
  for (int64_t j = 0; j < kKeyBlock; j += kStepKeys) walk.see(requests.beside<kStepBytes>(1), 1);
  CHECK(walk.spread > kBlockBytes * 8 / 10 && walk.end <= 2 * kBlockBytes, "%lld bytes asked for, up to byte %lld",
        static_cast<long long>(walk.spread), static_cast<long long>(walk.end));
}

// Rows that are no stretches of memory: nothing to ask for, and no division by their size.
void test_nothing() {
  std::vector<const char*> rows(kKeyBlock, nullptr);
  const char near = 0;
  Requests requests(kRows, 0, 0, &near);
  requests.begin({rows.data(), kKeyBlock, 0}, {rows.data(), kKeyBlock, 0}, false);
  CHECK(requests.beside<kStepBytes>(2).step == 0 && requests.beside<kStepBytes>(2).start == &near,
        "asks for something");
  CHECK(requests.beside_softmax<16>(16).start == &near, "asks for something");
}

}  // namespace
}  // namespace attn_ext::cpu::scalar

TEST(requests, end_to_end) { attn_ext::cpu::scalar::test_end_to_end(); }
TEST(requests, pages) { attn_ext::cpu::scalar::test_pages(); }
TEST(requests, one_block) { attn_ext::cpu::scalar::test_one_block(); }
TEST(requests, nothing_to_ask_for) { attn_ext::cpu::scalar::test_nothing(); }
