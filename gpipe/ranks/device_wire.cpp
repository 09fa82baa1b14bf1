#include "gpipe/ranks/device_wire.h"

#include <ATen/ops/empty_strided.h>
#include <dlfcn.h>

#include "gpipe/base/checks.h"
#include "gpipe/ranks/parcel_message.h"

namespace gpipe {

// The code is in a library of its own, beside this one, because it needs libraries that a torch without CUDA lacks.
std::unique_ptr<DeviceConnections> connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   std::chrono::milliseconds limit) {
  using Connect = DeviceConnections*(const c10::intrusive_ptr<c10d::Store>&, std::chrono::milliseconds);
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&connect_by_nccl), &here);
  const std::string path(here.dli_fname);
  void* library = dlopen((path.substr(0, path.rfind('/') + 1) + "libgpipe_nccl.so").c_str(), RTLD_NOW);
  auto* connect = library == nullptr ? nullptr : dlsym(library, "gpipe_connect_by_nccl");
  if (connect == nullptr) {
    refuse_argument("nccl is set, but this gpipe was built without NCCL, or this torch has no CUDA (", dlerror(),
                    "); build gpipe with a torch that has CUDA, or leave nccl out");
  }
  return std::unique_ptr<DeviceConnections>(reinterpret_cast<Connect*>(connect)(store, limit));
}

void DeviceLink::send(std::span<const at::Tensor> tensors) {
  if (tensors.empty()) return;
  const auto ready = record_event(device_);
  const c10::OptionalStreamGuard copying(stream_);
  wait(ready, device_);
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
  wire_.transfer(tensors);
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
  wire_.transfer(landing.received());
  landing.scatter();
  for (auto& parcel : parcels) parcel.renew_versions();
  return {record_event(device_)};
}

bool DeviceLink::settle(std::chrono::milliseconds limit) {
  StreamEvent ended;
  {
    const c10::OptionalStreamGuard copying(stream_);
    ended = record_event(device_);
  }
  wait(ended, device_);
  constexpr std::chrono::microseconds kQueryInterval{50};
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!ended->query()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(kQueryInterval);
  }
  return true;
}

}  // namespace gpipe
