// AMX (tiles, bf16) on top of what isa/avx512 asks for: bf16 calls only. All others are those of avx512.
#if defined(__x86_64__)

#include "cpu/isa/avx512/intrinsics.h"

#include "cpu/generic/std_headers.h"
#include "cpu/isa/amx_bf16/tiles.h"

#include "cpu/isa/avx512_bf16/region_begin.h"

#define ATTN_EXT_ISA_NAMESPACE amx_bf16
#include "cpu/isa/avx512/vec.h"
#include "cpu/isa/avx512_bf16/pairs.h"
// What follows is written over its Vec and Pairs.
#define ATTN_EXT_PAIR_TILE "cpu/isa/amx_bf16/pair_tile.h"
#include "cpu/generic/pairs_only-inl.h"

#include "cpu/isa/avx512/region_end.h"

#endif  // x86-64
