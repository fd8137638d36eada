// The front door's checks: every message names the op, what was expected and what came. std::invalid_argument becomes
// Python's ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace attn_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "attn_ext." << op << ": ";
  (message << ... << parts);
  throw Error(message.str());
}

// A macro, so that the message is only put together where it is needed: a small call takes a few microseconds in all.
#define ATTN_EXT_EXPECT(condition, op, ...)    \
  do {                                         \
    if (!(condition)) refuse(op, __VA_ARGS__); \
  } while (false)

// Places that are not there become Python's IndexError.
#define ATTN_EXT_EXPECT_PLACE(condition, op, ...)                 \
  do {                                                            \
    if (!(condition)) refuse<std::out_of_range>(op, __VA_ARGS__); \
  } while (false)

inline std::string shape_string(const Tensor& t) {
  std::string text = "(";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + (t.dim() == 1 ? ",)" : ")");
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

inline bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
         type == ScalarType::Double;
}

// A small tensor of numbers: one-dimensional, int32 or int64, no more than `most` of them: what was expanded may claim any
// number.
inline void expect_integers(const char* op, const char* name, const Tensor& t, int64_t most = int64_t{1} << 31) {
  ATTN_EXT_EXPECT(t.dim() == 1, op, name, " must have one dimension, not shape ", shape_string(t));
  const ScalarType type = t.scalar_type();
  ATTN_EXT_EXPECT(type == ScalarType::Int || type == ScalarType::Long, op, name, " must be int32 or int64, not ",
                  dtype_name(type));
  ATTN_EXT_EXPECT(t.size(0) <= most, op, name, " ", shape_string(t), " has more than ", most, " entries");
}

}  // namespace attn_ext
