// What the CPU and the OS offer to kernels. Torch free.
#pragma once

#include <string>
#include <vector>

namespace attn_ext::cpu {

// Whether the CPU has a feature and the OS keeps the registers that it works on. For the tiles of AMX ("amx_bf16") Linux
// has to be asked for permission as well: once for the process, its threads and its forks, by the first question about
// them. With the permission a thread's signal stack (sigaltstack) must have room for 8 KB more, so nobody asks who does
// not want to know.
bool has_feature(const std::string& name);

// The names of those that has_feature finds, of all that some ISA's kernels ask for.
std::vector<std::string> cpu_features();

// Why this process has no tiles on a CPU and an OS that have them; empty anywhere else.
std::string why_no_tiles();

// As CPUID gives it, "GenuineIntel" or "AuthenticAMD"; empty on other architectures.
std::string cpu_vendor();

}  // namespace attn_ext::cpu
