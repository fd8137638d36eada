// Vec<float> and Vec<double> on aarch64's 128-bit registers (Advanced SIMD is part of the base architecture).
// What each member means: generic/vec_contract.md.
#pragma once

namespace attn_ext::cpu::neon {
namespace {

// Where Ahead asks for memory: __builtin_prefetch's third argument. 3: into L1.
inline constexpr int kPrefetchLocality = 3;
// How far ahead of its use, in bytes.
inline constexpr int64_t kPrefetchLead = 16 << 10;

template <class T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int N = 4;
  static constexpr int kTileRows = 8;                            // 8 × 2 accumulators + 2 of B + A of 32 registers
  static constexpr float kExponentShift = 12582912.0f + 127.0f;  // 1.5·2^23 + bias, see exp2_nonpositive
  struct Mask {
    uint32x4_t m;
  };
  float32x4_t v;

  static Vec zero() { return {vdupq_n_f32(0.0f)}; }
  static Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
  static Vec broadcast_from(const float* p) { return {vld1q_dup_f32(p)}; }
  static Vec iota() {
    static constexpr float lanes[4] = {0, 1, 2, 3};
    return {vld1q_f32(lanes)};
  }
  static Vec load(const float* p) { return {vld1q_f32(p)}; }
  static Vec load(const bf16* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16))};
  }
  static Vec load(const f16* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))))};
  }
  static Vec load(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))))};
  }
  static Vec low_bf16(Vec bits) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(bits.v), 16))}; }
  static Vec high_bf16(Vec bits) {
    return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(bits.v), vdupq_n_u32(0xffff0000u)))};
  }
  template <int i>
  static Vec byte(Vec bits) {
    const uint32x4_t at_top = vshlq_u32(vreinterpretq_u32_f32(bits.v), vdupq_n_s32(24 - 8 * i));
    return {vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(at_top), 24))};
  }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(bf16* p) const {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t number = vceqq_f32(v, v);
    vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(vbslq_u32(number, rounded, quiet), 16));
  }
  void store(f16* p) const { vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v))); }

  Vec operator+(Vec b) const { return {vaddq_f32(v, b.v)}; }
  Vec operator-(Vec b) const { return {vsubq_f32(v, b.v)}; }
  Vec operator*(Vec b) const { return {vmulq_f32(v, b.v)}; }
  Vec operator/(Vec b) const { return {vdivq_f32(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }  // vmaxq would return NaN where a is NaN
  static Vec abs(Vec a) { return {vabsq_f32(a.v)}; }
  static Vec copysign(Vec magnitude, Vec sign) { return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, magnitude.v)}; }
  static Vec shift_into_exponent(Vec a) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.v), 23))}; }

  static Mask less(Vec a, Vec b) { return {vcltq_f32(a.v, b.v)}; }
  static Mask equal(Vec a, Vec b) { return {vceqq_f32(a.v, b.v)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const uint16x8_t wide = vmovl_u8(vcreate_u8(four));
    const uint32x4_t lanes = vmovl_u16(vget_low_u16(wide));
    return {vtstq_u32(lanes, lanes)};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {vbslq_f32(m.m, yes.v, no.v)}; }

  float first() const { return vgetq_lane_f32(v, 0); }
  float sum() const {
    const float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  float largest() const {
    float r = vgetq_lane_f32(v, 0);
    r = vgetq_lane_f32(v, 1) > r ? vgetq_lane_f32(v, 1) : r;
    r = vgetq_lane_f32(v, 2) > r ? vgetq_lane_f32(v, 2) : r;
    return vgetq_lane_f32(v, 3) > r ? vgetq_lane_f32(v, 3) : r;
  }

  template <class At>
  static void load_transposed(At at, Vec (&r)[4]) {
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) r[i] = load(at(i));
    const float32x4x2_t a = vtrnq_f32(r[0].v, r[1].v), b = vtrnq_f32(r[2].v, r[3].v);
    r[0].v = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1].v = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2].v = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3].v = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }
};

template <>
struct Vec<double> {
  static constexpr int N = 2;
  static constexpr int kTileRows = 8;
  static constexpr double kExponentShift = 6755399441055744.0 + 1023.0;  // 1.5·2^52 + bias
  struct Mask {
    uint64x2_t m;
  };
  float64x2_t v;

  static Vec zero() { return {vdupq_n_f64(0.0)}; }
  static Vec broadcast(double x) { return {vdupq_n_f64(x)}; }
  static Vec broadcast_from(const double* p) { return {vld1q_dup_f64(p)}; }
  static Vec iota() {
    static constexpr double lanes[2] = {0, 1};
    return {vld1q_f64(lanes)};
  }
  static Vec load(const double* p) { return {vld1q_f64(p)}; }
  void store(double* p) const { vst1q_f64(p, v); }

  Vec operator+(Vec b) const { return {vaddq_f64(v, b.v)}; }
  Vec operator-(Vec b) const { return {vsubq_f64(v, b.v)}; }
  Vec operator*(Vec b) const { return {vmulq_f64(v, b.v)}; }
  Vec operator/(Vec b) const { return {vdivq_f64(v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
  static Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
  static Vec abs(Vec a) { return {vabsq_f64(a.v)}; }
  static Vec copysign(Vec magnitude, Vec sign) {
    return {vbslq_f64(vdupq_n_u64(0x8000000000000000ULL), sign.v, magnitude.v)};
  }
  static Vec shift_into_exponent(Vec a) { return {vreinterpretq_f64_u64(vshlq_n_u64(vreinterpretq_u64_f64(a.v), 52))}; }

  static Mask less(Vec a, Vec b) { return {vcltq_f64(a.v, b.v)}; }
  static Mask equal(Vec a, Vec b) { return {vceqq_f64(a.v, b.v)}; }
  static Mask nonzero_bytes(const uint8_t* p) {
    const uint64x2_t lanes = {p[0] ? ~uint64_t(0) : 0, p[1] ? ~uint64_t(0) : 0};
    return {lanes};
  }
  static Vec select(Mask m, Vec yes, Vec no) { return {vbslq_f64(m.m, yes.v, no.v)}; }

  double first() const { return vgetq_lane_f64(v, 0); }
  double sum() const { return vgetq_lane_f64(v, 0) + vgetq_lane_f64(v, 1); }
  double largest() const {
    const double a = vgetq_lane_f64(v, 0), b = vgetq_lane_f64(v, 1);
    return b > a ? b : a;
  }

  template <class At>
  static void load_transposed(At at, Vec (&r)[2]) {
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i) r[i] = load(at(i));
    const float64x2_t a = r[0].v;
    r[0].v = vtrn1q_f64(a, r[1].v);
    r[1].v = vtrn2q_f64(a, r[1].v);
  }
};

}  // namespace
}  // namespace attn_ext::cpu::neon
