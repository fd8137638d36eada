// One call of the kernels: its description, its inputs, running it, and the same by plain loops in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "params.h"
#include "tensor.h"

namespace attn_ext::test {

struct Case {
  const char* name = "";
  DType dtype = DType::float32;
  int64_t B0 = 1, B1 = 1, Hq = 1, Hkv = 1, Lq = 4, Lk = 4, D = 4, Dv = 4;
  Layout layout = Layout::plain;          // of q, k, v, out and their gradients
  Layout options_layout = Layout::plain;  // of the mask and the biases

  // Which dims of a mask or bias have entries of their own: letters of "ABhij" for (b0, b1, h, i, j); "" is one number
  // for all, null none.
  const char* mask = nullptr;
  const char* bias[kMaxBiases] = {};
  DType bias_dtype = DType::float32;
  double hidden_share = 0.3;  // of the mask's entries
  double bias_hides = 0.0;    // share of the first bias' entries that are -Inf

  int alibi = 0;  // 1: a slope a head, 2: a slope a batch entry and head
  bool sinks = false;
  std::vector<int64_t> key_lengths = {};
  std::vector<int64_t> cu_q = {}, cu_k = {};  // packed: Lq and Lk are taken from them
  std::vector<int64_t> row_positions = {};
  int64_t num_queries = 0;

  Causal causal = Causal::none;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: 1/√D
  double softcap = 0.0;
  double dropout_p = 0.0;
  uint64_t dropout_seed = 0x123456789abcdef0u;
  bool grad_lse = false;
  double magnitude = 1.0;  // of the numbers in q and k

  // NaN and Inf into all keys, values, queries and incoming gradients that nothing may see.
  bool poison_hidden = false;
  uint64_t seed = 1;

  std::string text() const;
};

struct Problem {
  explicit Problem(Case description);

  Case c;
  int64_t batch = 0;
  double scale = 0;
  Tensor q, k, v, mask, bias[kMaxBiases], grad_out, grad_lse;
  std::vector<float> slopes;
  std::vector<double> sinks;

  bool packed() const { return !c.cu_q.empty(); }
  // Of batch entry b.
  int64_t Lq(int64_t b) const {
    return packed() ? c.cu_q[static_cast<size_t>(b) + 1] - c.cu_q[static_cast<size_t>(b)] : c.Lq;
  }
  int64_t Lk(int64_t b) const {
    return packed() ? c.cu_k[static_cast<size_t>(b) + 1] - c.cu_k[static_cast<size_t>(b)] : c.Lk;
  }
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const;

  // An output with the shape of q (k, v) and another width, filled with a number.
  Tensor like_queries(int64_t width, double fill) const;
  Tensor like_keys(int64_t width, double fill) const;
  Tensor like_rows(double fill) const;

  AttentionParams params() const;
};

struct Forward {
  Tensor out, lse, row_max, row_sum;
};

struct Gradients {
  Tensor dq, dk, dv, dbias[kMaxBiases], dsinks;
};

// Which gradients are asked for.
enum Wanted : unsigned {
  want_q = 1,
  want_k = 2,
  want_v = 4,
  want_bias = 8,
  want_bias2 = 16,
  want_sinks = 32,
  want_all = 63
};

// The kernels of the ISA in use.
Forward run_forward(const Problem& problem, int thread_count = 1);
Gradients run_backward(const Problem& problem, const Forward& forward, int thread_count = 1,
                       unsigned wanted = want_all);
Tensor run_weights(const Problem& problem, const Forward& forward, int thread_count = 1);

// The definition, row by row. The backward takes `out` as it was stored, as autograd does.
// `sums`: of the sizes of out's terms.
Forward reference_forward(const Problem& problem, Tensor* sums = nullptr);
// `sums` receives the sum of the absolute values of the terms of every gradient.
Gradients reference_backward(const Problem& problem, const Tensor& out, Gradients& sums);
Tensor reference_weights(const Problem& problem);

// Philox 4x32-10.
void philox(const uint32_t (&counter)[4], const uint32_t (&key)[2], uint32_t (&result)[4]);

// Compares every gradient that was asked for.
void check_gradients(const Problem& problem, const Gradients& got, const Gradients& want, const Gradients& sums);

// Forward, backward and (but for packed calls) weights with every ISA against the definition.
void check_problem(const Problem& problem, int thread_count = 1);
void check_case(const Case& c, int thread_count = 1);

void check_same_bits(const Forward& got, const Forward& want);
void check_same_bits(const Gradients& got, const Gradients& want);

}  // namespace attn_ext::test
