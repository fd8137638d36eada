// The intrinsics of AVX-512: the compiler's, or SIMDe's where the build emulates them.
#pragma once

#if defined(ATTN_EXT_EMULATE_AVX512)
#include "cpu/isa/avx512/emulation.h"
#else
#include <immintrin.h>
#endif
