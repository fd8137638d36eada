#include "cpu/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "cpu/features.h"

namespace attn_ext::cpu {
namespace {

#define ATTN_EXT_TABLE_ROW(isa) {#isa, isa::forward, isa::backward, isa::weights, isa::append, isa::tile},
constexpr Kernels kTable[] = {ATTN_EXT_FOR_EACH_ISA(ATTN_EXT_TABLE_ROW)};
#undef ATTN_EXT_TABLE_ROW

// The features that an ISA's kernels were compiled with.
std::vector<std::string> required(const std::string& isa) {
  if (isa == "avx2") return {"avx2", "fma", "f16c"};
  if (isa == "avx512") return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"};
  if (isa == "avx512_bf16") return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"};
  if (isa == "amx_bf16") {
    return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "amx_bf16"};
  }
  if (isa == "neon") return {"asimd"};
  return {};
}

// Why an ISA's kernels cannot run here; empty where they can.
std::string why_not(const std::string& isa) {
  std::string lacking;
  for (const std::string& name : required(isa)) {
    if (has_feature(name)) continue;
    if (name == "amx_bf16" && lacking.empty() && !why_no_tiles().empty()) return why_no_tiles();
    lacking += (lacking.empty() ? "" : ", ") + name;
  }
  return lacking.empty() ? "" : "the CPU or the OS lacks " + lacking;
}

const Kernels* compiled(const std::string& name) {
  for (const Kernels& k : kTable) {
    if (name == k.name) return &k;
  }
  return nullptr;
}

const Kernels* find(const std::string& name) { return why_not(name).empty() ? compiled(name) : nullptr; }

[[noreturn]] void refuse(const std::string& what, const std::string& name) {
  std::string choices, why;
  for (const IsaInfo& isa : isas()) {
    if (isa.supported) choices += (choices.empty() ? "" : ", ") + std::string(isa.name);
    if (name == isa.name) why = " (" + isa.why_not + ")";
  }
  throw std::invalid_argument("attn_ext: " + what + " names the ISA '" + name + "'" + why +
                              "; this machine can run: " + choices);
}

const Kernels* initial() {
  const char* forced = std::getenv("ATTN_EXT_ISA");
  if (forced == nullptr || *forced == '\0') return compiled(default_isa(cpu_features(), cpu_vendor()));
  const Kernels* k = find(forced);
  if (k == nullptr) refuse("the environment variable ATTN_EXT_ISA", forced);
  return k;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

std::vector<const char*> best_first(const std::string& vendor) {
  std::vector<const char*> names(std::begin(kAllIsas), std::end(kAllIsas));
  if (vendor != "AuthenticAMD") {
    const auto is = [](const char* wanted) { return [=](const char* name) { return std::strcmp(name, wanted) == 0; }; };
    const auto pairs = std::find_if(names.begin(), names.end(), is("avx512_bf16"));
    const auto plain = std::find_if(pairs, names.end(), is("avx512"));
    if (plain != names.end()) std::rotate(pairs, pairs + 1, plain + 1);
  }
  return names;
}

std::string default_isa(const std::vector<std::string>& features, const std::string& vendor) {
  for (const char* name : best_first(vendor)) {
    const std::vector<std::string> all = required(name);
    const bool runs = std::all_of(all.begin(), all.end(), [&](const std::string& one) {
      return std::find(features.begin(), features.end(), one) != features.end();
    });
    if (runs) return name;
  }
  return "scalar";
}

std::vector<IsaInfo> isas() {
  const std::string by_default = default_isa(cpu_features(), cpu_vendor());
  std::vector<IsaInfo> all;
  for (const char* name : best_first(cpu_vendor())) {
    IsaInfo info;
    info.name = name;
    info.compiled = compiled(name) != nullptr;
    info.why_not = info.compiled ? why_not(name) : "not for this architecture";
    info.supported = info.why_not.empty();
    info.by_default = name == by_default;
    all.push_back(info);
  }
  return all;
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const char* name : best_first(cpu_vendor())) {
    if (compiled(name) != nullptr) names.emplace_back(name);
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
