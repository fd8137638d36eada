// Every op's signature, and nothing else. The options that the ops share stand in one order, here and in attention.cpp.
#include "attention.h"
#include "device.h"
#include "kv_cache.h"

#define ATTN_EXT_OPTIONS                                                                                  \
  "Tensor? mask, Tensor? bias, Tensor? bias2, Tensor? alibi_slopes, Tensor? sinks, Tensor? key_lengths, " \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? dropout_seed, int causal, int? window_left, "      \
  "int? window_right, float? scale, float softcap, float dropout_p"

#define ATTN_EXT_CACHE(mutates_k_scales, mutates_v_scales)                                                   \
  "Tensor cache_lengths, Tensor? block_table, Tensor" mutates_k_scales "? k_scales, Tensor" mutates_v_scales \
  "? v_scales, Tensor? cu_seqlens, Tensor? cos, Tensor? sin, bool ring, bool interleaved"

#define ATTN_EXT_CACHE_OPTIONS                                                                                   \
  ", Tensor? alibi_slopes, Tensor? sinks, int causal, int? window_left, int? window_right, float? scale, float " \
  "softcap) -> (Tensor out, Tensor lse)"

// One object file of a process defines the operators; another one may add the same functions for another device.
#if !defined(ATTN_EXT_ON_CUDA) || defined(ATTN_EXT_CUDA_SIM)
STABLE_TORCH_LIBRARY(attn_ext, m) {
  m.def("attention_inference(Tensor q, Tensor k, Tensor v, int causal, float? scale) -> Tensor");
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " ATTN_EXT_OPTIONS
        ") -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor row_max, Tensor row_sum, " ATTN_EXT_OPTIONS
      ", int grads) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dbias2, Tensor dsinks)");
  m.def(
      "attention_weights(Tensor q, Tensor k, Tensor? mask, Tensor? bias, Tensor? bias2, Tensor? alibi_slopes, "
      "Tensor? sinks, Tensor? key_lengths, Tensor? row_max, Tensor? row_sum, Tensor? row_positions, "
      "int num_queries, int causal, int? window_left, int? window_right, float? scale, float softcap) -> Tensor");
  m.def("kv_cache_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, " ATTN_EXT_CACHE(
      "(c!)", "(d!)") ") -> ()");
  m.def("attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, " ATTN_EXT_CACHE("", "")
            ATTN_EXT_CACHE_OPTIONS);
  m.def(
      "attention_with_kv_cache_append_(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor "
      "v, " ATTN_EXT_CACHE("(c!)", "(d!)") ATTN_EXT_CACHE_OPTIONS);
}
#endif

#if defined(ATTN_EXT_ON_CUDA)
STABLE_TORCH_LIBRARY_FRAGMENT(attn_ext, m) { m.def("take_fault(Tensor place) -> Tensor"); }
#endif

#if defined(ATTN_EXT_ON_CUDA) && !defined(ATTN_EXT_CUDA_SIM)
STABLE_TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
#endif
  m.impl("attention_inference", TORCH_BOX(&attn_ext::attention_inference));
  m.impl("attention_forward", TORCH_BOX(&attn_ext::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attn_ext::attention_backward));
  m.impl("attention_weights", TORCH_BOX(&attn_ext::attention_weights));
  m.impl("kv_cache_append_", TORCH_BOX(&attn_ext::kv_cache_append));
  m.impl("attention_with_kv_cache", TORCH_BOX(&attn_ext::attention_with_kv_cache));
  m.impl("attention_with_kv_cache_append_", TORCH_BOX(&attn_ext::attention_with_kv_cache_append));
#if defined(ATTN_EXT_ON_CUDA)
  m.impl("take_fault", TORCH_BOX(&attn_ext::take_fault));
#endif
}
