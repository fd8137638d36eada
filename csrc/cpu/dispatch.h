// Which ISA's kernels run: the best that the CPU and the OS have, or the one forced by the environment variable
// ATTN_EXT_ISA or use_isa.
#pragma once

#include <string>
#include <vector>

#include "cpu/isa_list.h"

namespace attn_ext::cpu {

struct Kernels {
  const char* name;
  void (*forward)(const ForwardParams&, const Parallel&);
  void (*backward)(const BackwardParams&, const Parallel&);
  void (*weights)(const WeightsParams&, const Parallel&);
  void (*append)(const AppendParams&, const Parallel&);
  TileShape (*tile)(DType dtype);
};

struct IsaInfo {
  const char* name = "";
  bool compiled = false;    // this build has its kernels
  bool supported = false;   // this machine runs them
  bool by_default = false;  // they run where nobody asks for others
  std::string why_not;      // empty where the first two hold
};

// All ISAs that the package knows, best first for this machine.
std::vector<IsaInfo> isas();

// The names of those that this build has, in the same order. Asks Linux for nothing.
std::vector<std::string> compiled_isas();

// The names of all ISAs, best first on CPUs of a vendor (cpu/features.h). AMD's multiply pairs of bf16 twice as fast as
// fp32; on others the dot product is slower than fp32's multiply-adds, and avx512_bf16 stands behind avx512.
std::vector<const char*> best_first(const std::string& vendor);

// Which of them runs where nobody asks: the first whose features are all among those given.
std::string default_isa(const std::vector<std::string>& features, const std::string& vendor);

// The kernels in use. Throws std::invalid_argument where ATTN_EXT_ISA names none that can run.
const Kernels& kernels();
const char* active_isa();

// Switches to another ISA for the whole process; throws std::invalid_argument, naming the choices.
void use_isa(const std::string& name);

}  // namespace attn_ext::cpu
