#include "gpipe/tensors/allocation_listener.h"

#include <utility>

namespace gpipe {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

AllocationListener::Scope::Scope(std::shared_ptr<AllocationListener> listener) {
  constexpr auto kKind = c10::DebugInfoKind::PROFILER_STATE;
  if (listener && c10::ThreadLocalDebugInfo::get(kKind) == nullptr) guard_.emplace(kKind, std::move(listener));
}

AllocationListener::AllocationListener()
    : ProfilerStateBase(
          ProfilerConfig(ProfilerState::Disabled, /*report_input_shapes=*/false, /*profile_memory=*/true)) {}

void AllocationListener::reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) {
  if (bytes > 0) allocated(data, bytes);
  if (bytes < 0) freed(data, -bytes);
}

ActiveProfilerType AllocationListener::profilerType() { return ActiveProfilerType::NONE; }

}  // namespace gpipe
