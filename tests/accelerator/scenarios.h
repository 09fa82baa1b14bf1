// What users do with a pipeline, on devices.
#pragma once

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"

namespace gpipe {

/// Three stages with a skip from the first to the last, running statistics, dropout and a layer that can fail.
struct Subject {
  explicit Subject(const std::vector<torch::Device>& devices);

  std::shared_ptr<FaultPlan> faults = std::make_shared<FaultPlan>();
  GPipe pipe;
  torch::optim::Adam adam;
  Tensor x;
};

struct Scenario {
  std::string name;
  std::function<void(Subject&)> run;
};
const std::vector<Scenario>& scenarios();

/// The devices of the subject's stages.
struct DeviceLayout {
  std::string name;
  std::vector<torch::Device> devices;
};
const std::vector<DeviceLayout>& device_layouts();

/// Runs a scenario on a new subject. Returns the violations.
std::vector<std::string> violations_of(const Scenario& scenario, const DeviceLayout& layout);

}  // namespace gpipe
