// Lengths, boundaries, tables and numbers of a call that lie in device memory: copied to what params.h wants, and checked on
// the way, without the host. A bad one becomes a number with which no kernel reads or writes out of bounds: its sequence
// takes no part (no keys, no new tokens; a row's position becomes 0), and the device's fault tells of it (take_fault).
//
// Functions over structs of pointers, as in kernels.h: queued on a stream, never waited for.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "params.h"

namespace attn_ext::cuda {

// What can be wrong. attn_ext/backend.py has the same numbers, with words.
enum class Wrong : int64_t {
  nothing = 0,
  key_lengths = 1,     // outside [0, keys]
  boundaries = 2,      // cu_seqlens: not from 0, falling, past the rows, or ending before them
  row_positions = 3,   // outside [0, queries)
  cache_lengths = 4,   // negative, or more than any sequence has
  capacity = 5,        // tokens past the capacity
  ring = 6,            // keys that the ring has overwritten
  block_table = 7,     // an entry that is needed and names no block of the pool
  rotary_tables = 8,   // positions past the rotary tables
  rotary_queries = 9,  // queries before position 0
};

// int32 or int64 in memory, any stride.
struct IntegerView {
  const void* data = nullptr;
  bool is_wide = false;  // int64
  int64_t stride = 0;
};

// to[n] = from[n] where that lies in [0, most], else 0.
struct LengthsCheck {
  Wrong wrong = Wrong::nothing;
  IntegerView from;
  int64_t count = 0, most = 0;
  int64_t* to = nullptr;
};

// to[0 … sequences] = cu_seqlens. From the first entry on that is wrong, sequences are empty: behind it nobody knows whose
// rows are whose.
struct BoundariesCheck {
  static constexpr int64_t kUnknown = -1;

  IntegerView from;
  int64_t sequences = 0, total = kUnknown;  // total: rows of the packed tensors
  int64_t* to = nullptr;
};

// What a call over a cache says of each sequence. One that is wrong in anything gets total 0, positions −1.
struct CacheCheck {
  int64_t batch = 0, capacity = 0;
  int64_t page = 0, pool = 0;  // 0: no pages
  bool ring = false;
  IntegerView lengths;
  const int64_t* cu = nullptr;  // packed calls, checked; null: as many tokens for each sequence
  int64_t tokens = 0, queries = 0;
  bool appends = false, asks = false;
  int64_t window_left = kUnbounded;
  int64_t rotary_positions = -1;  // rows of the rotary tables; −1: none
  IntegerView table;              // [batch][blocks] int32, from one entry to the next
  int64_t table_stride = 0, blocks = 0;

  int64_t* totals = nullptr;           // positions held with what is appended
  int64_t* positions = nullptr;        // of the first new token
  int64_t* query_positions = nullptr;  // of the first query
  int32_t* table_to = nullptr;         // [batch][blocks]: the entries that are needed, 0 elsewhere
};

// to[r][c] = from[r][c] as float or double.
struct NumbersCopy {
  TensorView from;  // stride_l from row to row, stride_d within
  int64_t rows = 0, columns = 0;
  void* to = nullptr;
  bool to_double = false;
};

void check_lengths(const LengthsCheck& c, StreamHandle stream);
void check_boundaries(const BoundariesCheck& c, StreamHandle stream);
void check_cache(const CacheCheck& c, StreamHandle stream);
void copy_numbers(const NumbersCopy& c, StreamHandle stream);

// to[0] = the worst fault on this device since the last call, the lowest sequence first: sequence · 256 + Wrong; −1: none.
void take_fault(int64_t* to, StreamHandle stream);

}  // namespace attn_ext::cuda
