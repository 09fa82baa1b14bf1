// Pipelines on devices that check the order of streams.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/accelerator/scenarios.h"

namespace gpipe {
namespace {

class OnDevices : public ::testing::TestWithParam<std::tuple<DeviceLayout, Scenario>> {};

TEST_P(OnDevices, WorkIsOrdered) {
  const auto& [layout, scenario] = GetParam();
  const auto violations = violations_of(scenario, layout);
  EXPECT_TRUE(violations.empty()) << violations.size() << " violations, such as: " << violations.front();
}

INSTANTIATE_TEST_SUITE_P(Pipeline, OnDevices,
                         ::testing::Combine(::testing::ValuesIn(device_layouts()), ::testing::ValuesIn(scenarios())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace gpipe
