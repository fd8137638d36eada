// Which ISA's kernels run: asked of the CPU and the OS once, forced by the environment variable ATTN_EXT_ISA or use_isa.
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
  TileShape (*tile)(bool is_double);
};

struct IsaInfo {
  const char* name;
  bool compiled;        // this build has its kernels
  bool supported;       // this machine runs them
  std::string why_not;  // empty where both hold
};

// All ISAs that the package knows, best first.
std::vector<IsaInfo> isas();

// What the CPU reports of the features that the ISAs build on.
std::vector<std::string> cpu_features();

// The kernels in use. Throws std::invalid_argument where ATTN_EXT_ISA names none that can run.
const Kernels& kernels();
const char* active_isa();

// Switches to another ISA for the whole process; throws std::invalid_argument, naming the choices.
void use_isa(const std::string& name);

}  // namespace attn_ext::cpu
