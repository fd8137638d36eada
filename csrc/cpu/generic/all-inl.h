// Every algorithm, in the order in which they build on one another. Include after vec.h.
#pragma once

// clang-format off
#include "cpu/generic/math-inl.h"
#include "cpu/generic/gemm-inl.h"
#include "cpu/generic/requests-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/generic/scores-inl.h"
#include "cpu/generic/direct-inl.h"
#include "cpu/generic/products-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/backward-inl.h"
#include "cpu/generic/weights-inl.h"
#include "cpu/generic/append-inl.h"
#include "cpu/generic/entry-inl.h"
// clang-format on
