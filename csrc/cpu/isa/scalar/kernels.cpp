// The portable path: the platform's baseline instructions, no more.
#include "cpu/generic/std_headers.h"

#define ATTN_EXT_ISA_NAMESPACE scalar
#include "cpu/isa/scalar/vec.h"
// vec.h comes first: everything below is written over its Vec.
#include "cpu/generic/all-inl.h"
