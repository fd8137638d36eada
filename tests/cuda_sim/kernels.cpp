#include "cuda_sim/kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/isa_list.h"
#include "cuda/primitives.cuh"
#include "positions.h"
#include "simulator.h"

namespace attn_ext::cuda_sim {
namespace {

// How many of everything a call has: packed sequences have no batch dim.
struct Counts {
  int64_t outer, inner, batch, q_rows, k_rows, element;

  explicit Counts(const AttentionParams& p)
      : outer(p.cu_q ? 1 : p.batch / std::max<int64_t>(p.batch_inner, 1)),
        inner(p.cu_q ? 1 : p.batch_inner),
        batch(p.cu_q ? 1 : p.batch),
        q_rows(p.cu_q ? p.total_q : p.Lq),
        k_rows(p.cu_k ? p.total_k : p.Lk),
        element(p.q.dtype == DType::float64 ? 8 : 4) {}
};

class Allowed {
 public:
  // `counts` entries along each dim, outer batch first.
  void tensor(const TensorView& view, const int64_t (&counts)[5], Allow::Access access) {
    if (!view) return;
    const int64_t strides[5] = {view.stride_b0, view.stride_b1, view.stride_h, view.stride_l, view.stride_d};
    int64_t first = 0, last = 0;
    for (int d = 0; d < 5; ++d) {
      if (counts[d] == 0) return;
      (strides[d] < 0 ? first : last) += (counts[d] - 1) * strides[d];
    }
    bytes(static_cast<const char*>(view.data) + first * size_of(view.dtype), (last - first + 1) * size_of(view.dtype),
          access);
  }

  void rows(const RowView& rows, int64_t batch, int64_t heads, int64_t length, int64_t element, Allow::Access access) {
    if (!rows || batch * heads * length == 0) return;
    const int64_t count = (batch - 1) * rows.stride_b + (heads - 1) * rows.stride_h + length;
    bytes(rows.data, count * element, access);
  }

  void bytes(const void* memory, int64_t count, Allow::Access access) {
    if (memory != nullptr && count > 0) {
      ranges_.push_back(std::make_unique<Allow>(memory, static_cast<size_t>(count), access));
    }
  }

  template <class T>
  void numbers(const T* first, int64_t count) {
    bytes(first, count * static_cast<int64_t>(sizeof(T)), Allow::Access::read);
  }

  // The entries of a block table that `length` positions of each sequence need.
  void table(const CacheLayout& layout, int64_t batch, int64_t length) {
    if (layout.block_table == nullptr || batch == 0) return;
    const int64_t used = std::min((length + layout.page_size - 1) / layout.page_size, layout.table_stride);
    for (int64_t b = 0; b < batch; ++b) numbers(layout.block_table + b * layout.table_stride, used);
  }

  // A cache: `batch` sequences of at most `length` positions, or the pages that their tables name.
  void cache(const TensorView& view, const CacheLayout& layout, int64_t batch, int64_t inner, int64_t heads,
             int64_t length, int64_t width, Allow::Access access) {
    if (layout.block_table != nullptr) {
      int64_t pages = 0;
      const int64_t used = (length + layout.page_size - 1) / layout.page_size;
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t n = 0; n < std::min(used, layout.table_stride); ++n) {
          pages = std::max<int64_t>(pages, layout.block_table[b * layout.table_stride + n] + 1);
        }
      }
      return tensor(view, {1, pages, heads, layout.page_size, width}, access);
    }
    tensor(view, {batch / std::max<int64_t>(inner, 1), inner, heads, layout.ring > 0 ? layout.ring : length, width},
           access);
  }

  void options(const AttentionParams& p, const Counts& n) {
    tensor(p.q, {n.outer, n.inner, p.Hq, n.q_rows, p.D}, Allow::Access::read);
    if (p.cu_k != nullptr) {
      tensor(p.k, {1, 1, p.Hkv, n.k_rows, p.D}, Allow::Access::read);
      tensor(p.v, {1, 1, p.Hkv, n.k_rows, p.Dv}, Allow::Access::read);
    } else {
      cache(p.k, p.layout, p.batch, p.batch_inner, p.Hkv, p.Lk, p.D, Allow::Access::read);
      cache(p.v, p.layout, p.batch, p.batch_inner, p.Hkv, p.Lk, p.Dv, Allow::Access::read);
      cache(p.scales.k, p.layout, p.batch, p.batch_inner, p.Hkv, p.Lk, 1, Allow::Access::read);
      cache(p.scales.v, p.layout, p.batch, p.batch_inner, p.Hkv, p.Lk, 1, Allow::Access::read);
    }
    for (const int64_t* starts : {p.cu_q, p.cu_k}) numbers(starts, p.batch + 1);
    for (const int64_t* lengths : {p.key_lengths, p.total_lengths}) numbers(lengths, p.batch);
    numbers(p.row_positions, p.Lq);
    table(p.layout, p.batch, p.Lk);
    for (const TensorView* view : {&p.mask, &p.bias[0], &p.bias[1]}) {
      tensor(*view, {n.outer, n.inner, p.Hq, p.Lq, p.Lk}, Allow::Access::read);
    }
    const int64_t slopes = p.alibi_stride_b > 0 ? p.batch * p.Hq : p.Hq;
    bytes(p.alibi_slopes, slopes * int64_t{sizeof(float)}, Allow::Access::read);
    bytes(p.sinks, p.Hq * int64_t{sizeof(double)}, Allow::Access::read);
    if (p.dropout_seed_at != nullptr) numbers(p.dropout_seed_at, 1);
  }

  // `count` numbers of a view, whose steps may be of either sign.
  void integers(const cuda::IntegerView& view, int64_t count) {
    const int64_t element = view.is_wide ? 8 : 4, last = (count - 1) * view.stride * element;
    const auto* data = static_cast<const char*>(view.data);
    if (count > 0) bytes(data + std::min<int64_t>(last, 0), std::abs(last) + element, Allow::Access::read);
  }

 private:
  std::vector<std::unique_ptr<Allow>> ranges_;
};

// Room for a number of every row, laid out as row_max is.
int64_t rows_bytes(const BackwardParams& p) {
  const Counts n(p);
  if (n.batch * p.Hq * n.q_rows == 0) return 0;
  return ((n.batch - 1) * p.row_max.stride_b + (p.Hq - 1) * p.row_max.stride_h + n.q_rows) * n.element;
}

// Every other call has fewer blocks than tasks, so that blocks come to a second one.
void choose_blocks() {
  static int64_t calls = 0;
  cuda::most_blocks = calls++ % 2 == 0 ? 0x7fffffff : 3;
}

}  // namespace

void forward(const ForwardParams& p, void* workspace, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  const Counts n(p);
  allowed.options(p, n);
  allowed.tensor(p.out, {n.outer, n.inner, p.Hq, n.q_rows, p.Dv}, Allow::Access::read_write);
  for (const RowView* rows : {&p.lse, &p.row_max, &p.row_sum}) {
    allowed.rows(*rows, n.batch, p.Hq, n.q_rows, n.element, Allow::Access::read_write);
  }
  const int64_t bytes = cuda::forward_workspace_bytes(p);
  if (bytes > 0) std::memset(workspace, 0xff, static_cast<size_t>(bytes));  // NaN, whatever the numbers are
  allowed.bytes(workspace, bytes, Allow::Access::read_write);
  cuda::forward(p, workspace, stream);
}

void backward(const BackwardParams& p, void* delta, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  const Counts n(p);
  allowed.options(p, n);
  allowed.tensor(p.out, {n.outer, n.inner, p.Hq, n.q_rows, p.Dv}, Allow::Access::read);
  allowed.tensor(p.grad_out, {n.outer, n.inner, p.Hq, n.q_rows, p.Dv}, Allow::Access::read);
  for (const RowView* rows : {&p.grad_lse, &p.row_max, &p.row_sum}) {
    allowed.rows(*rows, n.batch, p.Hq, n.q_rows, n.element, Allow::Access::read);
  }
  allowed.tensor(p.dq, {n.outer, n.inner, p.Hq, n.q_rows, p.D}, Allow::Access::read_write);
  allowed.tensor(p.dk, {n.outer, n.inner, p.Hkv, n.k_rows, p.D}, Allow::Access::read_write);
  allowed.tensor(p.dv, {n.outer, n.inner, p.Hkv, n.k_rows, p.Dv}, Allow::Access::read_write);
  for (const TensorView& view : p.dbias) {
    allowed.tensor(view, {n.outer, n.inner, p.Hq, p.Lq, p.Lk}, Allow::Access::read_write);
  }
  allowed.bytes(p.dsinks, p.Hq * int64_t{sizeof(double)}, Allow::Access::read_write);
  allowed.rows({delta, p.row_max.stride_b, p.row_max.stride_h}, n.batch, p.Hq, n.q_rows, n.element,
               Allow::Access::read_write);
  cuda::backward(p, delta, stream);
}

void weights(const WeightsParams& p, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  const Counts n(p);
  allowed.options(p, n);
  allowed.tensor(p.weights, {n.outer, n.inner, p.Hq, p.Lq, p.Lk}, Allow::Access::read_write);
  for (const RowView* rows : {&p.row_max, &p.row_sum}) {
    allowed.rows(*rows, n.batch, p.Hq, n.q_rows, n.element, Allow::Access::read);
  }
  cuda::weights(p, stream);
}

void append(const AppendParams& p, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  const int64_t total = p.cu ? p.total : p.n;
  int64_t end = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.positions[b] >= 0) end = std::max(end, p.positions[b] + (p.cu ? p.cu[b + 1] - p.cu[b] : p.n));
  }
  allowed.numbers(p.positions, p.batch);
  allowed.numbers(p.cu, p.batch + 1);
  allowed.table(p.layout, p.batch, end);
  allowed.tensor(p.from, {1, p.cu ? 1 : p.batch, p.heads, total, p.D}, Allow::Access::read);
  if (p.to_packed) {
    allowed.tensor(p.to, {1, p.cu ? 1 : p.batch, p.heads, total, p.D}, Allow::Access::read_write);
  } else {
    allowed.cache(p.to, p.layout, p.batch, p.batch, p.heads, end, p.D, Allow::Access::read_write);
    allowed.cache(p.scale, p.layout, p.batch, p.batch, p.heads, end, 1, Allow::Access::read_write);
  }
  const int64_t element = p.from.dtype == DType::float64 ? 8 : 4, pairs = p.rotary_dim / 2;
  allowed.bytes(p.cos, ((end - 1) * p.cos_stride + pairs) * element, Allow::Access::read);
  allowed.bytes(p.sin, ((end - 1) * p.sin_stride + pairs) * element, Allow::Access::read);
  cuda::append(p, stream);
}

void check_lengths(const cuda::LengthsCheck& c, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  allowed.integers(c.from, c.count);
  allowed.bytes(c.to, c.count * int64_t{sizeof(int64_t)}, Allow::Access::read_write);
  cuda::check_lengths(c, stream);
}

void check_boundaries(const cuda::BoundariesCheck& c, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  allowed.integers(c.from, c.sequences + 1);
  allowed.bytes(c.to, (c.sequences + 1) * int64_t{sizeof(int64_t)}, Allow::Access::read_write);
  cuda::check_boundaries(c, stream);
}

void check_cache(const cuda::CacheCheck& c, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  allowed.integers(c.lengths, c.batch);
  allowed.numbers(c.cu, c.batch + 1);
  for (int64_t b = 0; c.page > 0 && b < c.batch; ++b) {
    cuda::IntegerView row = c.table;
    row.data = static_cast<const int32_t*>(row.data) + b * c.table_stride;
    allowed.integers(row, c.blocks);
  }
  if (c.page > 0) {
    allowed.bytes(c.table_to, c.batch * c.blocks * int64_t{sizeof(int32_t)}, Allow::Access::read_write);
  }
  for (int64_t* to : {c.totals, c.positions, c.query_positions}) {
    allowed.bytes(to, c.batch * int64_t{sizeof(int64_t)}, Allow::Access::read_write);
  }
  cuda::check_cache(c, stream);
}

void copy_numbers(const cuda::NumbersCopy& c, cuda::StreamHandle stream) {
  choose_blocks();
  Allowed allowed;
  allowed.tensor(c.from, {1, 1, 1, c.rows, c.columns}, Allow::Access::read);
  allowed.bytes(c.to, c.rows * c.columns * (c.to_double ? 8 : 4), Allow::Access::read_write);
  cuda::copy_numbers(c, stream);
}

void take_fault(int64_t* to, cuda::StreamHandle stream) {
  Allowed allowed;
  allowed.bytes(to, sizeof(int64_t), Allow::Access::read_write);
  cuda::take_fault(to, stream);
}

cuda::ForwardPlan plan_forward(const ForwardParams& p) {
  cuda::most_blocks = 0x7fffffff;  // as a GPU has them
  return cuda::plan_forward(p);
}

}  // namespace attn_ext::cuda_sim

// ---- As an ISA ------------------------------------------------------------------------------------------------------

namespace attn_ext::cpu::cuda_sim {

void forward(const ForwardParams& p, const Parallel&) {
  std::vector<int64_t> workspace(static_cast<size_t>((cuda::forward_workspace_bytes(p) + 7) / 8));
  attn_ext::cuda_sim::forward(p, workspace.data(), nullptr);
}

void backward(const BackwardParams& p, const Parallel&) {
  std::vector<char> delta(static_cast<size_t>(attn_ext::cuda_sim::rows_bytes(p)));
  attn_ext::cuda_sim::backward(p, delta.data(), nullptr);
}

void weights(const WeightsParams& p, const Parallel&) { attn_ext::cuda_sim::weights(p, nullptr); }
void append(const AppendParams& p, const Parallel&) { attn_ext::cuda_sim::append(p, nullptr); }

TileShape tile(DType dtype) { return {dtype == DType::float64 ? 32 : 64, 32, false}; }

}  // namespace attn_ext::cpu::cuda_sim
