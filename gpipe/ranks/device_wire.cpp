#include "gpipe/ranks/device_wire.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include "gpipe/base/checks.h"
#include "gpipe/ranks/transport.h"

namespace gpipe {

namespace {

template <typename Function>
auto or_connection_error(Function function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw ConnectionError(error.what_without_backtrace());
  } catch (const std::exception& error) {  // of the function that joins
    throw ConnectionError(error.what());
  }
}

}  // namespace

DeviceGroup DeviceConnections::join(const std::string& name, int rank, int size) {
  auto group = or_connection_error([&] { return join_(name, rank, size); });
  MutexLock lock(mutex_);
  if (is_aborted_) throw ConnectionError("the connections were closed");
  if (group) groups_.push_back(group);
  return group;
}

// All at once: ending one communicator waits for its device, where another's kernels may wait for the other rank.
void DeviceConnections::abort() noexcept {
  std::vector<std::thread> threads;
  MutexLock lock(mutex_);
  if (std::exchange(is_aborted_, true)) return;
  for (const auto& group : groups_) {
    threads.emplace_back([&group] {
      try {
        group->abort();
      } catch (const std::exception&) {  // the process ends soon
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

DeviceLink::DeviceLink(DeviceGroup group, c10::Device device, const std::optional<c10::Stream>& stream)
    : group_(std::move(group)), device_(device), stream_(stream) {
  or_connection_error([&] { group_->eagerConnectSingleDevice(device); });
  transfer(std::vector{at::zeros({1}, at::TensorOptions(at::kByte).device(device))});  // makes the connection
}

// One group of operations, so that the device runs one kernel for all tensors, on a stream of the group's own.
void DeviceLink::transfer(std::span<const at::Tensor> tensors) {
  const at::NoGradGuard no_grad;
  or_connection_error([&] {
    group_->startCoalescing();
    try {
      for (const auto& tensor : tensors) {
        if (tensor.numel() == 0) continue;
        std::vector<at::Tensor> bytes{tensor.as_strided({tensor.numel()}, {1}).view(at::kByte)};
        group_->getRank() == kSender ? group_->send(bytes, kReceiver, /*tag=*/0)
                                     : group_->recv(bytes, kSender, /*tag=*/0);
      }
    } catch (...) {
      group_->endCoalescing();  // or the group keeps collecting the operations of this thread
      throw;
    }
    if (const auto work = group_->endCoalescing()) work->blockCurrentStream();
  });
}

void DeviceLink::send(std::span<const at::Tensor> tensors) {
  if (tensors.empty()) return;
  const auto ready = record_event(device_);
  const c10::OptionalStreamGuard copying(stream_);
  wait(ready, device_);
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
  transfer(tensors);
}

StreamEvents DeviceLink::receive(std::vector<Parcel>& parcels) {
  const c10::OptionalStreamGuard copying(stream_);
  Landing landing;
  for (auto& parcel : parcels) {
    for (auto& tensor : parcel.tensors) {
      if (!tensor.defined() || !tensor.is_meta()) continue;
      tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
      landing.add(tensor);
    }
  }
  if (landing.received().empty()) return {};
  transfer(landing.received());
  landing.scatter();
  for (auto& parcel : parcels) parcel.renew_versions();
  return {record_event(device_)};
}

StreamEvent DeviceLink::end() {
  const c10::OptionalStreamGuard copying(stream_);
  return record_event(device_);
}

}  // namespace gpipe
