// Every member of the Vec contract (csrc/cpu/generic/vec_contract.md), and exp2 and tanh over it. Included by one file an
// ISA, after its vec.h and math-inl.h and inside its target region; what comes from outside the region is declared in
// testing.h and defined elsewhere.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <class T>
BitsOf<T> bits_of(T x) {
  return std::bit_cast<BitsOf<T>>(x);
}

// Equal to the last bit; all NaNs are alike.
template <class T>
bool same(T a, T b) {
  return bits_of(a) == bits_of(b) || (a != a && b != b);
}

template <class T>
inline constexpr T kSpecials[] = {T(0),
                                  T(-0.0),
                                  T(1),
                                  T(-1),
                                  T(0.5),
                                  T(-2.25),
                                  T(3),
                                  T(1e10),
                                  T(-1e10),
                                  T(1.0000001),
                                  T(7.3e-5),
                                  std::numeric_limits<T>::infinity(),
                                  -std::numeric_limits<T>::infinity(),
                                  std::numeric_limits<T>::quiet_NaN(),
                                  -std::numeric_limits<T>::quiet_NaN(),
                                  std::numeric_limits<T>::max(),
                                  std::numeric_limits<T>::lowest(),
                                  std::numeric_limits<T>::min(),
                                  -std::numeric_limits<T>::min(),
                                  std::numeric_limits<T>::denorm_min(),
                                  -std::numeric_limits<T>::denorm_min(),
                                  std::numeric_limits<T>::epsilon(),
                                  T(0.1),
                                  T(-123.456),
                                  T(16777215),
                                  T(8388607.5)};

template <class T>
inline constexpr int kSpecialCount = static_cast<int>(std::size(kSpecials<T>));

// N numbers of an exactly sized block of malloc's, so that the address sanitizer sees a load or store beyond them; the
// block's start is off the vector alignment by one element.
template <class T, int N>
struct Lanes {
  T* memory = static_cast<T*>(std::malloc(sizeof(T) * (N + 1)));
  T* x = memory + 1;

  Lanes() = default;
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;
  ~Lanes() { std::free(memory); }
  T& operator[](int i) { return x[i]; }
};

template <class T>
void check_moves() {
  using V = Vec<T>;
  constexpr int N = V::N;
  Lanes<T, N> a, b;
  for (int i = 0; i < N; ++i) a[i] = T(i) + T(0.25);
  V::load(a.x).store(b.x);
  for (int i = 0; i < N; ++i) CHECK(b[i] == a[i], "load, store: lane %d is %g", i, double(b[i]));
  CHECK(V::load(a.x).first() == T(0.25), "first is %g", double(V::load(a.x).first()));
  V::zero().store(b.x);
  for (int i = 0; i < N; ++i) CHECK(bits_of(b[i]) == 0, "zero: lane %d is %g", i, double(b[i]));
  V::iota().store(b.x);
  for (int i = 0; i < N; ++i) CHECK(b[i] == T(i), "iota: lane %d is %g", i, double(b[i]));
  for (const T x : kSpecials<T>) {
    V::broadcast(x).store(b.x);
    for (int i = 0; i < N; ++i) CHECK(same(b[i], x), "broadcast %g: lane %d is %g", double(x), i, double(b[i]));
    T* one = static_cast<T*>(std::malloc(sizeof(T)));
    *one = x;
    V::broadcast_from(one).store(b.x);
    std::free(one);
    for (int i = 0; i < N; ++i) CHECK(same(b[i], x), "broadcast_from %g: lane %d is %g", double(x), i, double(b[i]));
  }
  T* rows = static_cast<T*>(std::malloc(N * N * sizeof(T)));  // exactly what is to be read
  for (int i = 0; i < N * N; ++i) rows[i] = T(100 * (i / N) + i % N);
  V r[N];
  V::load_transposed([&](int i) { return rows + i * N; }, r);
  std::free(rows);
  for (int i = 0; i < N; ++i) {
    r[i].store(b.x);
    for (int j = 0; j < N; ++j) CHECK(b[j] == T(100 * j + i), "load_transposed: [%d][%d] is %g", i, j, double(b[j]));
  }
}

template <class T>
void check_arithmetic() {
  using V = Vec<T>;
  constexpr int N = V::N, count = kSpecialCount<T>;
  Lanes<T, N> a, b, c, r;
  // Whether fma rounds once, as hardware does, or twice.
  const T near_one = T(1) + std::numeric_limits<T>::epsilon();
  const bool fused =
      V::fma(V::broadcast(near_one), V::broadcast(near_one), V::broadcast(-near_one * near_one)).first() != T(0);
  for (int s = 0; s < count; ++s) {
    for (int t = 0; t < count; ++t) {
      for (int i = 0; i < N; ++i) {
        a[i] = kSpecials<T>[(s + i) % count];
        b[i] = kSpecials<T>[(t + 2 * i) % count];
        c[i] = kSpecials<T>[(s + t + 3 * i) % count];
      }
      const V va = V::load(a.x), vb = V::load(b.x), vc = V::load(c.x);
      const auto check = [&](const char* what, V got, auto want_of) {
        got.store(r.x);
        for (int i = 0; i < N; ++i) {
          const T want = want_of(a[i], b[i], c[i]);
          CHECK(same(r[i], want), "%s of %a, %a, %a: lane %d is %a, not %a", what, double(a[i]), double(b[i]),
                double(c[i]), i, double(r[i]), double(want));
        }
      };
      check("+", va + vb, [](T x, T y, T) { return x + y; });
      check("-", va - vb, [](T x, T y, T) { return x - y; });
      check("*", va * vb, [](T x, T y, T) { return x * y; });
      check("/", va / vb, [](T x, T y, T) { return x / y; });
      check("fma", V::fma(va, vb, vc), [=](T x, T y, T z) { return fused ? std::fma(x, y, z) : x * y + z; });
      check("max", V::max(va, vb), [](T x, T y, T) { return x > y ? x : y; });
      check("abs", V::abs(va), [](T x, T, T) { return std::fabs(x); });
      check("copysign", V::copysign(va, vb), [](T x, T y, T) { return std::copysign(x, y); });
      check("select less", V::select(V::less(va, vb), va, vc), [](T x, T y, T z) { return x < y ? x : z; });
      check("select equal", V::select(V::equal(va, vb), va, vc), [](T x, T y, T z) { return x == y ? x : z; });
      check("shift_into_exponent", V::shift_into_exponent(va),
            [](T x, T, T) { return std::bit_cast<T>(bits_of(x) << (sizeof(T) == 4 ? 23 : 52)); });
      T largest = a[0];
      for (int i = 0; i < N; ++i) largest = a[i] > largest ? a[i] : largest;
      bool has_nan = false;
      for (int i = 0; i < N; ++i) has_nan |= a[i] != a[i];
      if (!has_nan) CHECK(va.largest() == largest, "largest is %g, not %g", double(va.largest()), double(largest));
    }
  }
  // Lane by lane: small whole numbers are summed exactly in any order; the largest may be anywhere.
  for (int at = 0; at < N; ++at) {
    for (int i = 0; i < N; ++i) a[i] = i == at ? T(1000) : T(i);
    const T sum = T(1000 + N * (N - 1) / 2 - at);
    CHECK(V::load(a.x).sum() == sum, "sum is %g, not %g", double(V::load(a.x).sum()), double(sum));
    CHECK(V::load(a.x).largest() == T(1000), "largest is %g with 1000 at %d", double(V::load(a.x).largest()), at);
    for (int i = 0; i < N; ++i) a[i] = i == at ? T(-1) : -kInfinity<T>;
    CHECK(V::load(a.x).largest() == T(-1), "largest is %g with -1 at %d", double(V::load(a.x).largest()), at);
  }
}

template <class T>
void check_bytes() {
  using V = Vec<T>;
  constexpr int N = V::N;
  Lanes<T, N> r;
  constexpr uint8_t values[] = {0, 1, 0, 2, 127, 0, 128, 255, 0, 0, 3};
  for (int s = 0; s < static_cast<int>(std::size(values)); ++s) {
    Lanes<uint8_t, N> bytes;
    for (int i = 0; i < N; ++i) bytes[i] = values[(s + i) % std::size(values)];
    const auto mask = V::nonzero_bytes(bytes.x);
    V::select(mask, V::broadcast(T(1)), V::broadcast(T(2))).store(r.x);
    for (int i = 0; i < N; ++i)
      CHECK(r[i] == (bytes[i] ? T(1) : T(2)), "nonzero_bytes: byte %d gives %g", bytes[i], double(r[i]));
  }
}

// Loads and stores of a 16-bit format against the scalar conversions, which have a test of their own.
template <class Storage, class Narrow>
void check_storage(const char* name, Narrow narrow) {
  using V = Vec<float>;
  constexpr int N = V::N;
  Lanes<Storage, N> stored;
  Lanes<float, N> wide;
  for (int first = 0; first < 65536; first += N) {
    for (int i = 0; i < N; ++i) stored[i].bits = static_cast<uint16_t>(first + i);
    V::load(stored.x).store(wide.x);
    for (int i = 0; i < N; ++i) {
      const float want = to_float(stored[i]);
      CHECK(bits_of(wide[i]) == bits_of(want), "%s 0x%04x loads as %a (0x%08x), not %a (0x%08x)", name, first + i,
            double(wide[i]), bits_of(wide[i]), double(want), bits_of(want));
    }
  }
  // Half a step behind every value (a tie), and one fp32 step to either side of that: exactly where rounding turns.
  const uint32_t half = sizeof(Storage) == 2 && std::is_same_v<Storage, bf16> ? 0x8000u : 0x1000u;
  for (int first = 0; first < 65536; first += N) {
    for (const uint32_t step : {0u, half - 1, half, half + 1}) {
      for (int i = 0; i < N; ++i) {
        const Storage x{static_cast<uint16_t>(first + i)};
        wide[i] = std::bit_cast<float>(bits_of(to_float(x)) + step);
      }
      V::load(wide.x).store(stored.x);
      for (int i = 0; i < N; ++i) {
        const Storage want = narrow(wide[i]);
        CHECK(stored[i].bits == want.bits, "%a (0x%08x) is stored as %s 0x%04x, not 0x%04x", double(wide[i]),
              bits_of(wide[i]), name, stored[i].bits, want.bits);
      }
    }
  }
  // All magnitudes, among them those that the format has only as subnormals or not at all.
  for (uint32_t first = 0; first < 0x7f800000u; first += 0x1357u * N) {
    for (int i = 0; i < N; ++i) wide[i] = std::bit_cast<float>(first + 0x1357u * static_cast<uint32_t>(i));
    V::load(wide.x).store(stored.x);
    for (int i = 0; i < N; ++i) {
      const Storage want = narrow(wide[i]);
      CHECK(stored[i].bits == want.bits, "%a is stored as %s 0x%04x, not 0x%04x", double(wide[i]), name, stored[i].bits,
            want.bits);
    }
  }
}

template <class T>
void check_functions() {
  using V = Vec<T>;
  constexpr int N = V::N;
  constexpr double epsilon = std::numeric_limits<T>::epsilon(), smallest = std::numeric_limits<T>::min();
  Lanes<T, N> y, r;
  const double lowest = sizeof(T) == 4 ? -126 : -1022;
  const int steps = 40000;
  for (int s = 0; s < steps; s += N) {
    for (int i = 0; i < N; ++i) y[i] = static_cast<T>(lowest * (s + i) / steps / (s % 3 == 0 ? 50 : 1));
    exp2_nonpositive<T>(V::load(y.x)).store(r.x);
    for (int i = 0; i < N; ++i) {
      const double want = std::exp2(static_cast<double>(y[i]));
      CHECK(std::fabs(double(r[i]) - want) <= 1.5 * epsilon * want, "2^%a is %a, not %a", double(y[i]), double(r[i]),
            want);
      CHECK(same(exp2_nonpositive<T>(y[i]), r[i]), "2^%a alone is %a, not %a", double(y[i]),
            double(exp2_nonpositive<T>(y[i])), double(r[i]));
    }
  }
  CHECK(exp2_nonpositive<T>(T(0)) == T(1) && exp2_nonpositive<T>(T(-0.0)) == T(1), "2^0 is %g",
        double(exp2_nonpositive<T>(T(0))));
  for (const T x : {static_cast<T>(lowest - 1), static_cast<T>(2 * lowest), T(-1e30), std::numeric_limits<T>::lowest(),
                    -kInfinity<T>}) {
    CHECK(exp2_nonpositive<T>(x) == T(0), "2^%g is %g", double(x), double(exp2_nonpositive<T>(x)));
  }
  for (const uint32_t payload : {0x400000u, 0x7fffffu, 0x600001u}) {
    const float nan = std::bit_cast<float>(0x7f800000u | payload);
    const T got = exp2_nonpositive<T>(static_cast<T>(nan)), negative = exp2_nonpositive<T>(static_cast<T>(-nan));
    CHECK(got != got && negative != negative, "2^NaN (0x%x) is %g, %g", payload, double(got), double(negative));
  }

  for (int s = 0; s < steps; s += N) {
    for (int i = 0; i < N; ++i) {
      const double size = std::exp2(-30 + 35.0 * (s + i) / steps);
      y[i] = static_cast<T>((s + i) % 2 ? size : -size);
    }
    tanh<T>(V::load(y.x)).store(r.x);
    for (int i = 0; i < N; ++i) {
      const double want = std::tanh(static_cast<double>(y[i]));
      CHECK(std::fabs(double(r[i]) - want) <= 4 * epsilon * std::fabs(want) + smallest, "tanh %a is %a, not %a",
            double(y[i]), double(r[i]), want);
    }
  }
  const auto tanh1 = [](T x) { return tanh<T>(V::broadcast(x)).first(); };
  CHECK(tanh1(kInfinity<T>) == T(1) && tanh1(-kInfinity<T>) == T(-1), "tanh of Inf is %g, %g",
        double(tanh1(kInfinity<T>)), double(tanh1(-kInfinity<T>)));
  CHECK(tanh1(T(0)) == T(0) && tanh1(T(1e20)) == T(1), "tanh of 0, 1e20 is %g, %g", double(tanh1(T(0))),
        double(tanh1(T(1e20))));
  const T nan = tanh1(std::numeric_limits<T>::quiet_NaN());
  CHECK(nan != nan, "tanh of NaN is %g", double(nan));
}

template <class T>
void check_vec() {
  check_moves<T>();
  check_arithmetic<T>();
  check_bytes<T>();
  check_functions<T>();
}

void test_vec() {
  {
    const test::Context context("float");
    check_vec<float>();
    check_storage<bf16>("bfloat16", [](float x) { return to_bf16(x); });
    check_storage<f16>("float16", [](float x) { return to_f16(x); });
  }
  const test::Context context("double");
  check_vec<double>();
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
