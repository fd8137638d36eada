#include "on_cpu/device.h"

#include <algorithm>
#include <cstring>

#include "positions.h"
#include "storage.h"
#include "tensors.h"

namespace attn_ext {
namespace {

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(size_of(dtype_of(t.scalar_type()))); }

// The number of a float tensor at an offset in elements.
double number_at(const Tensor& t, int64_t offset) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return static_cast<const double*>(t.data_ptr())[offset];
    case ScalarType::BFloat16:
      return to_float(static_cast<const bf16*>(t.data_ptr())[offset]);
    case ScalarType::Half:
      return to_float(static_cast<const f16*>(t.data_ptr())[offset]);
    default:
      return static_cast<const float*>(t.data_ptr())[offset];
  }
}

void set_number(Tensor& t, int64_t offset, double x) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      static_cast<double*>(t.data_ptr())[offset] = x;
      break;
    case ScalarType::BFloat16:
      static_cast<bf16*>(t.data_ptr())[offset] = to_bf16(static_cast<float>(x));
      break;
    case ScalarType::Half:
      static_cast<f16*>(t.data_ptr())[offset] = to_f16(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(t.data_ptr())[offset] = static_cast<float>(x);
  }
}

// The numbers of a one-dimensional tensor of int32 or int64.
Integers integers(const Tensor& t) {
  Integers numbers(static_cast<size_t>(t.size(0)));
  const bool narrow = t.scalar_type() == ScalarType::Int;
  const int64_t stride = t.stride(0);
  const void* data = t.data_ptr();
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * stride;
    numbers[i] = narrow ? static_cast<const int32_t*>(data)[at] : static_cast<const int64_t*>(data)[at];
  }
  return numbers;
}

void expect_rising(const char* op, const char* name, const Integers& cu) {
  ATTN_EXT_EXPECT(cu.front() == 0, op, name, " must start with 0, not with ", cu.front());
  for (size_t b = 1; b < cu.size(); ++b) {
    ATTN_EXT_EXPECT(cu[b] >= cu[b - 1], op, name, " must not fall, but entry ", b, " is ", cu[b], " after ", cu[b - 1]);
  }
}

}  // namespace

void set_zero(Tensor& t) {
  if (t.numel() > 0) std::memset(t.data_ptr(), 0, static_cast<size_t>(t.numel()) * bytes_of(t));
}

Tensor contiguous_rows(const Tensor& t, int64_t rows) {
  std::vector<int64_t> sizes = sizes_of(t);
  sizes[0] = rows;
  Tensor copy = empty(sizes, t.scalar_type());
  const size_t element = bytes_of(t);
  const auto* from = static_cast<const char*>(t.data_ptr());
  auto* to = static_cast<char*>(copy.data_ptr());
  std::vector<int64_t> index(sizes.size());
  for (int64_t n = 0, total = copy.numel(); n < total; ++n, to += element) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * t.stride(static_cast<int64_t>(d));
    std::memcpy(to, from + offset * static_cast<int64_t>(element), element);
    for (size_t d = index.size(); d-- > 0 && ++index[d] == sizes[d];) index[d] = 0;
  }
  return copy;
}

// ---- The small tensors of a call ------------------------------------------------------------------------------------

Integers read_lengths(const char* op, const Tensor& t, int64_t most) {
  Integers lengths = integers(t);
  for (size_t b = 0; b < lengths.size(); ++b) {
    ATTN_EXT_EXPECT(lengths[b] >= 0 && lengths[b] <= most, op, "key_lengths[", b, "] must lie between 0 and the ", most,
                    " keys, not be ", lengths[b]);
  }
  return lengths;
}

Integers read_boundaries(const char* op, const char* name, const Tensor& t, const char* of, int64_t total) {
  Integers cu = integers(t);
  expect_rising(op, name, cu);
  ATTN_EXT_EXPECT(cu.back() == total, op, name, " must end with the ", total, " rows of ", of, ", not with ",
                  cu.back());
  return cu;
}

int64_t longest(const Integers& cu, int64_t) {
  int64_t length = 0;
  for (size_t b = 1; b < cu.size(); ++b) length = std::max(length, cu[b] - cu[b - 1]);
  return length;
}

Integers read_positions(const char* op, const Tensor& t, int64_t end) {
  Integers positions = integers(t);
  for (const int64_t position : positions) {
    ATTN_EXT_EXPECT(position >= 0 && position < end, op, "row_positions must lie in [0, ", end, "), not be ", position);
  }
  return positions;
}

Floats read_slopes(const Tensor& t) {
  const bool each = t.dim() == 2;
  const int64_t rows = each ? t.size(0) : 1, heads = t.size(t.dim() - 1);
  const auto* data = static_cast<const float*>(t.data_ptr());
  Floats slopes;
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      slopes.push_back(data[(each ? b * t.stride(0) : 0) + h * t.stride(t.dim() - 1)]);
    }
  }
  return slopes;
}

Doubles read_sinks(const Tensor& t) {
  Doubles sinks;
  for (int64_t h = 0; h < t.size(0); ++h) sinks.push_back(number_at(t, h * t.stride(0)));
  return sinks;
}

void set_seed(const Tensor& seed, AttentionParams& p) {
  p.dropout_seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.data_ptr()));
}

void SinkGradients::store(Tensor& to) const {
  for (size_t h = 0; h < sums_.size(); ++h) set_number(to, static_cast<int64_t>(h), sums_[h]);
}

// ---- A call over a cache --------------------------------------------------------------------------------------------

void CacheValues::read_table(const Tensor& table, CacheLayout& layout) {
  // Read in place: a copy would cost an append what the whole sequence has of blocks.
  table_memory_ = table.stride(1) == 1 || table.size(1) <= 1 ? table : contiguous_rows(table, table.size(0));
  table_ = static_cast<const int32_t*>(table_memory_.data_ptr());
  table_stride_ = table_memory_.stride(0);
  static constexpr int32_t kNothing = 0;
  layout.block_table = table_ != nullptr ? table_ : &kNothing;  // an empty table is still one
  layout.table_stride = table_stride_;
}

void CacheValues::read_lengths(const CacheShape& shape, const Tensor& t) {
  lengths_ = integers(t);
  for (size_t b = 0; b < lengths_.size(); ++b) {
    ATTN_EXT_EXPECT(lengths_[b] >= 0, shape.op, "sequence ", b, ": cache_lengths[", b, "] must be at least 0, not ",
                    lengths_[b]);
    ATTN_EXT_EXPECT(lengths_[b] <= kLongest, shape.op, "cache_lengths[", b, "] is ", lengths_[b], ", more than 2^40");
  }
  totals_ = lengths_;
}

void CacheValues::read_boundaries(const CacheShape& shape, const Tensor& t) {
  cu_ = integers(t);
  expect_rising(shape.op, "cu_seqlens", cu_);
}

void CacheValues::expect_rows(const CacheShape& shape, const char* name, const Tensor& t) const {
  ATTN_EXT_EXPECT(!shape.packed || t.size(0) == cu_.back(), shape.op, "cu_seqlens must end with the ", t.size(0),
                  " rows of ", name, ", not with ", shape.packed ? cu_.back() : 0);
}

void CacheValues::append(const CacheShape& shape, int64_t count) {
  for (size_t b = 0; b < totals_.size(); ++b) {
    const int64_t own = tokens(shape, b, count);
    if (!shape.ring) expect_room(shape, b, lengths_[b], own);
    ATTN_EXT_EXPECT_PLACE(shape.capacity > 0 || own == 0, shape.op, "sequence ", b, ": ", own,
                          " tokens do not fit into a ring of no places");
    totals_[b] += own;
    if (own > 0) expect_blocks(shape, b, lengths_[b], totals_[b]);
  }
  if (shape.page > 0) expect_places_apart(shape);
}

int64_t CacheValues::turn(const CacheShape& shape, int64_t positions) {
  int64_t needed = 0;
  for (size_t b = 0; b < totals_.size(); ++b) {
    needed = std::max(needed, totals_[b]);
    ATTN_EXT_EXPECT_PLACE(totals_[b] <= positions, shape.op, "sequence ", b, " reaches position ", totals_[b] - 1,
                          ", and the rotary tables have ", positions, " positions");
  }
  return needed;
}

void CacheValues::attend(const CacheShape& shape, int64_t count, bool rotates, ForwardParams& p) {
  query_positions_.resize(totals_.size());
  for (size_t b = 0; b < totals_.size(); ++b) {
    const int64_t own = tokens(shape, b, count), total = totals_[b];
    p.Lq = std::max(p.Lq, own);
    p.Lk = std::max(p.Lk, total);
    if (!shape.ring) expect_room(shape, b, total, 0);
    query_positions_[b] = total - own;
    ATTN_EXT_EXPECT_PLACE(!rotates || own == 0 || query_positions_[b] >= 0, shape.op, "sequence ", b, ": ", own,
                          " queries at the end of ", total,
                          " keys begin before position 0, which rotary has no angle for");
    if (own == 0) continue;
    const int64_t left = p.window_left == kUnbounded ? total : p.window_left;
    const int64_t oldest = std::max<int64_t>(0, total - own - left);  // the first key that is seen
    ATTN_EXT_EXPECT(!shape.ring || oldest >= total - shape.capacity, shape.op, "sequence ", b, ": ", own,
                    " queries at the end of ", total, " keys see keys from position ", oldest, ", and a ring of ",
                    shape.capacity, " places holds those from ", total - shape.capacity,
                    "; give a window, or fewer tokens at a time");
    if (oldest < total) expect_blocks(shape, b, oldest, total);
  }
}

void CacheValues::expect_room(const CacheShape& shape, size_t b, int64_t position, int64_t count) const {
  ATTN_EXT_EXPECT_PLACE(position <= shape.capacity && count <= shape.capacity - position, shape.op, "sequence ", b,
                        ": ", count, " tokens at position ", position, " do not fit into the cache's capacity of ",
                        shape.capacity);
}

// That sequence b has blocks of the pool for positions [begin, end).
void CacheValues::expect_blocks(const CacheShape& shape, size_t b, int64_t begin, int64_t end) const {
  if (shape.page == 0) return;
  for (int64_t n = begin / shape.page; n * shape.page < end; ++n) {
    const int32_t block = block_of(b, n);
    ATTN_EXT_EXPECT_PLACE(block >= 0 && block < shape.pool, shape.op, "sequence ", b, ": block_table[", b, ", ", n,
                          "] must name one of the ", shape.pool, " blocks for positions ", n * shape.page, " to ",
                          std::min((n + 1) * shape.page, end) - 1, ", not ", block);
  }
}

// That no place is written for two sequences.
void CacheValues::expect_places_apart(const CacheShape& shape) const {
  struct Stretch {
    int64_t begin, end;  // places of the pool
    size_t b;
  };
  std::vector<Stretch> written;
  const int64_t page = shape.page;
  for (size_t b = 0; b < totals_.size(); ++b) {
    for (int64_t at = lengths_[b]; at < totals_[b];) {
      const int64_t n = at / page, end = std::min(totals_[b], (n + 1) * page);
      const int64_t block = block_of(b, n);
      written.push_back({block * page + at % page, block * page + at % page + (end - at), b});
      at = end;
    }
  }
  std::sort(written.begin(), written.end(), [](const Stretch& x, const Stretch& y) { return x.begin < y.begin; });
  for (size_t n = 1; n < written.size(); ++n) {
    ATTN_EXT_EXPECT(written[n].begin >= written[n - 1].end, shape.op, "block ", written[n].begin / page,
                    " would be written twice in the same place, for sequence ", written[n - 1].b, " and sequence ",
                    written[n].b, "; sequences that share a block need copies of it first");
  }
}

}  // namespace attn_ext
