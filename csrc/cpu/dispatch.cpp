#include "cpu/dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

namespace attn_ext::cpu {
namespace {

#define ATTN_EXT_TABLE_ROW(isa) {#isa, isa::forward, isa::backward, isa::weights, isa::append, isa::tile},
constexpr Kernels kTable[] = {ATTN_EXT_FOR_EACH_ISA(ATTN_EXT_TABLE_ROW)};  // best first
#undef ATTN_EXT_TABLE_ROW

#if defined(__x86_64__)
// Whether the CPU multiplies bf16 tiles, the OS saves them, and lets this process have them: Linux wants to be asked once
// (arch_prctl, since 5.16), for a thread's state grows by 8 KB.
bool has_amx_bf16() {
#if defined(__linux__)
  static const bool has = [] {
    constexpr unsigned kTiles = 1u << 24, kBf16 = 1u << 22, kSavedByOs = 1u << 27;
    constexpr unsigned kTileConfigAndData = 3u << 17;  // of XCR0
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kSavedByOs) == 0) return false;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    if ((edx & (kTiles | kBf16)) != (kTiles | kBf16)) return false;
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & kTileConfigAndData) != kTileConfigAndData) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}
#endif

struct Feature {
  const char* name;
  bool present;
};

// The features asked of the CPU; the compiler's builtin also checks that the OS saves the wide registers.
std::vector<Feature> features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Not every compiler's builtin knows F16C: CPUID leaf 1, ECX bit 29. It works on registers that the check of AVX2
  // finds saved by the OS.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1u) != 0;
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", f16c},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
          {"amx_bf16", has_amx_bf16()}};
#elif defined(__aarch64__)
  return {{"asimd", true}};
#else
  return {};
#endif
}

// The features that an ISA's kernels were compiled with.
std::vector<std::string> required(const std::string& isa) {
#if defined(ATTN_EXT_EMULATE_AVX512)
  if (isa == "avx512" || isa == "avx512_bf16" || isa == "amx_bf16") return {};
#elif defined(ATTN_EXT_EMULATE_AMX)
  if (isa == "amx_bf16") return required("avx512_bf16");
#endif
  if (isa == "avx2") return {"avx2", "fma", "f16c"};
  if (isa == "avx512") return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"};
  if (isa == "avx512_bf16") return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"};
  if (isa == "amx_bf16") {
    return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "amx_bf16"};
  }
  if (isa == "neon") return {"asimd"};
  return {};
}

std::string missing(const std::string& isa) {
  std::string names;
  for (const std::string& name : required(isa)) {
    bool present = false;
    for (const Feature& f : features()) present |= f.present && name == f.name;
    if (!present) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

const Kernels* find(const std::string& name) {
  for (const Kernels& k : kTable) {
    if (name == k.name && missing(name).empty()) return &k;
  }
  return nullptr;
}

[[noreturn]] void refuse(const std::string& what, const std::string& name) {
  std::string choices;
  for (const Kernels& k : kTable) {
    if (missing(k.name).empty()) choices += (choices.empty() ? "" : ", ") + std::string(k.name);
  }
  std::string why;
  for (const IsaInfo& isa : isas()) {
    if (name == isa.name) why = " (" + isa.why_not + ")";
  }
  throw std::invalid_argument("attn_ext: " + what + " names the ISA '" + name + "'" + why +
                              "; this machine can run: " + choices);
}

const Kernels* initial() {
  const char* forced = std::getenv("ATTN_EXT_ISA");
  if (forced != nullptr && *forced != '\0') {
    const Kernels* k = find(forced);
    if (k == nullptr) refuse("the environment variable ATTN_EXT_ISA", forced);
    return k;
  }
  for (const Kernels& k : kTable) {
    if (missing(k.name).empty()) return &k;
  }
  return &kTable[std::size(kTable) - 1];
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

std::vector<IsaInfo> isas() {
  std::vector<IsaInfo> all;
  for (const char* name : kAllIsas) {
    IsaInfo info{name, false, false, ""};
    for (const Kernels& k : kTable) info.compiled |= std::string(name) == k.name;
    const std::string lacks = missing(name);
    info.supported = info.compiled && lacks.empty();
    if (!info.compiled) {
      info.why_not = "not for this architecture";
    } else if (!lacks.empty()) {
      info.why_not = "the CPU or the OS lacks " + lacks;
    }
    all.push_back(info);
  }
  return all;
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  for (const Feature& f : features()) {
    if (f.present) names.emplace_back(f.name);
  }
  return names;
}

const Kernels& kernels() {
  const Kernels* k = active.load(std::memory_order_acquire);
  if (k == nullptr) {
    k = initial();
    active.store(k, std::memory_order_release);
  }
  return *k;
}

const char* active_isa() { return kernels().name; }

void use_isa(const std::string& name) {
  const Kernels* k = find(name);
  if (k == nullptr) refuse("backend.use", name);
  active.store(k, std::memory_order_release);
}

}  // namespace attn_ext::cpu
