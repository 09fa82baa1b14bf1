#include "gpipe/assembly/workers.h"

#include <ATen/Context.h>

#include <algorithm>
#include <stdexcept>

#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"
#include "gpipe/schedule/auto_schedule.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

int device_count(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  // On a machine without GPUs, PyTorch's compiler registers a guard that claims one.
  if (type == c10::kCUDA && !at::globalContext().hasCUDA()) return 0;
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

/// Returns a device per worker: the first of `devices`; if none are given, the GPUs from `first_gpu` on, else the CPU.
std::vector<torch::Device> place_workers(std::vector<torch::Device> devices, std::size_t workers,
                                         std::size_t first_gpu) {
  if (devices.empty()) {
    const auto gpus = static_cast<std::size_t>(device_count(torch::kCUDA));
    if (gpus == 0) return std::vector<torch::Device>(workers, torch::kCPU);
    for (auto i = first_gpu; i < gpus; ++i) devices.emplace_back(torch::kCUDA, static_cast<c10::DeviceIndex>(i));
  }
  if (devices.size() < workers) {
    throw std::out_of_range(absl::StrCat("[gpipe] too few devices: ", workers, " workers, but ", devices.size(),
                                         " devices; a device may be given more than once"));
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
      throw std::out_of_range(absl::StrCat("[gpipe] device ", device.str(), " does not exist: this process sees ",
                                           count, " ", c10::DeviceTypeName(device.type()), " device",
                                           count == 1 ? "" : "s", "; choose an existing one"));
    }
  }
  return devices;
}

/// Returns the number of stages per worker. Default: one, or for a schedule that needs loops a worker per given device.
int stages_per_worker(const GPipeOptions& options, int stages) {
  const auto devices = static_cast<int>(options.devices().size());
  const bool is_default = options.stages_per_worker() == 1 && options.placement().empty() && !options.ranks() &&
                          !has_lists(options.schedule());
  if (!is_default || devices == 0 || stages % devices != 0) return options.stages_per_worker();
  const bool loops = options.schedule() == kAnySchedule || schedule_rule(options.schedule()).loops;
  return loops ? stages / devices : 1;
}

ScheduleSource source_of_schedules(const GPipeOptions& options, int stages) {
  if (options.schedule_function() && options.schedule() != kFillAndDrain) {
    refuse_argument("schedule ('", options.schedule(),
                    "') and schedule_function exclude each other; set only one of them");
  }
  const bool is_auto = options.schedule() == kAnySchedule;
  auto source = schedule_source(is_auto ? kFillAndDrain : options.schedule(), stages,
                                stages_per_worker(options, stages), options.placement());
  if (is_auto) source.make = measuring_schedule;
  if (options.schedule_function()) source.make = options.schedule_function();
  return source;
}

/// Returns the rank of each worker.
std::vector<int> place_ranks(const GPipeOptions& options, std::size_t workers) {
  const auto& ranks = options.ranks();
  if (!ranks) return std::vector<int>(workers, 0);
  const auto& mesh = ranks->mesh();
  if (workers < static_cast<std::size_t>(mesh.positions)) {
    refuse_argument("the pipeline has ", workers, " workers, but ", (mesh.replicas == 1 ? "the job" : "each replica"),
                    " has ", mesh.positions, " ranks; give each rank at least one worker");
  }
  return mesh.ranks_of_workers(static_cast<int>(workers), ranks->replica());
}

/// Returns the number of GPUs that earlier ranks on this host use if no devices are given. `of_workers`: their ranks.
std::size_t gpus_of_earlier_ranks(const GPipeOptions& options, const std::vector<int>& of_workers) {
  const auto& ranks = options.ranks();
  if (!ranks || !options.devices().empty() || device_count(torch::kCUDA) == 0) return 0;
  if (!ranks->local_rank()) {
    refuse_argument(
        "the environment does not tell which GPUs belong to this rank, because it describes a job of another "
        "size; give devices");
  }
  const auto& mesh = ranks->mesh();
  std::size_t gpus = 0;
  for (int earlier = std::max(0, ranks->rank() - *ranks->local_rank()); earlier < ranks->rank(); ++earlier) {
    gpus += std::ranges::count(of_workers, mesh.rank_at(mesh.position_of(earlier), ranks->replica()));
  }
  return gpus;
}

}  // namespace

Workers arrange_workers(const GPipeOptions& options, std::size_t stages) {
  auto schedules = source_of_schedules(options, static_cast<int>(stages));
  const auto& placement = schedules.placement;
  const auto workers = static_cast<std::size_t>(std::ranges::max(placement)) + 1;
  auto ranks = place_ranks(options, workers);
  const int rank = options.ranks() ? options.ranks()->rank() : 0;
  const auto own = static_cast<std::size_t>(std::ranges::count(ranks, rank));
  options.checkpoint().check(static_cast<int>(stages));
  if (const auto why = too_few_stages(options.schedule(), placement); !why.empty()) refuse_argument(why);
  if (const auto given = options.devices().size(); workers != stages && given != 0 && given != own) {
    const bool is_even = !options.ranks() && stages % workers == 0;
    refuse_argument("balance has ", stages, " stages, which are on ", own, own == 1 ? " worker" : " workers",
                    ", but the number of devices is ", given, "; give one device per worker",
                    is_even ? absl::StrCat(", or ", stages / workers * given, " stages") : "");
  }
  const auto own_devices = place_workers(options.devices(), own, gpus_of_earlier_ranks(options, ranks));
  std::vector<torch::Device> devices(workers, torch::kCPU);
  for (std::size_t w = 0, next = 0; w < workers; ++w) {
    if (ranks[w] != rank) continue;
    devices[w] = own_devices[next++];
  }
  const bool has_wires = options.ranks() && options.ranks()->job().devices() != nullptr &&
                         std::ranges::none_of(own_devices, &torch::Device::is_cpu);
  return {std::move(schedules), std::move(devices), std::move(ranks), rank, has_wires};
}

}  // namespace gpipe
