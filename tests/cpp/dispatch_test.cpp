// Which ISA runs: the choice where nobody makes it, and what is refused.
#include "cpu/dispatch.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/plan.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

using namespace cpu;

using Features = std::vector<std::string>;

Features with(Features some, const Features& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

TEST(dispatch, names) {
  const std::vector<IsaInfo> all = isas();
  bool portable = false;
  for (const IsaInfo& isa : all) {
    CHECK((isa.compiled && isa.supported) == isa.why_not.empty(), "%s: '%s'", isa.name, isa.why_not.c_str());
    if (!isa.supported) {
      bool threw = false;
      try {
        use_isa(isa.name);
      } catch (const std::invalid_argument& e) {
        threw = std::string(e.what()).find("scalar") != std::string::npos;
      }
      CHECK(threw, "%s was taken, or the message names no choices", isa.name);
      continue;
    }
    portable |= std::string(isa.name) == "scalar";
    use_isa(isa.name);
    CHECK(std::string(active_isa()) == isa.name, "%s is active, not %s", active_isa(), isa.name);
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
      const TileShape tile = kernels().tile(dtype);
      CHECK(tile.rows > 0 && tile.columns > 0 && kKeyBlock % tile.columns == 0 && kBackwardKeys % tile.columns == 0,
            "%s: a tile of %d x %d", isa.name, tile.rows, tile.columns);
    }
  }
  CHECK(portable, "the portable kernels do not run");
  bool threw = false;
  try {
    use_isa("abacus");
  } catch (const std::invalid_argument& e) {
    threw = std::string(e.what()).find("abacus") != std::string::npos;
  }
  CHECK(threw, "an unknown name was taken");
}

// On every machine the rule is that of all machines.
TEST(dispatch, default_isa) {
  const Features haswell = {"avx2", "fma", "f16c"};
  const Features skylake = with(haswell, {"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  const Features zen4 = with(skylake, {"avx512bf16"});
  const Features sapphire_rapids = with(zen4, {"amx_bf16"});
  const std::string intel = "GenuineIntel", amd = "AuthenticAMD";
  const struct {
    const char* what;
    Features features;
    std::string vendor, isa;
  } cases[] = {
      {"Intel with AMX", sapphire_rapids, intel, "amx_bf16"},
      {"Intel whose OS refuses the tiles", zen4, intel, "avx512"},
      {"Intel with AVX-512", skylake, intel, "avx512"},
      {"AMD Zen 4 and 5", zen4, amd, "avx512_bf16"},
      {"AMD with tiles", sapphire_rapids, amd, "amx_bf16"},
      {"AMD Zen 3", haswell, amd, "avx2"},
      {"a vendor that nobody knows", zen4, "", "avx512"},
      {"tiles without AVX-512", with(haswell, {"amx_bf16"}), intel, "avx2"},
      {"AVX2 without F16C", {"avx2", "fma"}, intel, "scalar"},
      {"aarch64", {"asimd"}, "", "neon"},
      {"nothing", {}, "", "scalar"},
  };
  for (const auto& one : cases) {
    const std::string isa = default_isa(one.features, one.vendor);
    CHECK(isa == one.isa, "%s: %s, not %s", one.what, isa.c_str(), one.isa.c_str());
  }
}

TEST(dispatch, isas_stand_best_first) {
  std::vector<std::string> chosen;
  std::string first;
  for (const IsaInfo& isa : isas()) {
    if (isa.supported && first.empty()) first = isa.name;
    if (isa.by_default) chosen.push_back(isa.name);
  }
  CHECK(chosen.size() == 1 && chosen[0] == first, "%zu ISAs are the default, %s is the first", chosen.size(),
        first.c_str());
  for (const char* vendor : {"GenuineIntel", "AuthenticAMD", ""}) {
    CHECK(best_first(vendor).size() == isas().size(), "'%s' has other ISAs", vendor);
  }
}

TEST(dispatch, pairs_of_bf16_have_tiles_of_their_own) {
  for (const IsaInfo& isa : isas()) {
    if (!isa.supported) continue;
    use_isa(isa.name);
    const std::string name = isa.name;
    const bool pairs = name == "amx_bf16" || name == "avx512_bf16";
    const TileShape bf16 = kernels().tile(DType::bfloat16), fp32 = kernels().tile(DType::float32);
    CHECK(bf16.of_pairs == pairs && !fp32.of_pairs, "%s: pairs %d, of fp32 %d", isa.name, bf16.of_pairs, fp32.of_pairs);
    CHECK(!pairs || (bf16.rows == (name == "amx_bf16" ? 32 : 12) && bf16.columns == 32), "%s: %d x %d", isa.name,
          bf16.rows, bf16.columns);
  }
}

}  // namespace
}  // namespace attn_ext::test
