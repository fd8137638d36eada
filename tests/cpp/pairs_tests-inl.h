// Pairs, PairCheck and PairTile (csrc/cpu/generic/pair_products-inl.h) against plain loops. Included by one file an ISA,
// after its pair_tile.h and its model_of_one_depth (what PairTile adds to a sum at a time), inside its target region; what comes from outside the region is declared in testing.h and
// bf16_model.h and defined elsewhere.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE {
namespace {

using test::kMoods;
using test::Mood;
using test::Random;

// Exactly sized, from malloc: the address sanitizer sees every access beyond.
template <class T>
struct Block {
  int64_t count;
  T* x;

  explicit Block(int64_t n) : count(n), x(static_cast<T*>(std::malloc(static_cast<size_t>(n) * sizeof(T)))) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { std::free(x); }
  T& operator[](int64_t i) { return x[i]; }
  const T& operator[](int64_t i) const { return x[i]; }
};

uint32_t pair_bits(bf16 first, bf16 second) {
  return static_cast<uint32_t>(first.bits) | static_cast<uint32_t>(second.bits) << 16;
}

void check_pairs(const char* what, Vec<float> got, const uint32_t (&want)[Vec<float>::N]) {
  Block<uint32_t> bits(Vec<float>::N);
  got.store(reinterpret_cast<float*>(bits.x));
  for (int i = 0; i < Vec<float>::N; ++i) {
    CHECK(bits[i] == want[i], "%s: pair %d is 0x%08x, not 0x%08x", what, i, bits[i], want[i]);
  }
}

void check_words() {
  constexpr int N = Vec<float>::N;
  uint32_t want[N];
  Random random(1);
  for (int n = 0; n < 200; ++n) {
    Block<bf16> a(N), b(N);
    Block<int8_t> small_a(N), small_b(N);
    Block<float> whole_a(N), whole_b(N);
    for (int i = 0; i < N; ++i) {
      a[i] = test::random_bf16(random, Mood::special);
      b[i] = test::random_bf16(random, Mood::special);
      small_a[i] = static_cast<int8_t>(random.below(256) - 128);
      small_b[i] = static_cast<int8_t>(random.below(256) - 128);
      whole_a[i] = to_float(a[i]);
      whole_b[i] = to_float(b[i]);
    }
    for (int i = 0; i < N; ++i) want[i] = pair_bits(a[i], b[i]);
    check_pairs("of_rows", Pairs::of_rows(a.x, b.x), want);
    check_pairs("of_whole", Pairs::of_whole(Vec<float>::load(whole_a.x), Vec<float>::load(whole_b.x)), want);

    Block<bf16> first(N), second(N);
    Pairs::split(Pairs::of_rows(a.x, b.x), first.x, second.x);
    for (int i = 0; i < N; ++i) {
      CHECK(first[i].bits == a[i].bits && second[i].bits == b[i].bits, "split: word %d is (0x%04x, 0x%04x)", i,
            static_cast<unsigned>(first[i].bits), static_cast<unsigned>(second[i].bits));
    }

    const auto finite = [](bf16 x) { return std::isfinite(to_float(x)) ? x : bf16{0}; };
    for (int i = 0; i < N; ++i) want[i] = pair_bits(finite(a[i]), finite(b[i]));
    check_pairs("without_specials", Pairs::without_specials(Pairs::of_rows(a.x, b.x)), want);

    const auto exact = [](int8_t x) { return to_bf16(static_cast<float>(x)); };
    for (int i = 0; i < N; ++i) want[i] = pair_bits(exact(small_a[i]), exact(small_b[i]));
    check_pairs("of_rows of int8", Pairs::of_rows(small_a.x, small_b.x), want);
  }

  // One number in all the places that a pair has.
  for (const bf16 x :
       {to_bf16(std::numeric_limits<float>::infinity()), to_bf16(-std::numeric_limits<float>::infinity()), bf16{0x7f81},
        bf16{0xffff}, bf16{0x7f7f}, bf16{0xff7f}, bf16{0x8000}, bf16{0x0001}}) {
    for (int at = 0; at < 2 * N; ++at) {
      Block<bf16> a(N), b(N);
      for (int i = 0; i < N; ++i) a[i] = b[i] = to_bf16(static_cast<float>(i));
      (at < N ? a[at] : b[at - N]) = x;
      PairCheck check;
      check.see(Pairs::of_rows(a.x, b.x));
      for (int i = 0; i < N; ++i) a[i] = b[i] = bf16{0};
      check.see(Pairs::of_rows(a.x, b.x));  // what was seen once stays seen
      CHECK(check.all_finite() == std::isfinite(to_float(x)), "0x%04x in place %d: finite is %d", x.bits, at,
            check.all_finite());
    }
  }
}

void check_narrow() {
  constexpr int N = Vec<float>::N;
  Block<float> x(2 * N);
  Block<bf16> got(2 * N);
  const auto check = [&] {
    Pairs::narrow(Vec<float>::load(x.x), Vec<float>::load(x.x + N), got.x);
    for (int i = 0; i < 2 * N; ++i) {
      const float read = std::fabs(x[i]) < 0x1p-126f ? std::copysign(0.0f, x[i]) : x[i];
      const bf16 want = to_bf16(read);
      CHECK(got[i].bits == want.bits, "%a is narrowed to 0x%04x, not 0x%04x", static_cast<double>(x[i]), got[i].bits,
            want.bits);
    }
  };
  // Every bf16, half a step behind it, and one fp32 step to either side of that.
  for (uint32_t first = 0; first < 65536; first += 2 * N) {
    for (const uint32_t step : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (int i = 0; i < 2 * N; ++i) {
        x[i] = std::bit_cast<float>((first + static_cast<uint32_t>(i)) << 16 | step);
      }
      check();
    }
  }
}

void check_turn_four() {
  constexpr int N = Vec<float>::N;
  constexpr int64_t stride = 21;
  Block<float> from((N - 1) * stride + 4), row(N);
  for (int64_t i = 0; i < from.count; ++i) from[i] = static_cast<float>(i);
  Vec<float> turned[4];
  Pairs::turn_four(from.x, stride, turned);
  for (int i = 0; i < 4; ++i) {
    turned[i].store(row.x);
    for (int r = 0; r < N; ++r) {
      CHECK(row[r] == from[r * stride + i], "turn_four: number %d of row %d is %g", i, r, static_cast<double>(row[r]));
    }
  }
}

// A product of matrices as PairTile takes them, with rows longer than they must be.
struct Product {
  int64_t rows, K;
  int vecs;
  int64_t lda, ldb, ldc;
  Block<bf16> a;
  Block<uint32_t> b;
  Block<float> c;

  static constexpr int64_t kGap = 3;
  static constexpr float kUntouched = 1234.5f;

  static int64_t padded(int64_t rows) { return round_up_to(rows, PairTile::kRowMultiple); }

  Product(int64_t row_count, int vectors, int64_t depth)
      : rows(row_count),
        K(depth),
        vecs(vectors),
        lda(depth + 2 * kGap),
        ldb(vectors * Vec<float>::N + kGap),
        ldc(vectors * Vec<float>::N + kGap),
        a((padded(row_count) - 1) * lda + depth),
        b((depth / 2 - 1) * ldb + columns()),
        c((padded(row_count) - 1) * ldc + columns()) {
    for (int64_t i = 0; i < a.count; ++i) a[i] = bf16{0x7fc1};
    for (int64_t i = 0; i < b.count; ++i) b[i] = 0x7fc17fc1u;
    for (int64_t i = 0; i < c.count; ++i) c[i] = kUntouched;
  }

  int64_t columns() const { return vecs * Vec<float>::N; }
  bf16 right(int64_t k, int64_t n) const { return bf16{static_cast<uint16_t>(b[k / 2 * ldb + n] >> (k % 2 * 16))}; }
  void set_right(int64_t k, int64_t n, bf16 x) {
    uint32_t& pair = b[k / 2 * ldb + n];
    pair = k % 2 == 0 ? (pair & 0xffff0000u) | x.bits : (pair & 0xffffu) | static_cast<uint32_t>(x.bits) << 16;
  }

  template <Start start>
  void multiply() {
    const PairTile::Session session;
    static_cast<void>(session);
    PairTile::multiply<start>(rows, vecs, K, a.x, lda, reinterpret_cast<const Word<bf16>*>(b.x), ldb, c.x, ldc);
  }
};

template <Start start>
void check_product(int64_t rows, int vecs, int64_t K, Mood mood, Random& random) {
  Product whole(rows, vecs, K);
  const int64_t columns = whole.columns();
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t r = 0; r < rows; ++r) whole.a[r * whole.lda + k] = test::random_bf16(random, mood);
    for (int64_t n = 0; n < columns; ++n) whole.set_right(k, n, test::random_bf16(random, mood));
  }
  for (int64_t r = 0; r < rows && start == Start::from_c; ++r) {
    for (int64_t n = 0; n < columns; ++n) whole.c[r * whole.ldc + n] = test::random_sum(random, mood);
  }
  Block<float> begin(rows * columns);
  const auto begin_at = [&](int64_t r, int64_t n) { return begin[r * columns + n]; };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; ++n)
      begin[r * columns + n] = start == Start::zero ? 0.0f : whole.c[r * whole.ldc + n];
  }
  whole.multiply<start>();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; ++n) {
      float want = begin_at(r, n);
      for (int64_t k = 0; k < K; k += PairTile::kDepth) {
        const auto left = [&](int64_t i) { return to_float(whole.a[r * whole.lda + k + i]); };
        const auto right = [&](int64_t i) { return to_float(whole.right(k + i, n)); };
        want = model_of_one_depth(left, right, want);
      }
      const float got = whole.c[r * whole.ldc + n];
      CHECK(test::same_bits(got, want), "[%d][%d] of %d rows, %d vectors, depth %d, mood %d is %a, not %a", int(r),
            int(n), int(rows), vecs, int(K), int(mood), double(got), double(want));
    }
    for (int64_t n = columns; n < whole.ldc && r * whole.ldc + n < whole.c.count; ++n) {
      CHECK(whole.c[r * whole.ldc + n] == Product::kUntouched, "wrote behind row %d of %d", int(r), int(rows));
    }
  }

  // A row alone, and the right factor as the left one: the same bits.
  const int64_t r = random.below(rows);
  Product alone(1, vecs, K);
  std::copy_n(whole.a.x + r * whole.lda, K, alone.a.x);
  for (int64_t k = 0; k < K; k += 2) std::copy_n(whole.b.x + k / 2 * whole.ldb, columns, alone.b.x + k / 2 * alone.ldb);
  Product swapped(std::min<int64_t>(columns, PairTile::kRows), 1, K);
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t n = 0; n < swapped.rows; ++n) swapped.a[n * swapped.lda + k] = whole.right(k, n);
    for (int64_t n = 0; n < swapped.columns(); ++n) {
      swapped.set_right(k, n, n < rows ? whole.a[n * whole.lda + k] : bf16{0});
    }
  }
  if constexpr (start == Start::from_c) {
    for (int64_t n = 0; n < columns; ++n) alone.c[n] = begin_at(r, n);
    for (int64_t n = 0; n < swapped.rows; ++n) {
      for (int64_t m = 0; m < swapped.columns(); ++m) swapped.c[n * swapped.ldc + m] = m < rows ? begin_at(m, n) : 0.0f;
    }
  }
  alone.multiply<start>();
  swapped.multiply<start>();
  for (int64_t n = 0; n < columns; ++n) {
    CHECK(test::same_bits(alone.c[n], whole.c[r * whole.ldc + n]), "row %d of %d alone is %a, among others %a", int(r),
          int(rows), double(alone.c[n]), double(whole.c[r * whole.ldc + n]));
  }
  for (int64_t m = 0; m < std::min(rows, swapped.columns()); ++m) {
    for (int64_t n = 0; n < swapped.rows; ++n) {
      const float got = swapped.c[n * swapped.ldc + m], want = whole.c[m * whole.ldc + n];
      CHECK(test::same_bits(got, want), "[%d][%d] with the factors swapped is %a, not %a", int(m), int(n), double(got),
            double(want));
    }
  }
}

void check_products() {
  Random random(2);
  int64_t n = 0;
  for (int64_t rows = 1; rows <= PairTile::kRows; ++rows) {
    for (const int vecs : {1, kTileVecs}) {
      for (const int64_t depths : {1, 2, 5}) {
        const Mood mood = kMoods[n++ % static_cast<int64_t>(std::size(kMoods))];
        if (!test::due(n)) continue;
        check_product<Start::zero>(rows, vecs, depths * PairTile::kDepth, mood, random);
        check_product<Start::from_c>(rows, vecs, depths * PairTile::kDepth, mood, random);
      }
    }
  }
}

void test_pairs() {
  check_words();
  check_narrow();
  check_turn_four();
  check_products();
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_ISA_NAMESPACE
