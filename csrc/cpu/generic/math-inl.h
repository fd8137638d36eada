// exp2 and tanh over Vec<T>.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

// Polynomials of 2^f on [-½, ½], highest power first: minimax for the relative error, 1.9e-9 in fp32, 4.1e-20 in fp64, both
// below the rounding of their evaluation. The last coefficient is exactly 1.
template <class T>
inline constexpr std::array<T, 0> kExp2Polynomial{};
template <>
inline constexpr std::array<float, 7> kExp2Polynomial<float>{
    0x1.41d334p-13f, 0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f, 0x1.ebfbdap-3f, 0x1.62e430p-1f, 1.0f};
template <>
inline constexpr std::array<double, 13> kExp2Polynomial<double>{0x1.c2c59cf711b99p-36,
                                                                0x1.ea02eb6398a22p-32,
                                                                0x1.e4d07730aeec4p-28,
                                                                0x1.b524dc251ccf9p-24,
                                                                0x1.62c021ddbcb0ap-20,
                                                                0x1.ffcbfc757d12ep-17,
                                                                0x1.430912f885bd2p-13,
                                                                0x1.5d87fe78a242ep-10,
                                                                0x1.3b2ab6fba4e16p-7,
                                                                0x1.c6b08d704a0d0p-5,
                                                                0x1.ebfbdff82c58fp-3,
                                                                0x1.62e42fefa39efp-1,
                                                                1.0};

// 2^y for y ≤ 0: exactly 1 at 0, exactly 0 below half the smallest normal number, NaN for NaN.
//
// y = n + f with n the nearest integer. Adding kExponentShift = 1.5·2^23 + 127 (fp32) rounds y to n and leaves n + 127
// in the low bits of the sum, from where one shift makes the float 2^n; 2^f is a polynomial. The two are multiplied, not
// added as integers, so that a NaN with any payload stays NaN.
//
// The polynomial is 1 + f·(pairs of its terms, themselves a polynomial in f²): half as long a chain of multiply-adds as
// Horner's, so that a core's few dozen waiting instructions hold several vectors' chains (8 cycles a vector on Zen 3,
// where Horner's takes 16 alone and 10 four abreast).
template <class T>
[[gnu::always_inline]] inline Vec<T> exp2_nonpositive(Vec<T> y) {
  using V = Vec<T>;
  constexpr auto& c = kExp2Polynomial<T>;
  static_assert(c.size() % 2 == 1);
  const V shift = V::broadcast(V::kExponentShift);
  y = V::max(V::broadcast(sizeof(T) == 4 ? T(-127) : T(-1023)), y);
  const V power = y + shift;
  const V f = y - (power - shift), f2 = f * f;
  V p = V::fma(V::broadcast(c[0]), f, V::broadcast(c[1]));
#pragma GCC unroll 8
  for (size_t k = 2; k + 1 < c.size(); k += 2) {
    p = V::fma(p, f2, V::fma(V::broadcast(c[k]), f, V::broadcast(c[k + 1])));
  }
  return V::fma(p, f, V::broadcast(c.back())) * V::shift_into_exponent(power);
}

template <class T>
inline T exp2_nonpositive(T y) {
  return exp2_nonpositive<T>(Vec<T>::broadcast(y)).first();
}

// Returns tanh(u) with a relative error of a few ulp, also near 0 where the soft cap spends most of its time.
// fp32: u + u·z·P(z), z = u², a minimax P on [0, 0.4] (absolute error 1.7e-9); beyond, (1 − e)/(1 + e) with
// e = exp(−2|u|). fp64: the C library, lane by lane.
inline constexpr float kTanh[6] = {-0.333333331624f, 0.133333017686f,    -0.0539587846085f,
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
