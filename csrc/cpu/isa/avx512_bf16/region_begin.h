// As isa/avx512/region_begin.h, with AVX-512 BF16 as well. (AMX's instructions are asked for by name: no compiler uses them
// on its own.)
#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
#endif
