// Vec<float> and Vec<double> in portable C++: four (two) lanes in a plain array, which any compiler turns into whatever
// the baseline of the platform has (SSE2 on x86-64). fma is a multiply and an add: a baseline without FMA hardware
// would otherwise call a software routine for every element. What each member means: generic/vec_contract.md.
#pragma once

namespace attn_ext::cpu::scalar {
namespace {

// Where Ahead asks for memory: __builtin_prefetch's third argument. 3: into L1.
inline constexpr int kPrefetchLocality = 3;
// How far ahead of its use, in bytes.
inline constexpr int64_t kPrefetchLead = 16 << 10;

template <class T>
struct Vec {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static constexpr int N = 16 / sizeof(T);
  static constexpr int kTileRows = 4;  // 4 × 2 accumulators + 2 of B + 1 of A of SSE2's 16 registers
  static constexpr int kFractionBits = sizeof(T) == 4 ? 23 : 52;
  static constexpr T kExponentShift =
      sizeof(T) == 4 ? T(12582912.0 + 127.0) : T(6755399441055744.0 + 1023.0);  // see exp2_nonpositive
  typedef T Lanes __attribute__((vector_size(16)));
  typedef Bits BitLanes __attribute__((vector_size(16)));
  struct Mask {
    BitLanes m;
  };
  Lanes v;

  static Vec zero() { return {Lanes{}}; }
  static Vec broadcast(T x) { return {x - Lanes{}}; }  // not 0 + x, which makes −0 a +0
  static Vec broadcast_from(const T* p) { return broadcast(*p); }
  static Vec iota() {
    Vec r;
    for (int i = 0; i < N; ++i) r.v[i] = static_cast<T>(i);
    return r;
  }
  static Vec load(const T* p) {
    Vec r;
    std::memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  template <class Storage>
  requires(sizeof(Storage) <= 2) static Vec load(const Storage* p) {
    Vec r;
    for (int i = 0; i < N; ++i) r.v[i] = to_float(p[i]);
    return r;
  }
  static Vec low_bf16(Vec a) { return from_bits(bits(a) << 16); }
  static Vec high_bf16(Vec a) { return from_bits(bits(a) & 0xffff0000u); }
  template <int i>
  static Vec byte(Vec a) {
    Vec r;
    for (int n = 0; n < N; ++n) r.v[n] = static_cast<int8_t>(bits(a)[n] >> (8 * i));
    return r;
  }
  void store(T* p) const { std::memcpy(p, &v, sizeof v); }
  template <class Storage>
  requires(sizeof(Storage) == 2) void store(Storage* p) const {
    for (int i = 0; i < N; ++i) p[i] = convert_to<Storage>(v[i]);
  }

  Vec operator+(Vec b) const { return {v + b.v}; }
  Vec operator-(Vec b) const { return {v - b.v}; }
  Vec operator*(Vec b) const { return {v * b.v}; }
  Vec operator/(Vec b) const { return {v / b.v}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  static Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
  static BitLanes bits(Vec a) { return (BitLanes)a.v; }
  static Vec from_bits(BitLanes b) { return {(Lanes)b}; }
  static constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  static Vec abs(Vec a) { return from_bits(bits(a) & ~kSign); }
  static Vec copysign(Vec magnitude, Vec sign) { return from_bits((bits(magnitude) & ~kSign) | (bits(sign) & kSign)); }
  static Vec shift_into_exponent(Vec a) { return from_bits(bits(a) << kFractionBits); }

  static Mask less(Vec a, Vec b) { return {(BitLanes)(a.v < b.v)}; }
  static Mask equal(Vec a, Vec b) { return {(BitLanes)(a.v == b.v)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    Mask r{};
    for (int i = 0; i < N; ++i) r.m[i] = p[i] ? ~Bits(0) : Bits(0);
    return r;
  }
  static Vec select(Mask m, Vec yes, Vec no) { return from_bits((bits(yes) & m.m) | (bits(no) & ~m.m)); }

  T first() const { return v[0]; }
  T sum() const {
    T r = v[0];
    for (int i = 1; i < N; ++i) r += v[i];
    return r;
  }
  T largest() const {
    T r = v[0];
    for (int i = 1; i < N; ++i) r = v[i] > r ? v[i] : r;
    return r;
  }

  template <class At>
  static void load_transposed(At at, Vec (&r)[N]) {
    for (int i = 0; i < N; ++i) r[i] = load(at(i));
    for (int i = 0; i < N; ++i) {
      for (int j = i + 1; j < N; ++j) {
        const T above = r[i].v[j];
        r[i].v[j] = r[j].v[i];
        r[j].v[i] = above;
      }
    }
  }
};

}  // namespace
}  // namespace attn_ext::cpu::scalar
