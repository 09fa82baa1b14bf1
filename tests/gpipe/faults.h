// Faults on demand: exceptions, a fuse that throws them, and an allocator with such a fuse.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <mutex>
#include <new>
#include <ostream>
#include <stdexcept>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace gpipe {

/// A type of exception, and a function that throws it.
struct Exception {
  const std::type_info& type;
  void (*raise)();
};

struct Injected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline const std::vector<Exception> kOutOfMemory = {
    {typeid(std::bad_alloc), [] { throw std::bad_alloc(); }},
    {typeid(c10::OutOfMemoryError), [] { TORCH_CHECK_WITH(OutOfMemoryError, false, "injected"); }},
};
inline const std::vector<Exception> kOfLayers = {
    {typeid(Injected), [] { throw Injected("injected"); }},
    {typeid(c10::Error), [] { TORCH_CHECK(false, "injected"); }},
};
// In a backward, PyTorch's engine supports only std::exception.
inline const std::vector<Exception> kOfLayersInForward = {kOfLayers[0], kOfLayers[1], {typeid(int), [] { throw 7; }}};

/// Counts its passes, on any thread. When armed, it throws in one of them, or in that one and all later ones.
class Fuse {
 public:
  void arm(const Exception& exception, int time, bool for_good) {
    exception_ = &exception;
    time_ = time;
    for_good_ = for_good;
    passed_ = 0;
    blown_ = false;
  }
  void count() { passed_ = 0; }
  void disarm() { time_ = std::numeric_limits<int>::max(); }
  void pass() {
    const int time = ++passed_;
    if (time != time_ && !(for_good_ && time > time_)) return;
    blown_ = true;
    exception_->raise();
  }
  int passed() const { return passed_; }
  bool blown() const { return blown_; }

 private:
  const Exception* exception_ = nullptr;
  int time_ = std::numeric_limits<int>::max();
  bool for_good_ = false;
  std::atomic<int> passed_ = 0;
  std::atomic<bool> blown_ = false;
};

/// Wraps the CPU's allocator: counts the live blocks and passes a fuse in each allocation. PyTorch may free a raw block
/// through another allocator than the one that made it, so blocks are identified by their addresses.
class FaultyAllocator : public c10::Allocator {
 public:
  /// Never destroyed, because tensors may outlive every other object.
  static FaultyAllocator& instance() {
    static auto* const it = new FaultyAllocator();
    return *it;
  }

  void install() {
    wrapped_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this);
  }
  void remove() { c10::SetCPUAllocator(wrapped_); }

  struct Live {
    std::size_t blocks = 0;
    std::size_t bytes = 0;
    friend bool operator==(const Live&, const Live&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Live& live) {
      return out << live.bytes << " bytes in " << live.blocks << " blocks";
    }
  };
  Live live() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {sizes_.size(), bytes_};
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    fuse.pass();
    void* data = wrapped_->raw_allocate(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (data != nullptr && sizes_.emplace(data, bytes).second) bytes_ += bytes;
    return {data, data, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { instance().free(data); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  Fuse fuse;

 private:
  void free(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = sizes_.find(data); found != sizes_.end()) {
        bytes_ -= found->second;
        sizes_.erase(found);
      }
    }
    wrapped_->raw_deallocate(data);
  }

  c10::Allocator* wrapped_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
  std::size_t bytes_ = 0;
};

}  // namespace gpipe
