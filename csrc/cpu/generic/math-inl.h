// exp2 and tanh over Vec<T>.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.6931471805599453094;

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Returns 2^y for y ≤ 0; exactly 1 at 0, exactly 0 below the smallest normal number, NaN for NaN.
//
// y = n + f with n the nearest integer. Adding kExponentShift = 1.5·2^23 + 127 (fp32) rounds y to n and leaves n + 127
// in the low bits of the sum, from where one shift makes the float 2^n; 2^f on [-½, ½] is a minimax polynomial (relative
// error 1.9e-9 of degree 6 in fp32, 4.1e-20 of degree 12 in fp64, both below the rounding of the evaluation). The two
// are multiplied, not added as integers, so that a NaN with any payload stays NaN.
template <class T>
inline Vec<T> exp2_nonpositive(Vec<T> y) {
  using V = Vec<T>;
  constexpr bool single = sizeof(T) == 4;
  y = V::max(V::broadcast(single ? T(-127) : T(-1023)), y);
  const V shift = V::broadcast(V::kExponentShift);
  const V shifted = y + shift;
  const V f = y - (shifted - shift);
  V p;
  if constexpr (single) {
    p = V::broadcast(0x1.41d334p-13f);
    p = V::fma(p, f, V::broadcast(0x1.5f456ap-10f));
    p = V::fma(p, f, V::broadcast(0x1.3b2dbcp-7f));
    p = V::fma(p, f, V::broadcast(0x1.c6aed4p-5f));
    p = V::fma(p, f, V::broadcast(0x1.ebfbdap-3f));
    p = V::fma(p, f, V::broadcast(0x1.62e430p-1f));
  } else {
    p = V::broadcast(0x1.c2c59cf711b99p-36);
    p = V::fma(p, f, V::broadcast(0x1.ea02eb6398a22p-32));
    p = V::fma(p, f, V::broadcast(0x1.e4d07730aeec4p-28));
    p = V::fma(p, f, V::broadcast(0x1.b524dc251ccf9p-24));
    p = V::fma(p, f, V::broadcast(0x1.62c021ddbcb0ap-20));
    p = V::fma(p, f, V::broadcast(0x1.ffcbfc757d12ep-17));
    p = V::fma(p, f, V::broadcast(0x1.430912f885bd2p-13));
    p = V::fma(p, f, V::broadcast(0x1.5d87fe78a242ep-10));
    p = V::fma(p, f, V::broadcast(0x1.3b2ab6fba4e16p-7));
    p = V::fma(p, f, V::broadcast(0x1.c6b08d704a0d0p-5));
    p = V::fma(p, f, V::broadcast(0x1.ebfbdff82c58fp-3));
    p = V::fma(p, f, V::broadcast(0x1.62e42fefa39efp-1));
  }
  p = V::fma(p, f, V::broadcast(T(1)));
  return p * V::shift_into_exponent(shifted);
}

template <class T>
inline T exp2_nonpositive(T y) {
  return exp2_nonpositive<T>(Vec<T>::broadcast(y)).first();
}

// Returns tanh(u) with a relative error of a few ulp, also near 0 where the soft cap spends most of its time.
// fp32: u + u·z·P(z), z = u², a minimax P on [0, 0.4] (absolute error 1.7e-9); beyond, (1 − e)/(1 + e) with
// e = exp(−2|u|). fp64: the C library, lane by lane.
inline constexpr float kTanh[6] = {-0.333333331624f,  0.133333017686f,   -0.0539587846085f,
                                   0.0217647563989f, -0.00832960998793f, 0.00227591256931f};

template <class T>
inline Vec<T> tanh(Vec<T> u) {
  using V = Vec<T>;
  if constexpr (sizeof(T) == 8) {
    T lanes[V::N];
    u.store(lanes);
    for (T& x : lanes) x = std::tanh(x);
    return V::load(lanes);
  } else {
    const V z = u * u;
    V p = V::broadcast(kTanh[5]);
    for (int k = 4; k >= 0; --k) p = V::fma(p, z, V::broadcast(kTanh[k]));
    const V near_zero = V::fma(p * z, u, u);
    const V size = V::abs(u);
    const V e = exp2_nonpositive<T>(size * V::broadcast(T(-2 * kLog2e)));
    const V one = V::broadcast(T(1));
    const V far = V::copysign((one - e) / (one + e), u);
    return V::select(V::less(size, V::broadcast(T(0.632))), near_zero, far);
  }
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
