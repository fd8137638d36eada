// A test framework of one header and one source file: named tests in groups, failures with values, and every ISA that
// this machine runs.
//
//   TEST(group, name) { CHECK(x == 3, "x is %d", x); }
//
// A failed CHECK is reported and counted, and the test goes on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/parallel.h"

namespace attn_ext::test {

struct Registration {
  Registration(const char* group, const char* name, void (*body)());
};

// Reports a failure of the running test; printf's format. Not inline: what is compiled in an ISA's target region must
// not end up in code that runs everywhere.
[[gnu::format(printf, 3, 4)]] void fail(const char* file, int line, const char* format, ...);

// Whether so many checks of the running test have failed that further ones would only repeat it.
bool given_up();

// Names the case that failures belong to, until it ends.
class Context {
 public:
  explicit Context(const std::string& text);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

// The ISAs that this machine runs, best first.
std::vector<std::string> runnable_isas();
bool isa_runs(const char* name);

// Runs body once with each ISA in use.
template <class Body>
void for_each_isa(const Body& body);

// `threads` threads of the standard library's, all at the same time.
cpu::Parallel threads(int count);

// 1: everything. n: about every n-th of the generated cases, for emulators (environment variable ATTN_EXT_TEST_THIN).
int thinning();
// Whether the n-th of generated cases is to run. Scattered: cases take their options from n's remainders.
bool due(int64_t n);

void use_isa(const std::string& name);

template <class Body>
void for_each_isa(const Body& body) {
  for (const std::string& isa : runnable_isas()) {
    use_isa(isa);
    const Context context(isa);
    body();
  }
}

// Numbers that are the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}

  uint64_t bits() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform(double low, double high) { return low + (high - low) * (static_cast<double>(bits() >> 11) * 0x1p-53); }
  // One of 0 … count-1.
  int64_t below(int64_t count) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(count)); }
  bool chance(double p) { return uniform(0, 1) < p; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

 private:
  uint64_t state_;
};

}  // namespace attn_ext::test

#define TEST(group, name)                                                                                   \
  static void group##_##name();                                                                             \
  static const ::attn_ext::test::Registration group##_##name##_registration(#group, #name, group##_##name); \
  static void group##_##name()

#define CHECK(condition, ...)                                                  \
  do {                                                                         \
    if (!(condition)) ::attn_ext::test::fail(__FILE__, __LINE__, __VA_ARGS__); \
  } while (false)
