// The units that scores are held in, and what a row of scores is: the same for every ISA and on a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "params.h"
#include "positions.h"

namespace attn_ext {

inline constexpr double kLog2e = 1.4426950408889634074;

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

// The call's constants as T. In plain calls scores stay raw q·k and c = |scale|·log2e turns differences into powers
// of two; the sign of a negative scale goes into q. With a bias, cap, sink or zero scale they are held scaled, c = log2e.
template <class T>
struct ScoreUnits {
  bool scaled;
  T q_factor;  // what q is multiplied by when it is packed: 1 or −1, exact
  T scale;     // applied to q·k where `scaled`
  T c;         // softmax weights are exp2((x − max x) · c)
  T unit;      // lse = max x · unit + ln(sum)

  ScoreUnits() = default;
  ATTN_EXT_SHARED explicit ScoreUnits(const AttentionParams& p)
      : scaled(p.scores_are_scaled()),
        q_factor(!scaled && p.scale < 0 ? T(-1) : T(1)),
        scale(static_cast<T>(p.scale)),
        c(static_cast<T>(scaled ? kLog2e : std::fabs(p.scale) * kLog2e)),
        unit(static_cast<T>(scaled ? 1.0 : std::fabs(p.scale))) {}
};

// Which row of which tensor a row of scores is, and the keys it may see by position.
struct ScoreRow {
  int64_t b = 0, h = 0, i = 0;
  KeyRange keys;
};

}  // namespace attn_ext
