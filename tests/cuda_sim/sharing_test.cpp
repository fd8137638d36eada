// Which calls share the keys of their rows out among blocks, and with how much memory. (What comes of it tests/cpp compares:
// the group segments with the definition, the group rows with calls that share nothing out.)
#include "cuda/kernels.h"
#include "problem.h"
#include "simulator.h"
#include "testing.h"

namespace attn_ext::test {
namespace {

struct Shared {
  int64_t bytes = 0;     // of the workspace
  int64_t launches = 0;  // two where there is something to merge
};

Shared shared_of(const Case& c, int64_t ring = 0) {
  const Problem problem(c);
  ForwardParams p;
  static_cast<AttentionParams&>(p) = problem.params();
  p.layout.ring = ring;
  cuda_sim::reset_statistics();
  if (ring == 0) run_forward(problem);
  return {cuda::forward_workspace_bytes(p), cuda_sim::statistics().launches};
}

TEST(sharing, few_rows_of_many_keys) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    const int64_t number = dtype == DType::float64 ? 8 : 4;
    Case c{.name = "shared", .dtype = dtype, .B1 = 2, .Hq = 8, .Hkv = 2, .Lq = 4, .Lk = 2050, .D = 4, .Dv = 6};
    const int64_t three = 3 * 2 * 8 * 4 * (6 + 2) * number;  // places, and a row's columns, max and sum
    CHECK(shared_of(c).bytes == three && shared_of(c).launches == 2, "%ld bytes", long(shared_of(c).bytes));
    CHECK(shared_of(c, 2050).bytes == three / 3 * 4, "a ring: %ld bytes", long(shared_of(c, 2050).bytes));
    c.Lk = 1024;  // one segment
    CHECK(shared_of(c).bytes == 0 && shared_of(c).launches == 1, "one segment: %ld bytes", long(shared_of(c).bytes));
    c.Lk = 1025;
    CHECK(shared_of(c).bytes == three / 3 * 2, "two segments: %ld bytes", long(shared_of(c).bytes));
    c.Lq = 5;  // 20 rows
    CHECK(shared_of(c).bytes == 0 && shared_of(c).launches == 1, "more rows: %ld bytes", long(shared_of(c).bytes));
    const Case packed{.name = "packed", .dtype = dtype, .cu_q = {0, 1, 2}, .cu_k = {0, 1100, 1110}};
    CHECK(shared_of(packed).bytes == 0 && shared_of(packed).launches == 1, "packed");
  }
}

// At most 64 segments.
TEST(sharing, segments_grow_with_the_keys) {
  int64_t largest = 0;
  for (const int64_t Lk : {1, 1024, 1025, 65536, 65537, 131072, 131073, 1 << 30}) {
    const int64_t keys = cuda::segment_keys_of(Lk);
    CHECK(keys % 1024 == 0 && keys >= largest && 64 * keys >= Lk, "%ld keys of %ld", long(keys), long(Lk));
    CHECK(Lk > 65536 || keys == 1024, "%ld keys of %ld", long(keys), long(Lk));
    largest = keys;
  }
}

}  // namespace
}  // namespace attn_ext::test
