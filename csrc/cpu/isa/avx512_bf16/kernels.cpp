// AVX-512 BF16 on top of what isa/avx512 asks for: bf16 calls only. All others are those of avx512.
#if defined(__x86_64__)

#if defined(ATTN_EXT_EMULATE_AVX512)
#include "cpu/isa/avx512/emulation.h"
#else
#include <immintrin.h>
#endif

#include "cpu/generic/std_headers.h"

#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
#endif

#define ATTN_EXT_ISA_NAMESPACE avx512_bf16
#include "cpu/isa/avx512/vec.h"
#include "cpu/isa/avx512_bf16/pairs.h"
// What follows is written over its Vec and Pairs.
#define ATTN_EXT_PAIR_TILE "cpu/isa/avx512_bf16/pair_tile.h"
#include "cpu/generic/pairs_only-inl.h"

#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#endif  // x86-64
