// kernel_tests [group …]: runs all tests, or those of some groups; --list prints the groups.
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "cpu/dispatch.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

struct Test {
  const char* group;
  const char* name;
  void (*body)();
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

constexpr int kMaxReports = 10;
const Test* running = nullptr;
int failures = 0;
std::vector<std::string> contexts;
std::mutex reporting;

}  // namespace

Registration::Registration(const char* group, const char* name, void (*body)()) {
  tests().push_back({group, name, body});
}

void fail(const char* file, int line, const char* format, ...) {
  const std::lock_guard<std::mutex> lock(reporting);
  if (++failures > kMaxReports) return;
  std::string where;
  for (const std::string& context : contexts) where += context + ": ";
  std::printf("  %s:%d: %s", file, line, where.c_str());
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  if (failures == kMaxReports) std::printf("  (further failures of %s are not shown)\n", running->name);
}

bool given_up() { return failures >= kMaxReports; }

Context::Context(const std::string& text) { contexts.push_back(text); }
Context::~Context() { contexts.pop_back(); }

std::vector<std::string> runnable_isas() {
  std::vector<std::string> names;
  for (const cpu::IsaInfo& isa : cpu::isas()) {
    if (isa.supported) names.emplace_back(isa.name);
  }
#if defined(__SANITIZE_THREAD__)
  names.resize(1);  // work is shared out to threads by the same code in all of them
#endif
  return names;
}

bool isa_runs(const char* name) {
  for (const std::string& isa : runnable_isas()) {
    if (isa == name) return true;
  }
  return false;
}

void use_isa(const std::string& name) { cpu::use_isa(name); }

cpu::Parallel threads(int count) {
  return {count, [](int workers, cpu::WorkerBody body, void* context) {
            std::vector<std::thread> others;
            for (int w = 1; w < workers; ++w) others.emplace_back(body, context, w);
            body(context, 0);
            for (std::thread& t : others) t.join();
          }};
}

bool due(int64_t n) {
  const uint64_t scattered = static_cast<uint64_t>(n) * 0x9e3779b97f4a7c15u >> 32;
  return scattered % static_cast<uint64_t>(thinning()) == 0 && !given_up();
}

int thinning() {
  static const int n = [] {
    const char* text = std::getenv("ATTN_EXT_TEST_THIN");
    return text ? std::max(1, std::atoi(text)) : 1;
  }();
  return n;
}

namespace {

int run(int argc, char** argv) {
  const std::set<std::string> asked(argv + 1, argv + argc);
  std::set<std::string> groups;
  for (const Test& t : tests()) groups.insert(t.group);
  if (asked.count("--list")) {
    for (const std::string& group : groups) std::printf("%s\n", group.c_str());
    return 0;
  }
  for (const std::string& group : asked) {
    if (groups.count(group)) continue;
    std::printf("no test group '%s'; --list prints them\n", group.c_str());
    return 2;
  }
  std::string isas;
  for (const std::string& isa : runnable_isas()) isas += " " + isa;
  std::printf("instruction sets:%s\n", isas.c_str());
  int run = 0, failed = 0;
  for (const Test& t : tests()) {
    if (!asked.empty() && !asked.count(t.group)) continue;
    running = &t;
    failures = 0;
    std::printf("%s.%s\n", t.group, t.name);
    std::fflush(stdout);
    const auto began = std::chrono::steady_clock::now();
    try {
      t.body();
    } catch (const std::exception& e) {
      contexts.clear();
      fail(t.group, 0, "threw: %s", e.what());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("  %s in %.2f s", failures == 0 ? "passed" : "FAILED", took.count());
    if (failures != 0) std::printf(", %d checks failed", failures);
    std::printf("\n");
    ++run;
    failed += failures != 0;
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace attn_ext::test

int main(int argc, char** argv) { return attn_ext::test::run(argc, argv); }
