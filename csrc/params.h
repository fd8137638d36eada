// The plain structs that cross from the torch side to the kernels: pointers with shapes and strides, no torch.
//
// Letters (used everywhere): B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk keys, D head dim of q and k,
// Dv head dim of v and out. Strides are in elements, never bytes. Query head h reads key/value head h / (Hq / Hkv).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

// Before functions that the kernels of the CPU and of CUDA have in common.
#if defined(__CUDACC__)
#define ATTN_EXT_SHARED __host__ __device__
#else
#define ATTN_EXT_SHARED
#endif

// Says that `bytes` at `at` are about to be read: heard by the simulator of the CUDA kernels only.
#if defined(ATTN_EXT_CUDA_SIM)
namespace attn_ext::cuda_sim {
void watch_read(const void* at, std::size_t bytes);
}
#define ATTN_EXT_WATCH_READ(at, bytes) ::attn_ext::cuda_sim::watch_read(at, bytes)
#else
#define ATTN_EXT_WATCH_READ(at, bytes) static_cast<void>(0)
#endif

namespace attn_ext {

enum class DType : uint8_t { float32, bfloat16, float16, float64, boolean, int8 };

enum class Causal : int64_t { none = 0, top_left = 1, bottom_right = 2 };

// No window on that side.
inline constexpr int64_t kUnbounded = -1;

// A tensor of up to two batch dims, heads, length and a last dim; a broadcast dim has stride 0.
// q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); masks and biases (B, Hq, Lq, Lk).
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::float32;
  int64_t stride_b0 = 0;  // outer batch dim (5-D inputs)
  int64_t stride_b1 = 0;  // inner batch dim
  int64_t stride_h = 0;
  int64_t stride_l = 0;
  int64_t stride_d = 0;

  ATTN_EXT_SHARED explicit operator bool() const { return data != nullptr; }
};

// Per-row numbers (B, Hq, Lq), rows contiguous; fp32, or fp64 for fp64 inputs. In packed calls (Hq, total).
struct RowView {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;

  ATTN_EXT_SHARED explicit operator bool() const { return data != nullptr; }
};

inline constexpr int kMaxBiases = 2;

// Where a cache keeps the key of position j of a sequence: in row j; in row j % ring of a ring buffer; or in row
// j % page_size of block table[b][j / page_size], where the views' batch dim is the block.
struct CacheLayout {
  int64_t ring = 0;  // 0: no ring
  int64_t page_size = 0;
  const int32_t* block_table = nullptr;  // [batch][table_stride], null: not paged
  int64_t table_stride = 0;
};

// int8 caches hold round(x / scale), with one fp32 scale a token and head: (B, Hkv, L), or by block and page.
struct CacheScales {
  TensorView k, v;  // null: the cache holds numbers of q's dtype
};

struct AttentionParams {
  int64_t batch = 0;        // B, both batch dims flattened
  int64_t batch_inner = 1;  // size of the inner batch dim: b = b0 * batch_inner + b1
  int64_t Hq = 0, Hkv = 0, Lq = 0, Lk = 0, D = 0, Dv = 0;

  TensorView q, k, v;
  TensorView mask;                      // bool, true = attend; null = none
  TensorView bias[kMaxBiases];          // added to the scaled scores; null = none
  const float* alibi_slopes = nullptr;  // [batch or 1][Hq]
  int64_t alibi_stride_b = 0;
  const double* sinks = nullptr;         // [Hq] logits without a value
  const int64_t* key_lengths = nullptr;  // [batch], each in [0, Lk]

  // Packed sequences: rows cu_q[b] … cu_q[b+1]-1 of the total_q of q and out, cu_k likewise of k and v. Lq and Lk are then
  // those of the longest, or the totals where the host does not know it (on a GPU).
  const int64_t* cu_q = nullptr;
  const int64_t* cu_k = nullptr;
  int64_t total_q = 0, total_k = 0;

  // KV caches: sequence b has total_lengths[b] keys (null: Lk), found as the layout says. Lk is then the most of them.
  const int64_t* total_lengths = nullptr;
  CacheLayout layout;
  CacheScales scales;

  // Row r of q stands at query position row_positions[r] of num_queries (null: r of Lq).
  const int64_t* row_positions = nullptr;
  int64_t num_queries = 0;

  Causal causal = Causal::none;
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  double scale = 1.0;
  double softcap = 0.0;  // 0 = off

  bool dropout = false;
  uint64_t dropout_seed = 0;
  const uint64_t* dropout_seed_at = nullptr;  // where the device has it, in the seed's place; null on the CPU
  uint32_t dropout_threshold = 0;             // a weight is dropped iff its 16 random bits are below; 65536 drops all
  double dropout_scale = 1.0;                 // 1 / (1 - p), p as rounded to 1/65536

  // Whether there is any row to compute. (Packed rows that no sequence has count as well: a GPU's host cannot tell.)
  bool has_rows() const { return (batch > 0 || cu_q != nullptr) && Hq > 0 && Lq > 0; }

  // For whoever asks only how a call of these sizes is cut.
  void set_sizes(int64_t B, int64_t query_heads, int64_t key_heads, int64_t queries, int64_t keys, int64_t key_width,
                 int64_t value_width) {
    batch = B;
    Hq = query_heads;
    Hkv = key_heads;
    Lq = queries;
    Lk = keys;
    D = key_width;
    Dv = value_width;
  }

  // The scores need work between q·k and the softmax (or the scale is 0, or so small that it is none of the scores'
  // normal numbers): they are then held scaled, in natural units, in "score units" otherwise (raw q·k). The row max is
  // saved in those same units.
  ATTN_EXT_SHARED bool scores_are_scaled() const {
    const double smallest =
        q.dtype == DType::float64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
    const bool tiny = scale < smallest && -scale < smallest;
    return bias[0] || bias[1] || alibi_slopes != nullptr || sinks != nullptr || softcap != 0.0 || tiny;
  }
};

struct ForwardParams : AttentionParams {
  TensorView out;                 // (B, Hq, Lq, Dv)
  RowView lse, row_max, row_sum;  // null where nobody asked (the inference op)
};

// New tokens into a cache, or q into a turned copy of itself: rows of `from`, turned by their positions, to `to`.
struct AppendParams {
  int64_t batch = 0, heads = 0, n = 0, D = 0;  // n: the most new tokens of a sequence
  TensorView from, to;                         // (B, H, n, D) → the cache
  TensorView scale;                            // int8 caches only
  CacheLayout layout;
  const int64_t* positions =
      nullptr;                  // [batch] where the first new token goes; on a GPU −1: nowhere, no row is written
  const int64_t* cu = nullptr;  // packed: rows cu[b] … cu[b+1]-1 of the `total` of `from`; null: n each
  int64_t total = 0;
  bool to_packed = false;  // `to` is laid out as `from` is, not as a cache

  // Rotary tables (positions, rotary_dim / 2), fp32 (fp64 for fp64): null turns nothing.
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t cos_stride = 0, sin_stride = 0;  // from one position to the next
  int64_t rotary_dim = 0;
  bool interleaved = false;
};

struct WeightsParams : AttentionParams {
  TensorView weights;  // (B, Hq, Lq, Lk), filled with zeros
  RowView row_max, row_sum;
};

struct BackwardParams : AttentionParams {
  TensorView out, grad_out;  // (B, Hq, Lq, Dv)
  RowView grad_lse;          // may be null
  RowView row_max, row_sum;
  TensorView dq, dk, dv;                 // null where not asked
  TensorView dbias[kMaxBiases];          // shape of the bias itself: stride 0 where it broadcasts; filled with zeros
  bool bias_varies[kMaxBiases][5] = {};  // whether the bias has its own entries per outer b, inner b, h, i, j
  double* dsinks = nullptr;              // [Hq]
};

}  // namespace attn_ext
