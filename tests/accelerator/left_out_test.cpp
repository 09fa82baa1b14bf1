// Each call of wait() and use_on_current_stream() in the library is needed, and each event is recorded in time: without
// the call, or with an earlier event, some scenario has a violation. This program's functions stand in for the
// library's. Calls from one place, `chosen`, are left out, or return the events of the call before.
#include <dlfcn.h>

#include <cstdlib>
#include <span>

#include "gpipe/tensors/transfer.h"
#include "tests/accelerator/device.h"
#include "tests/accelerator/ranks_training.h"
#include "tests/accelerator/scenarios.h"

namespace gpipe {
namespace {

using accelerator::stream_order;

/// Where the library calls a function: the address in its file that the call returns to.
struct Place {
  std::string function;
  std::uintptr_t address;
  auto operator<=>(const Place&) const = default;
};

std::mutex mutex;
std::map<Place, int> called;
std::atomic<bool> listens{false};
std::atomic<std::uintptr_t> chosen{0};

/// Notes the calls of the library for its lifetime.
struct Listening {
  Listening() {
    called.clear();
    listens = true;
  }
  ~Listening() { listens = false; }
};

/// Notes a call. Returns whether it is not from the chosen place.
bool is_other(const char* function, void* returns_to) {
  if (!listens) return true;
  Dl_info info;
  if (dladdr(returns_to, &info) == 0 || std::string(info.dli_fname).find("libgpipe") == std::string::npos) return true;
  const auto address = reinterpret_cast<std::uintptr_t>(returns_to) - reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  std::lock_guard<std::mutex> lock(mutex);
  ++called[{function, address}];
  return address != chosen;
}

/// Returns the events, or for the chosen place those of the call before.
template <class Events>
Events events_of(const char* function, void* returns_to, c10::Device device, Events events) {
  static std::map<std::string, Events> before;
  if (is_other(function, returns_to)) return events;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_first] = before.try_emplace(device.str(), events);
  return is_first ? events : std::exchange(found->second, events);
}

/// The library's own function of the same name.
template <class Function>
Function* of_library(Function* here) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(here), &info);
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, info.dli_sname));
}

}  // namespace

void wait(const StreamEvent& event, c10::Device device) {
  static auto* const real = of_library<void(const StreamEvent&, c10::Device)>(&wait);
  if (is_other("wait", __builtin_return_address(0))) real(event, device);
}

void wait(const StreamEvents& events, c10::Device device) {
  static auto* const real = of_library<void(const StreamEvents&, c10::Device)>(&wait);
  if (is_other("wait", __builtin_return_address(0))) real(events, device);
}

void use_on_current_stream(const at::Tensor& tensor) {
  static auto* const real = of_library(&use_on_current_stream);
  if (is_other("use_on_current_stream", __builtin_return_address(0))) real(tensor);
}

StreamEvent record_event(c10::Device device) {
  static auto* const real = of_library(&record_event);
  return events_of("record_event", __builtin_return_address(0), device, real(device));
}

StreamEvents record_events(std::span<const at::Tensor> tensors, c10::Device device) {
  static auto* const real = of_library(&record_events);
  return events_of("record_events", __builtin_return_address(0), device, real(tensors, device));
}

namespace {

bool scenario_violates(const Scenario& scenario, const DeviceLayout& layout) {
  return !violations_of(scenario, layout).empty();
}

bool wires_violate(Way way) {
  stream_order().take_violations();
  train_over_ranks("interleaved_1f1b", Checkpoint::kNever, way);
  return !stream_order().take_violations().empty();
}

// Whether a scenario has a violation. Tries the one that had the last violation first.
bool scenarios_violate() {
  static auto last = std::make_pair(scenarios().front(), device_layouts().front());
  if (scenario_violates(last.first, last.second)) return true;
  for (const auto& layout : device_layouts()) {
    for (const auto& scenario : scenarios()) {
      if (!scenario_violates(scenario, layout)) continue;
      last = {scenario, layout};
      return true;
    }
  }
  return false;
}

// The calls that scenarios make, and those that only wires between devices make.
TEST(LeftOut, EachCallIsNeededAndInTime) {
  if (std::getenv("GPIPE_LONG") == nullptr) GTEST_SKIP() << "tests/long mutants runs it";
  const Listening listening;
  ASSERT_FALSE(scenarios_violate());
  auto places = std::exchange(called, {});
  ASSERT_FALSE(wires_violate(Way::kHost));
  const auto by_host = std::exchange(called, {});
  ASSERT_FALSE(wires_violate(Way::kWires));
  std::ranges::copy_if(called, std::inserter(places, places.end()),
                       [&](const auto& each) { return !by_host.contains(each.first); });
  ASSERT_GT(places.size(), 11) << "the library does not call this program's functions";
  for (const auto& [place, count] : places) {
    chosen = place.address;
    EXPECT_TRUE(scenarios_violate() || wires_violate(Way::kWires))
        << place.function << " that returns to " << std::hex << place.address << std::dec << ", called " << count
        << " times";
  }
  chosen = 0;
}

}  // namespace
}  // namespace gpipe
