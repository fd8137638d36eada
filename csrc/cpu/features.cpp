#include "cpu/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <cerrno>
#include <cstring>

namespace attn_ext::cpu {
namespace {

#if defined(__x86_64__)
bool has_f16c() {
  // Not every compiler's builtin knows F16C: CPUID leaf 1, ECX bit 29. It works on registers that the check of AVX2
  // finds saved by the OS.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1u) != 0;
}

#if defined(__linux__)
// Whether the CPU multiplies tiles of bf16 and of bytes (there is none that does only one) and the OS keeps them.
bool knows_tiles() {
  constexpr unsigned kTiles = 1u << 24, kBf16 = 1u << 22, kBytes = 1u << 25, kSavedByOs = 1u << 27;
  constexpr unsigned kTileConfigAndData = 3u << 17;  // of XCR0
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kSavedByOs) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & (kTiles | kBf16 | kBytes)) != (kTiles | kBf16 | kBytes)) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileConfigAndData) == kTileConfigAndData;
}

// Asks Linux (5.16 and later) for the tiles; returns 0 or errno.
int ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}
#else
bool knows_tiles() { return false; }
int ask_for_tiles() { return ENOSYS; }
#endif

struct Tiles {
  bool known = knows_tiles();
  int refused = known ? ask_for_tiles() : 0;
};

const Tiles& tiles() {
  static const Tiles once;
  return once;
}
#endif

struct Feature {
  const char* name;
  bool (*present)();
};

// Asked by the compiler's builtin, which also checks that the OS saves the wide registers.
#define ATTN_EXT_FEATURE(name)                             \
  {                                                        \
    name, [] { return __builtin_cpu_supports(name) != 0; } \
  }

// Of AVX-512: a build with ATTN_EXT_EMULATE_AVX512 brings them itself.
#if defined(ATTN_EXT_EMULATE_AVX512)
#define ATTN_EXT_EMULATED_FEATURE(name) \
  {                                     \
    name, [] { return true; }           \
  }
#else
#define ATTN_EXT_EMULATED_FEATURE(name) ATTN_EXT_FEATURE(name)
#endif

#if defined(__x86_64__)
bool has_tiles() {
#if defined(ATTN_EXT_EMULATE_AMX)
  return true;
#else
  return tiles().known && tiles().refused == 0;
#endif
}
#endif

constexpr Feature kFeatures[] = {
#if defined(__x86_64__)
    ATTN_EXT_FEATURE("avx2"),
    ATTN_EXT_FEATURE("fma"),
    {"f16c", has_f16c},
    ATTN_EXT_EMULATED_FEATURE("avx512f"),
    ATTN_EXT_EMULATED_FEATURE("avx512bw"),
    ATTN_EXT_EMULATED_FEATURE("avx512dq"),
    ATTN_EXT_EMULATED_FEATURE("avx512vl"),
    ATTN_EXT_EMULATED_FEATURE("avx512bf16"),
    {"amx_bf16", has_tiles},
#elif defined(__aarch64__)
    {"asimd", [] { return true; }},
#else
    {"none", [] { return false; }},
#endif
};

#undef ATTN_EXT_FEATURE
#undef ATTN_EXT_EMULATED_FEATURE

bool is_present(const Feature& feature) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  return feature.present();
}

}  // namespace

bool has_feature(const std::string& name) {
  for (const Feature& feature : kFeatures) {
    if (name == feature.name) return is_present(feature);
  }
  return false;
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    if (is_present(feature)) names.emplace_back(feature.name);
  }
  return names;
}

std::string why_no_tiles() {
#if defined(__x86_64__)
  const int refused = tiles().refused;
  if (refused == 0) return "";
  std::string why = "Linux refuses AMX's tiles to this process (errno " + std::to_string(refused) + ": " +
                    std::strerror(refused) + ")";
  if (refused == ENOSPC) why += ": a thread has a signal stack (sigaltstack) that is too small for them";
  if (refused == EINVAL || refused == ENOSYS) why += ": it gives them from 5.16 on";
  return why;
#else
  return "";
#endif
}

std::string cpu_vendor() {
#if defined(__x86_64__)
  unsigned eax = 0, name[3] = {};
  if (__get_cpuid(0, &eax, &name[0], &name[2], &name[1]) == 0) return "";
  return std::string(reinterpret_cast<const char*>(name), sizeof name);
#else
  return "";
#endif
}

}  // namespace attn_ext::cpu
