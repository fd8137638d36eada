// What only the device can read, checked (checks.h). All of it is small: a block a sequence, or one block.
#include "cuda/checks.h"

#include <cstdint>

#include "cache_shape.h"
#include "cuda/primitives.cuh"
#include "cuda/scores.cuh"

namespace attn_ext::cuda {
namespace {

constexpr int kThreads = 128;

// ---- Faults ---------------------------------------------------------------------------------------------------------

constexpr uint64_t kNoFault = ~uint64_t{0};

// Of this device: the smallest of sequence · 256 + Wrong.
ATTN_EXT_DEVICE_VARIABLE uint64_t fault = kNoFault;

ATTN_EXT_DEVICE void note_fault(Wrong wrong, int64_t sequence) {
  atomic_min(&fault, static_cast<uint64_t>(sequence) << 8 | static_cast<uint64_t>(wrong));
}

ATTN_EXT_KERNEL void take_fault_kernel(int64_t* to) {
  if (thread_index() == 0) store_global(to, static_cast<int64_t>(atomic_exchange(&fault, kNoFault)));
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

ATTN_EXT_DEVICE int64_t number_at(const IntegerView& v, int64_t n) {
  return v.is_wide ? load_global(static_cast<const int64_t*>(v.data) + n * v.stride)
                   : load_global(static_cast<const int32_t*>(v.data) + n * v.stride);
}

ATTN_EXT_KERNEL void check_lengths_kernel(ATTN_EXT_GRID_CONSTANT const LengthsCheck c) {
  for (int64_t n = block_index() * kThreads + thread_index(); n < c.count; n += block_count() * kThreads) {
    const int64_t length = number_at(c.from, n);
    const bool right = length >= 0 && length <= c.most;
    if (!right) note_fault(c.wrong, n);
    store_global(c.to + n, right ? length : int64_t{0});
  }
}

template <class T>
ATTN_EXT_KERNEL void copy_numbers_kernel(ATTN_EXT_GRID_CONSTANT const NumbersCopy c) {
  const int64_t count = c.rows * c.columns;
  for (int64_t n = block_index() * kThreads + thread_index(); n < count; n += block_count() * kThreads) {
    const char* at = address(c.from, 1, 0, 0, n / c.columns, n % c.columns);
    store_global(static_cast<T*>(c.to) + n, load_number<T, AnyStorage>(at, c.from.dtype));
  }
}

// ---- Boundaries -----------------------------------------------------------------------------------------------------

// The smallest x of the block's threads.
ATTN_EXT_DEVICE int64_t block_min(int64_t x) {
  auto* warps = reinterpret_cast<int64_t*>(shared_memory());
  x = join_lanes<kWarpSize, Smallest>(x);
  sync_block();  // whoever reads what was there before
  if (thread_index() % kWarpSize == 0) store_shared(warps + thread_index() / kWarpSize, x);
  sync_block();
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) x = Smallest()(x, load_shared(warps + warp));
  return x;
}

// One block.
ATTN_EXT_KERNEL void check_boundaries_kernel(ATTN_EXT_GRID_CONSTANT const BoundariesCheck c) {
  int64_t first_bad = c.sequences + 1;
  for (int64_t n = thread_index(); n <= c.sequences && first_bad > c.sequences; n += kThreads) {
    const int64_t at = number_at(c.from, n), before = n > 0 ? number_at(c.from, n - 1) : 0;
    if (at < before || at > c.total || (n == 0 && at != 0)) first_bad = n;
  }
  first_bad = block_min(first_bad);
  const bool short_of_rows = first_bad > c.sequences && number_at(c.from, c.sequences) != c.total;
  if (thread_index() == 0 && (first_bad <= c.sequences || short_of_rows)) {
    const int64_t end = first_bad <= c.sequences ? first_bad : c.sequences;  // of the sequence to name
    note_fault(Wrong::boundaries, end > 0 ? end - 1 : 0);
  }
  for (int64_t n = thread_index(); n <= c.sequences; n += kThreads) {
    const int64_t kept = n < first_bad ? n : first_bad - 1;
    store_global(c.to + n, kept < 0 ? int64_t{0} : number_at(c.from, kept));
  }
}

// ---- Caches ---------------------------------------------------------------------------------------------------------

// One sequence as far as its numbers go, the block table aside.
struct CacheSequence {
  int64_t length = 0, total = 0, query_position = 0;
  int64_t first_block = 0, blocks_end = 0;  // entries of the table that are needed
  Wrong wrong = Wrong::nothing;
};

ATTN_EXT_DEVICE CacheSequence read_sequence(const CacheCheck& c, int64_t b) {
  CacheSequence s;
  s.length = number_at(c.lengths, b);
  const int64_t packed = c.cu ? load_global(c.cu + b + 1) - load_global(c.cu + b) : 0;
  const int64_t tokens = !c.appends ? 0 : c.cu ? packed : c.tokens;
  const int64_t queries = !c.asks ? 0 : c.cu ? packed : c.queries;
  if (s.length < 0 || s.length > kLongest) {
    s.wrong = Wrong::cache_lengths;
    return s;
  }
  s.total = s.length + tokens;
  s.query_position = s.total - queries;
  const int64_t left = c.window_left == kUnbounded ? s.total : c.window_left;
  const int64_t first_query = s.query_position - left;
  const int64_t oldest = first_query > 0 ? first_query : 0;  // the first key that is seen
  if (c.ring ? c.capacity == 0 && tokens > 0 : s.total > c.capacity) {
    s.wrong = Wrong::capacity;
  } else if (c.ring && queries > 0 && oldest < s.total - c.capacity) {
    s.wrong = Wrong::ring;
  } else if (c.rotary_positions >= 0 && s.total > c.rotary_positions) {
    s.wrong = Wrong::rotary_tables;
  } else if (c.rotary_positions >= 0 && queries > 0 && s.query_position < 0) {
    s.wrong = Wrong::rotary_queries;
  }
  if (c.page > 0 && s.wrong == Wrong::nothing) {
    // What is written and what is seen both end with the last position.
    int64_t begin = tokens > 0 ? s.length : s.total;
    if (queries > 0 && oldest < begin) begin = oldest;
    if (begin < s.total) {
      s.first_block = begin / c.page;
      s.blocks_end = pieces(s.total, c.page);
    }
  }
  return s;
}

// A block a sequence.
ATTN_EXT_KERNEL void check_cache_kernel(ATTN_EXT_GRID_CONSTANT const CacheCheck c) {
  for (int64_t b = block_index(); b < c.batch; b += block_count()) {
    CacheSequence s = read_sequence(c, b);
    IntegerView row = c.table;
    row.data = static_cast<const int32_t*>(c.table.data) + b * c.table_stride;
    bool outside = false;
    for (int64_t n = s.first_block + thread_index(); n < s.blocks_end; n += kThreads) {
      const int64_t block = number_at(row, n);
      outside = outside || block < 0 || block >= c.pool;
    }
    if (sync_block_or(outside)) s.wrong = Wrong::block_table;
    const bool right = s.wrong == Wrong::nothing;
    if (c.page > 0) {
      for (int64_t n = thread_index(); n < c.blocks; n += kThreads) {
        const bool needed = right && n >= s.first_block && n < s.blocks_end;
        store_global(c.table_to + b * c.blocks + n, needed ? static_cast<int32_t>(number_at(row, n)) : 0);
      }
    }
    if (thread_index() != 0) continue;
    if (!right) note_fault(s.wrong, b);
    store_global(c.totals + b, right ? s.total : int64_t{0});
    store_global(c.positions + b, right ? s.length : int64_t{-1});
    store_global(c.query_positions + b, right ? s.query_position : int64_t{-1});
  }
}

}  // namespace

// ---- Launchers ------------------------------------------------------------------------------------------------------

void check_lengths(const LengthsCheck& c, StreamHandle stream) {
  launch_tasks("check_lengths", check_lengths_kernel, pieces(c.count, kThreads), kThreads, 0, stream, c);
}

void check_boundaries(const BoundariesCheck& c, StreamHandle stream) {
  launch_tasks("check_boundaries", check_boundaries_kernel, 1, kThreads, kThreads / kWarpSize * sizeof(int64_t), stream,
               c);
}

void check_cache(const CacheCheck& c, StreamHandle stream) {
  launch_tasks("check_cache", check_cache_kernel, c.batch, kThreads, 0, stream, c);
}

void copy_numbers(const NumbersCopy& c, StreamHandle stream) {
  const int64_t blocks = pieces(c.rows * c.columns, kThreads);
  if (c.to_double) {
    launch_tasks("copy_numbers", copy_numbers_kernel<double>, blocks, kThreads, 0, stream, c);
  } else {
    launch_tasks("copy_numbers", copy_numbers_kernel<float>, blocks, kThreads, 0, stream, c);
  }
}

void take_fault(int64_t* to, StreamHandle stream) {
  launch_tasks("take_fault", take_fault_kernel, 1, kWarpSize, 0, stream, to);
}

}  // namespace attn_ext::cuda
