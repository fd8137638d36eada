// The end of what region_begin.h, of avx512 or avx512_bf16, began.
#if !defined(ATTN_EXT_EMULATE_AVX512)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
