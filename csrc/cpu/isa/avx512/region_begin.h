// From here to region_end.h functions are compiled for AVX-512 F, BW, DQ and VL (and what comes with them: AVX2, FMA,
// F16C), and for nothing more. No include guard: a region is opened where this stands.
#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#endif
