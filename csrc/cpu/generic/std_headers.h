// Everything the generic code uses of the standard library and of ours, for inclusion before a target region opens: what
// is compiled inside the region may hold instructions that only that ISA's machines have.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/isa_list.h"
#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/scratch.h"
#include "params.h"
#include "philox.h"
#include "positions.h"
#include "scores.h"
#include "storage.h"
