#include "gpipe/checks.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <stdexcept>
#include <string>

#include "absl/strings/str_join.h"
#include "gpipe/schedule/program.h"

namespace gpipe {
namespace {

int device_count(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  // On a machine without GPUs, PyTorch's compiler registers a guard that claims one.
  if (type == c10::kCUDA && !at::globalContext().hasCUDA()) return 0;
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

}  // namespace

void refuse_argument(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

void check_balance(const std::vector<std::int64_t>& balance, std::size_t layers) {
  if (layers == 0) refuse_argument("the model has no layers");
  if (balance.empty()) {
    refuse_argument("balance is empty; give the number of layers of each stage, such as {" + std::to_string(layers) +
                    "} for one stage");
  }
  if (const auto sum = static_cast<std::size_t>(stage_ends(balance).back()); sum != layers) {
    refuse_argument("balance {" + absl::StrJoin(balance, ", ") + "} sums to " + std::to_string(sum) +
                    ", but the model has " + std::to_string(layers) + " layers");
  }
}

void check_chunks(std::int64_t chunks) {
  if (chunks <= 0) refuse_argument("chunks must be positive, but is " + std::to_string(chunks));
}

std::vector<torch::Device> place_workers(const std::vector<torch::Device>& wanted, std::size_t workers) {
  auto devices = wanted;
  if (devices.empty()) {
    const int gpus = device_count(torch::kCUDA);
    if (gpus == 0) return std::vector<torch::Device>(workers, torch::kCPU);
    for (int i = 0; i < gpus; ++i) devices.emplace_back(torch::kCUDA, static_cast<c10::DeviceIndex>(i));
  }
  if (devices.size() < workers) {
    throw std::out_of_range("[gpipe] too few devices: " + std::to_string(workers) + " workers, but " +
                            std::to_string(devices.size()) + " devices; a device may be given more than once");
  }
  devices.erase(devices.begin() + static_cast<std::ptrdiff_t>(workers), devices.end());
  for (auto& device : devices) {
    if (device.is_cpu()) {
      device = torch::kCPU;
      continue;
    }
    const int count = device.is_meta() ? 0 : device_count(device.type());
    if (!device.has_index()) device.set_index(0);
    if (device.index() >= count) {
      throw std::out_of_range("[gpipe] device " + device.str() + " does not exist: this process sees " +
                              std::to_string(count) + " " + c10::DeviceTypeName(device.type()) + " device" +
                              (count == 1 ? "" : "s") + "; choose an existing one");
    }
  }
  return devices;
}

}  // namespace gpipe
