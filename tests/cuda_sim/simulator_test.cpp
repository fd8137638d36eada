// The simulator must be able to fail: kernels with one fault each, and what it says of them.
#include "simulator.h"

#include <array>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/primitives.cuh"
#include "testing.h"

namespace attn_ext::cuda {
namespace {

using cuda_sim::Allow;
using cuda_sim::FaultKind;
using cuda_sim::kWarpSize;

// Runs `body` in one block of 64 threads with 1 KB of shared memory, and expects a fault that says `says`.
void expect_fault(const char* name, FaultKind kind, const char* says, const std::function<void()>& body) {
  try {
    cuda_sim::run({name, 1, 64, 1024}, body);
  } catch (const cuda_sim::Fault& fault) {
    CHECK(fault.kind == kind, "%s: %s instead of %s: %s", name, cuda_sim::name_of(fault.kind), cuda_sim::name_of(kind),
          fault.what());
    CHECK(std::string(fault.what()).find(says) != std::string::npos, "%s: '%s' does not say '%s'", name, fault.what(),
          says);
    return;
  }
  attn_ext::test::fail(__FILE__, __LINE__, "%s: no fault", name);
}

float* shared() { return reinterpret_cast<float*>(shared_memory()); }

// Every thread passes a number to its neighbour of the next warp.
void pass_on(bool with_barrier, float* out) {
  const int t = thread_index();
  store_shared(shared() + t, static_cast<float>(t));
  if (with_barrier) sync_block();
  store_global(out + t, load_shared(shared() + (t + kWarpSize) % 64));
}

TEST(simulator, runs_what_is_right) {
  std::array<float, 64> out{};
  const Allow allow(out.data(), sizeof out, Allow::Access::read_write);
  cuda_sim::reset_statistics(true);
  cuda_sim::run({"right", 3, 64, 1024}, [&] { pass_on(true, out.data()); });
  for (int t = 0; t < 64; ++t) CHECK(out[static_cast<size_t>(t)] == static_cast<float>((t + 32) % 64), "thread %d", t);
  const cuda_sim::Statistics s = cuda_sim::statistics();
  CHECK(s.launches == 1 && s.blocks == 3 && s.global_stores == 192 && s.global_loads == 0, "counted %ld, %ld, %ld, %ld",
        long(s.launches), long(s.blocks), long(s.global_stores), long(s.global_loads));
  CHECK(s.shared_accesses == 3 * 4 && s.bank_conflicts == 0, "counted %ld accesses, %ld conflicts",
        long(s.shared_accesses), long(s.bank_conflicts));
}

TEST(simulator, missing_barrier) {
  std::array<float, 64> out{};
  const Allow allow(out.data(), sizeof out, Allow::Access::read_write);
  // Whichever runs first: the reader finds nothing written, or the writer's number without a barrier.
  for (int attempt = 0; attempt < 4; ++attempt) {
    try {
      cuda_sim::run({"no barrier", attempt + 1, 64, 1024}, [&] { pass_on(false, out.data()); });
      attn_ext::test::fail(__FILE__, __LINE__, "a missing barrier was not seen");
    } catch (const cuda_sim::Fault& fault) {
      CHECK(fault.kind == FaultKind::race || fault.kind == FaultKind::uninitialized, "%s", fault.what());
    }
  }
  expect_fault("two writers", FaultKind::race, "wrote with no barrier in between",
               [] { store_shared(shared(), 1.0f); });
  expect_fault("read, then written", FaultKind::race, "read with no barrier in between", [] {
    if (thread_index() == 0) store_shared(shared(), 1.0f);
    sync_block();
    const float x = load_shared(shared());
    if (thread_index() == 40) store_shared(shared(), x + 1);
  });
  expect_fault("read by a lane, written by another", FaultKind::race, "with no barrier in between", [] {
    if (thread_index() == 0) store_shared(shared(), 1.0f);
    sync_block();
    if (thread_index() < 3) store_shared(shared() + 1 + thread_index(), load_shared(shared()));
    if (thread_index() == 1) store_shared(shared(), 2.0f);
  });
}

TEST(simulator, exchanges) {
  std::array<float, 64> out{};
  const Allow allow(out.data(), sizeof out, Allow::Access::read_write);
  expect_fault("an exchange is no fence", FaultKind::race, "with no barrier in between", [&] {
    const int t = thread_index();
    store_shared(shared() + t, static_cast<float>(t));
    shuffle_xor(0, 1);
    store_global(out.data() + t, load_shared(shared() + (t ^ 5)));
  });
  for (int mask : {1, 2, 4, 8, 16}) {
    cuda_sim::run({"exchange", 1, 64, 0}, [&] {
      const double got = shuffle_xor(static_cast<double>(thread_index()), mask);
      store_global(out.data() + thread_index(), static_cast<float>(got));
    });
    for (int t = 0; t < 64; ++t) CHECK(out[static_cast<size_t>(t)] == static_cast<float>(t ^ mask), "lane %d", t);
  }
}

// Every thread copies 16 bytes, and reads a number that its neighbour of the next warp copied.
void copy_and_read(const float* from, float* out, bool with_wait, bool with_barrier) {
  const int t = thread_index();
  copy_async(shared() + t * 4, from + t * 4, t == 5 ? 4 : 16);
  commit_copies();
  if (with_wait) wait_copies<0>();
  if (with_barrier) sync_block();
  store_global(out + t, load_shared(shared() + (t + kWarpSize) % 64 * 4 + 3));
}

TEST(simulator, copies_land_where_they_are_waited_for) {
  alignas(16) std::array<float, 256> from{};
  for (size_t n = 0; n < from.size(); ++n) from[n] = static_cast<float>(n);
  std::array<float, 64> out{};
  const Allow allow_from(from.data(), sizeof from, Allow::Access::read);
  const Allow allow_out(out.data(), sizeof out, Allow::Access::read_write);
  cuda_sim::run({"copies", 2, 64, 1024}, [&] { copy_and_read(from.data(), out.data(), true, true); });
  for (int t = 0; t < 64; ++t) {
    const int neighbour = (t + 32) % 64;
    const float want = neighbour == 5 ? 0.0f : static_cast<float>(neighbour * 4 + 3);  // 5 copied 4 bytes, 12 are zeros
    CHECK(out[static_cast<size_t>(t)] == want, "thread %d: %g, not %g", t, out[static_cast<size_t>(t)], want);
  }
  expect_fault("missing wait", FaultKind::race, "is on its way to that nobody waited for",
               [&] { copy_and_read(from.data(), out.data(), false, true); });
  for (int attempt = 0; attempt < 4; ++attempt) {  // whichever runs first, as above
    try {
      cuda_sim::run({"a wait is no barrier", attempt + 1, 64, 1024},
                    [&] { copy_and_read(from.data(), out.data(), true, false); });
      attn_ext::test::fail(__FILE__, __LINE__, "a missing barrier was not seen");
    } catch (const cuda_sim::Fault& fault) {
      CHECK(fault.kind == FaultKind::race || fault.kind == FaultKind::uninitialized, "%s", fault.what());
    }
  }
  expect_fault("the older group only", FaultKind::race, "is on its way to that nobody waited for", [&] {
    if (thread_index() != 0) return;
    for (int n = 0; n < 2; ++n) {
      copy_async(shared() + n * 4, from.data() + n * 4, 16);
      commit_copies();
    }
    wait_copies<1>();
    if (load_shared(shared() + 1) != 1.0f) throw std::logic_error("the older group has not landed");
    load_shared(shared() + 4);
  });
  expect_fault("a group that was not closed", FaultKind::race, "is on its way to that nobody waited for", [&] {
    if (thread_index() != 0) return;
    copy_async(shared(), from.data(), 16);
    wait_copies<0>();
    load_shared(shared());
  });
  expect_fault("copied over what others read", FaultKind::race, "read with no barrier in between", [&] {
    if (thread_index() == 0) store_shared(shared(), 1.0f);
    sync_block();
    load_shared(shared());
    if (thread_index() == 63) copy_async(shared(), from.data(), 16);
  });
  expect_fault("from beyond the tensor", FaultKind::out_of_bounds, "reads 16 bytes of global memory",
               [&] { copy_async(shared() + thread_index() * 4, from.data() + 4 + thread_index() * 4, 16); });
  expect_fault("to an odd address", FaultKind::misaligned, "16 bytes of shared memory at offset 4",
               [&] { copy_async(shared() + 1, from.data(), 16); });
  expect_fault("from an odd address", FaultKind::misaligned, "no multiple of 16",
               [&] { copy_async(shared(), from.data() + 1, 16); });
}

// What tensor cores take and give, element by element.
template <class Storage>
void check_matrix_product() {
  constexpr int kRows = 16, kDepth = 16, kColumns = 8;
  std::array<float, kRows * kDepth> a{};
  std::array<float, kDepth * kColumns> b{};
  std::array<float, kRows * kColumns> got{};
  attn_ext::test::Random random(7);
  for (float& x : a) x = static_cast<float>(random.below(17)) - 8;
  for (float& x : b) x = static_cast<float>(random.below(17)) - 8;
  const Allow allow(got.data(), sizeof got, Allow::Access::read_write);
  cuda_sim::run({"product", 1, 32, 2048}, [&] {
    const int lane = thread_index();
    auto* left = reinterpret_cast<Storage*>(shared_memory());  // 16 × 16, row by row
    auto* right = left + kRows * kDepth;                       // 16 × 8, padded to rows of 16
    for (int n = lane; n < kRows * kDepth; n += kWarpSize) {
      const auto at = static_cast<size_t>(n);
      store_shared(left + n, convert_to<Storage>(a[at]));
      const float of_b = n % 16 < kColumns ? b[at / 16 * kColumns + at % 16] : 0.0f;
      store_shared(right + n, convert_to<Storage>(of_b));
    }
    sync_block();
    const auto a_parts = load_matrices<false>(left + lane % 16 * 16 + lane / 16 * 8);
    const auto b_parts = load_matrices<true>(right + lane % 16 * 16 + lane / 16 * 8);
    Four<float> sums{{1, 2, 3, 4}};
    multiply_matrices<Storage>(sums, a_parts, {{b_parts.x[0], b_parts.x[1]}});
    for (int n = 0; n < 4; ++n) {
      const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
      store_global(got.data() + row * kColumns + column, sums.x[n] - static_cast<float>(n + 1));
    }
  });
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t column = 0; column < kColumns; ++column) {
      float want = 0;
      for (size_t k = 0; k < kDepth; ++k) want += a[row * kDepth + k] * b[k * kColumns + column];
      CHECK(got[row * kColumns + column] == want, "%zu, %zu: %g, not %g", row, column, got[row * kColumns + column],
            want);
    }
  }
}

TEST(simulator, matrix_products) {
  check_matrix_product<bf16>();
  check_matrix_product<f16>();
  expect_fault("half a warp loads", FaultKind::divergent_warp, "waits for its warp", [] {
    store_shared(shared() + thread_index(), 0.0f);
    sync_block();
    if (thread_index() % 2 == 0) load_matrices<false>(shared());
  });
  expect_fault("half a warp multiplies", FaultKind::divergent_warp, "waits for its warp", [] {
    Four<float> sums{};
    if (thread_index() < 16) multiply_matrices<bf16>(sums, {}, {});
  });
}

TEST(simulator, uninitialized) {
  expect_fault("nothing there", FaultKind::uninitialized, "reads shared byte 8, which nothing wrote",
               [] { load_shared(shared() + 2); });
}

TEST(simulator, out_of_bounds) {
  std::array<float, 8> memory{};
  const Allow allow(memory.data(), sizeof memory, Allow::Access::read_write);
  const std::array<float, 8> constant{};
  const Allow read_only(constant.data(), sizeof constant, Allow::Access::read);
  expect_fault("past the end", FaultKind::out_of_bounds, "writes 4 bytes of global memory",
               [&] { store_global(memory.data() + thread_index(), 0.0f); });
  expect_fault("before the start", FaultKind::out_of_bounds, "reads 4 bytes of global memory",
               [&] { load_global(memory.data() - 1); });
  expect_fault("into an input", FaultKind::out_of_bounds, "writes 4 bytes of global memory",
               [&] { store_global(const_cast<float*>(constant.data()), 1.0f); });
  expect_fault("shared memory", FaultKind::out_of_bounds, "shared bytes 1024 … 1027 of 1024",
               [] { store_shared(shared() + 256, 0.0f); });
}

TEST(simulator, misaligned) {
  alignas(8) std::array<float, 8> memory{};
  const Allow allow(memory.data(), sizeof memory, Allow::Access::read_write);
  expect_fault("global", FaultKind::misaligned, "no multiple",
               [&] { load_global(reinterpret_cast<const double*>(memory.data() + 1)); });
  expect_fault("shared", FaultKind::misaligned, "8 bytes of shared memory at offset 4",
               [] { store_shared(reinterpret_cast<double*>(shared() + 1), 0.0); });
}

TEST(simulator, divergent_barrier) {
  expect_fault("one warp leaves", FaultKind::divergent_barrier, "is at the end of the kernel", [] {
    if (thread_index() >= kWarpSize) return;
    sync_block();
  });
  expect_fault("two barriers", FaultKind::divergent_barrier, "waits at the barrier of simulator_test.cpp", [] {
    if (thread_index() < kWarpSize) {
      sync_block();
    } else {
      sync_block();
    }
  });
}

TEST(simulator, divergent_warp) {
  expect_fault("half a warp", FaultKind::divergent_warp, "waits for its warp at simulator_test.cpp", [] {
    if (thread_index() % 2 == 0) shuffle_xor(1, 2);
  });
  expect_fault("two exchanges", FaultKind::divergent_warp, "waits for its warp at simulator_test.cpp", [] {
    if (thread_index() % 2 == 0) {
      shuffle_xor(1, 2);
    } else {
      shuffle_xor(1, 2);
    }
  });
}

TEST(simulator, bank_conflicts) {
  const auto conflicts = [](int stride) {
    cuda_sim::reset_statistics(true);
    cuda_sim::run({"strided", 1, 32, 32 * 32 * 4}, [&] { store_shared(shared() + thread_index() * stride, 1.0f); });
    return cuda_sim::statistics().bank_conflicts;
  };
  CHECK(conflicts(1) == 0 && conflicts(3) == 0, "odd strides: %ld, %ld", long(conflicts(1)), long(conflicts(3)));
  CHECK(conflicts(2) == 1 && conflicts(8) == 7 && conflicts(32) == 31, "even strides: %ld, %ld, %ld",
        long(conflicts(2)), long(conflicts(8)), long(conflicts(32)));
  cuda_sim::reset_statistics(true);
  cuda_sim::run({"one word for all", 1, 32, 256}, [&] {
    if (thread_index() == 0) store_shared(shared(), 1.0f);
    sync_block();
    load_shared(shared());
  });
  CHECK(cuda_sim::statistics().bank_conflicts == 0, "a word that all lanes read");
  struct alignas(16) Four {
    float x[4];
  };
  cuda_sim::reset_statistics(true);
  cuda_sim::run({"vectors", 1, 32, 512 * 2},
                [&] { store_shared(reinterpret_cast<Four*>(shared()) + thread_index(), Four{}); });
  CHECK(cuda_sim::statistics().shared_accesses == 4 && cuda_sim::statistics().bank_conflicts == 0,
        "16 bytes a lane: %ld accesses, %ld conflicts", long(cuda_sim::statistics().shared_accesses),
        long(cuda_sim::statistics().bank_conflicts));
}

TEST(simulator, exceptions_come_out_and_leave_it_usable) {
  try {
    cuda_sim::run({"throws", 2, 64, 0}, [] {
      if (thread_index() == 37) throw std::length_error("of thread 37");
      sync_block();
    });
    attn_ext::test::fail(__FILE__, __LINE__, "an exception was lost");
  } catch (const std::length_error& error) {
    CHECK(std::string(error.what()) == "of thread 37", "%s", error.what());
  }
  int64_t ran = 0;
  cuda_sim::run({"afterwards", 2, 64, 0}, [&] { ++ran; });
  CHECK(ran == 128, "%ld threads ran afterwards", long(ran));
}

TEST(simulator, bad_launches) {
  for (const auto& [blocks, threads] : std::vector<std::array<int64_t, 2>>{{0, 32}, {1, 0}, {1, 33}, {1, 2048}}) {
    try {
      cuda_sim::run({"launch", blocks, static_cast<int>(threads), 0}, [] {});
      attn_ext::test::fail(__FILE__, __LINE__, "%ld blocks of %ld threads ran", long(blocks), long(threads));
    } catch (const cuda_sim::Fault& fault) {
      CHECK(fault.kind == FaultKind::bad_launch, "%s", fault.what());
    }
  }
}

}  // namespace
}  // namespace attn_ext::cuda
