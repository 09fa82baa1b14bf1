// The library that connect_by_nccl() loads.
#define USE_C10D_NCCL
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "gpipe/base/mutex.h"
#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/device_wire.h"

namespace gpipe {
namespace {

using Group = c10d::ProcessGroupNCCL;

constexpr int kSender = 0;
constexpr int kReceiver = 1;

template <typename Function>
void ignore_errors(Function function) noexcept {
  try {
    function();
  } catch (const std::exception&) {
  }
}

template <typename Function>
void or_connection_error(Function function) {
  try {
    function();
  } catch (const c10::Error& error) {
    throw ConnectionError(error.what_without_backtrace());
  }
}

class NcclWire : public DeviceWire {
 public:
  NcclWire(c10::intrusive_ptr<Group> group, bool sends) : group_(std::move(group)), sends_(sends) {}

  // One group of operations, so that the device runs one kernel for all tensors, on a stream of the group's own.
  void transfer(std::span<const at::Tensor> tensors) override {
    const at::NoGradGuard no_grad;
    or_connection_error([&] {
      group_->startCoalescing();
      try {
        for (const auto& tensor : tensors) {
          if (tensor.numel() == 0) continue;
          std::vector<at::Tensor> bytes{tensor.as_strided({tensor.numel()}, {1}).view(at::kByte)};
          sends_ ? group_->send(bytes, kReceiver, /*tag=*/0) : group_->recv(bytes, kSender, /*tag=*/0);
        }
      } catch (...) {
        ignore_errors([&] { group_->endCoalescing(); });  // or NCCL keeps collecting the operations of this thread
        throw;
      }
      if (const auto work = group_->endCoalescing()) work->blockCurrentStream();
    });
  }

  /// Makes the communicator, and its connections by a first transfer: both block the host until the other end comes.
  void connect(c10::Device device) {
    or_connection_error([&] {
      group_->eagerConnectSingleDevice(device);
      transfer(std::vector{at::zeros({1}, at::TensorOptions(at::kByte).device(device))});
    });
  }

  void abort() noexcept {
    ignore_errors([&] { group_->abort(); });  // the process ends soon
  }

 private:
  const c10::intrusive_ptr<Group> group_;
  const bool sends_;
};

class NcclConnections : public DeviceConnections {
 public:
  NcclConnections(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit)
      : store_(std::move(store)), limit_(limit) {}
  ~NcclConnections() override { abort(); }

  c10::DeviceType device_type() const override { return c10::kCUDA; }

  DeviceWire& connect(const std::string& name, bool sends, c10::Device device) override {
    NcclWire* wire = nullptr;
    auto group = make(name, sends ? kSender : kReceiver, /*size=*/2);
    {
      MutexLock lock(mutex_);
      if (aborted_) throw ConnectionError("the connections were closed");
      wire = wires_.emplace_back(std::make_unique<NcclWire>(std::move(group), sends)).get();
    }
    wire->connect(device);
    return *wire;
  }

  c10::intrusive_ptr<c10d::Backend> group(const std::string& name, int rank, int size) override {
    auto group = make(name, rank, size);
    MutexLock lock(mutex_);
    if (aborted_) throw ConnectionError("the connections were closed");
    groups_.push_back(group);
    return group;
  }

  // All at once: ending one communicator waits for its device, where another's kernels may wait for the other rank.
  void abort() noexcept override {
    std::vector<std::thread> threads;
    MutexLock lock(mutex_);
    if (std::exchange(aborted_, true)) return;
    for (const auto& wire : wires_) threads.emplace_back([&wire] { wire->abort(); });
    for (const auto& group : groups_) threads.emplace_back([&group] { ignore_errors([&] { group->abort(); }); });
    for (auto& thread : threads) thread.join();
  }

 private:
  c10::intrusive_ptr<Group> make(const std::string& name, int rank, int size) {
    // The streams come from another pool than a pipeline's, so that no computation waits behind a transfer.
    const auto options = Group::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = limit_;
    options->group_name = name;
    options->config.blocking = 1;
    c10::intrusive_ptr<Group> group;
    or_connection_error([&] {
      group = c10::make_intrusive<Group>(c10::make_intrusive<c10d::PrefixStore>(name, store_), rank, size, options);
    });
    return group;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds limit_;
  Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<NcclWire>> wires_ ABSL_GUARDED_BY(mutex_);
  std::vector<c10::intrusive_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace gpipe

// The groups' threads use a connection of their own to the store, because a wait there blocks it.
extern "C" gpipe::DeviceConnections* gpipe_connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                           std::chrono::milliseconds limit) {
  return new gpipe::NcclConnections(c10::make_intrusive<c10d::PrefixStore>("nccl", store->clone()), limit);
}
