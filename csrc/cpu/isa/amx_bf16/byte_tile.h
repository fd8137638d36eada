// Products of int8 caches by AMX's tiles of bytes: see generic/forward_bytes-inl.h. Included inside the target region.
#pragma once

namespace attn_ext::cpu::amx_bf16 {
namespace {

struct ByteTile {
  using V = Vec<float>;
  static constexpr int kDigits = 3;
  static constexpr int kGroup = 4;                  // rows whose digits are the rows (columns) of one tile
  static constexpr int kRows = 2 * kGroup;          // of q or of weights at most
  static constexpr int64_t kDepth = 64;             // features that a tile holds
  static constexpr int64_t kKeys = amx::kTileRows;  // keys that it holds
  static constexpr int kTileBytes = amx::kTileRows * 64;
  static constexpr int kTileSums = amx::kTileRows * amx::kTileColumns;
  static constexpr int kHeldTiles = 4;       // of q, in registers 4 to 7
  static constexpr int kAsked = kTileBytes;  // bytes of k or v that are asked for at a time
  // Three digits with a sign hold whole numbers of up to 2^kWholeBits.
  static constexpr int kWholeBits = 22;

  // What numbers of a row are multiplied with to have three digits: 2^22 over the power of two above its largest one, and
  // back. In two steps, as 2^22 over a number near 2^-126 is none in fp32. By their bits: the C library's functions took a
  // third of a block's time.
  struct Unit {
    float lift, to_whole, to_number;

    V whole_numbers(V x) const { return x * V::broadcast(lift) * V::broadcast(to_whole); }
  };
  static Unit unit_for(float largest) {
    constexpr int kBias = 127, kFraction = 23;
    const auto two_to = [](int exponent) {
      return std::bit_cast<float>(static_cast<uint32_t>(kBias + exponent) << kFraction);
    };
    const int power = static_cast<int>(std::bit_cast<uint32_t>(largest) >> kFraction) - kBias + 1;
    const int lift = power < -64 ? 64 : 0, shift = kWholeBits - power - lift;
    return {two_to(lift), two_to(shift), two_to(-shift) * two_to(-lift)};
  }

  // Digit t of 16 features is 16 bytes at to + t · stride.
  static void split_numbers(V x, int8_t* to, int64_t stride) {
    __m512i digit[kDigits];
    split(x, digit);
    for (int t = 0; t < kDigits; ++t) {
      alignas(64) int32_t wide[amx::kTileColumns];
      _mm512_store_si512(wide, digit[t]);
      for (int i = 0; i < amx::kTileColumns; ++i) to[t * stride + i] = static_cast<int8_t>(wide[i]);
    }
  }

  // The weights of 16 keys in rows r, 4 + r, 8 + r and 12 + r of one tile a digit: as byte 0, 1, 2 and 3 of a word of
  // zeros. Times rows of v as they lie, four neighbouring features to a word, each makes one feature of four.
  static void spread(V x, int64_t r, int8_t* tiles) {
    __m512i digit[kDigits];
    split(x, digit);
#pragma GCC unroll 3
    for (int t = 0; t < kDigits; ++t) {
      int8_t* to = tiles + t * kTileBytes + r * 64;
      const __m512i byte = _mm512_and_si512(digit[t], _mm512_set1_epi32(0xff));
      _mm512_storeu_si512(to, byte);
      _mm512_storeu_si512(to + 1 * kGroup * 64, _mm512_slli_epi32(byte, 8));
      _mm512_storeu_si512(to + 2 * kGroup * 64, _mm512_slli_epi32(byte, 16));
      _mm512_storeu_si512(to + 3 * kGroup * 64, _mm512_slli_epi32(byte, 24));
    }
  }

  // The number that the sums of its digits' products make: sums of up to 2^24 are exact.
  static V join(V first, V second, V third) {
    const V base = V::broadcast(256.0f);
    return V::fma(V::fma(whole(third), base, whole(second)), base, whole(first));
  }

  // q's tiles, each holding 64 features of 16 columns, stay in registers until the next Session or hold.
  template <int tiles>
  static void hold(const int8_t* q) {
    each_of<tiles>([&]<int n>() { amx::load<4 + n>(q + n * kTileBytes, 64); });
  }

  // sums[group][16][16] = 16 rows of k, as they lie, by the q that is held: tile group · steps + step. One group's sums
  // may be under way for c = 0 and 1 at the same time.
  template <int steps, int groups, int c, class... Asked>
  static void multiply_keys(const int8_t* k, int64_t stride, int32_t* sums, Asked... ahead) {
    static_assert(steps * groups <= kHeldTiles && groups <= 2);
    constexpr int first = groups == 1 ? c : 0;
    each_of<groups>([&]<int g>() { amx::zero<first + g>(); });
    each_of<steps>([&]<int s>() {
      amx::load<2 + s % 2>(k + s * kDepth, stride);
      each_of<groups>([&]<int g>() { amx::multiply_add_bytes<first + g, 2 + s % 2, 4 + g * steps + s>(); });
      (ahead.ask(s), ...);
    });
    each_of<groups>([&]<int g>() { amx::store<first + g>(sums + g * kTileSums, 64); });
  }

  // Sums of weights · v for panels of 64 features and groups of rows, in registers from begin to end: [panel][group][digit].
  template <int panels, int groups>
  struct ValueSums {
    static constexpr int kTiles = panels * groups * kDigits;
    static_assert(kTiles <= 6);

    static void begin() {
      each_of<kTiles>([&]<int n>() { amx::zero<n>(); });
    }
    template <class... Asked>
    static void add(const int8_t* weights, const int8_t* v, int64_t stride, Asked... ahead) {
      each_of<panels>([&]<int p>() {
        amx::load<7>(v + p * kDepth, stride);
        each_of<groups * kDigits>([&]<int n>() {
          amx::load<6>(weights + n * kTileBytes, 64);
          amx::multiply_add_bytes<p * groups * kDigits + n, 6, 7>();
        });
        (ahead.ask(p), ...);
      });
    }
    static void end(int32_t* sums) {
      each_of<kTiles>([&]<int n>() { amx::store<n>(sums + n * kTileSums, 64); });
    }
  };

 private:
  template <int count, class F>
  [[gnu::always_inline]] static void each_of(F&& f) {
    [&]<int... n>(std::integer_sequence<int, n...>) { (f.template operator()<n>(), ...); }
    (std::make_integer_sequence<int, count>());
  }

  // x, up to 2^kWholeBits, rounded to whole numbers: x = Σ digit[t] · 256^t, each digit in [−128, 127].
  static void split(V x, __m512i (&digit)[kDigits]) {
    constexpr float kHalfOfFraction = 12582912.0f;  // 1.5 · 2^23: added to x, the fraction's bits are x
    const __m512 shifted = _mm512_add_ps(x.v, _mm512_set1_ps(kHalfOfFraction));
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
#pragma GCC unroll 2
    for (int t = 0; t + 1 < kDigits; ++t) {
      digit[t] = _mm512_srai_epi32(_mm512_slli_epi32(n, 24), 24);
      n = _mm512_srai_epi32(_mm512_sub_epi32(n, digit[t]), 8);
    }
    digit[kDigits - 1] = n;
  }

  static V whole(V bits) { return {_mm512_cvtepi32_ps(_mm512_castps_si512(bits.v))}; }
};

}  // namespace
}  // namespace attn_ext::cpu::amx_bf16
