// Scratch memory of one worker: a single aligned block, carved into arrays. The thread keeps its last block for the
// next call, so that a call costs no page faults; a block over 8 MiB goes back to the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace attn_ext::cpu {

inline constexpr size_t kCacheLine = 64;

inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A block of malloc's, given back when its owner ends.
struct ScratchBlock {
  void* data = nullptr;
  size_t bytes = 0;

  ScratchBlock() = default;
  ScratchBlock(const ScratchBlock&) = delete;
  ScratchBlock& operator=(const ScratchBlock&) = delete;
  ~ScratchBlock() { std::free(data); }

  void swap(ScratchBlock& other) {
    std::swap(data, other.data);
    std::swap(bytes, other.bytes);
  }
};

class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    bytes = round_up(bytes, kCacheLine);
    block_.swap(kept());  // a nested Scratch on this thread finds none and takes its own
    if (block_.bytes >= bytes) return;
    std::free(block_.data);
    block_.data = std::aligned_alloc(kCacheLine, bytes);
    block_.bytes = block_.data == nullptr ? 0 : bytes;
    if (block_.data == nullptr) throw std::bad_alloc();
  }
  ~Scratch() {
    if (block_.bytes <= kKeep) block_.swap(kept());
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return static_cast<char*>(block_.data); }

 private:
  static constexpr size_t kKeep = size_t{8} << 20;

  static ScratchBlock& kept() {
    static thread_local ScratchBlock block;
    return block;
  }

  ScratchBlock block_;
};

// Counts the bytes that a layout needs (base == nullptr), then hands out its arrays: the same code does both.
class Carver {
 public:
  explicit Carver(char* base = nullptr) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(static_cast<size_t>(count) * sizeof(T), kCacheLine);
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace attn_ext::cpu
