// What users do with a pipeline, and generated cases, on devices that check the order of streams. More generated cases:
//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 accelerator_tests --gtest_filter='GeneratedOnDevices*'
#include <c10/core/impl/VirtualGuardImpl.h>

#include <random>

#include "gpipe/tensors/transfer.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using accelerator::device;
using accelerator::stream_order;
using torch::Device;

const Device kCpu = torch::kCPU;

Sequential subject_model(const std::shared_ptr<FaultPlan>& faults) {
  torch::manual_seed(3);
  return Sequential(Linear(6, 6), Stash("skip"), nn::BatchNorm1d(6), nn::ReLU(), Linear(6, 6), Pop("skip"),
                    nn::Dropout(0.2), Faulty(faults), Linear(6, 5));
}

/// Three stages with a skip from the first to the last, running statistics, dropout and a layer that can fail.
struct Subject {
  explicit Subject(const std::vector<Device>& devices)
      : pipe(subject_model(faults), Balance{2, 3, 4},
             GPipeOptions().devices(devices).chunks(4).deferred_batch_norm(true).intraop_threads(1)),
        adam(pipe->parameters()),
        x(torch::randn({8, 6}).to(devices.front()) * 2) {}

  std::shared_ptr<FaultPlan> faults = std::make_shared<FaultPlan>();
  GPipe pipe;
  torch::optim::Adam adam;
  Tensor x;
};

/// Makes a stream of each device current for this thread, for its lifetime. They come after the streams before, and the
/// streams before come after them.
class SideStreams {
 public:
  SideStreams() {
    const auto before = record_all();
    for (int d = 0; d < accelerator::kDevices; ++d)
      scopes_.push_back(std::make_unique<c10::OptionalStreamGuard>(*new_stream(device(d))));
    wait_for(before);
  }
  ~SideStreams() {
    const auto during = record_all();
    while (!scopes_.empty()) scopes_.pop_back();
    wait_for(during);
  }

 private:
  static StreamEvents record_all() {
    StreamEvents events;
    for (int d = 0; d < accelerator::kDevices; ++d) events.push_back(record_event(device(d)));
    return events;
  }
  static void wait_for(const StreamEvents& events) {
    for (int d = 0; d < accelerator::kDevices; ++d) wait(events, device(d));
  }

  std::vector<std::unique_ptr<c10::OptionalStreamGuard>> scopes_;
};

// The current device, and the current stream of each device.
std::vector<std::int64_t> place_of_this_thread() {
  const c10::impl::VirtualGuardImpl guard(accelerator::kType);
  std::vector<std::int64_t> place = {guard.getDevice().index()};
  for (int d = 0; d < accelerator::kDevices; ++d) place.push_back(guard.getStream(device(d)).id());
  return place;
}

void train(Subject& it, const Tensor& input) {
  it.adam.zero_grad();
  it.pipe->forward(input).square().mean().backward();
  it.adam.step();
}

void expect_error(const std::function<void()>& call) { EXPECT_THAT(call, ::testing::Throws<std::runtime_error>()); }

using Scenarios = std::vector<std::pair<std::string, std::function<void(Subject&)>>>;

Scenarios scenarios() {
  Scenarios all;
  const auto add = [&](const char* name, std::function<void(Subject&)> run) { all.emplace_back(name, std::move(run)); };
  add("tied", [](Subject& it) {
    Linear first(6, 128);
    Linear middle(128, 6);
    const auto& devices = it.pipe->devices();
    const auto product = [](const Tensor& x, const Tensor& matrix) { return x.matmul(matrix); };
    const auto make = [&] {
      return GPipe(Sequential(first, middle, Linear(6, 128), Sharer(first->weight, product)), Balance{1, 1, 2},
                   GPipeOptions().devices(devices).chunks(4).schedule("zb_h1"));
    };
    if (devices.front() != devices.back()) {
      EXPECT_THAT(make, throws<std::invalid_argument>("share the parameter '0.weight', but are on " +
                                                      devices.front().str() + " and " + devices.back().str()));
      EXPECT_TRUE(first->weight.is_cpu()) << "was not moved";
      return;
    }
    auto pipe = make();
    torch::optim::SGD sgd({first->weight, middle->weight}, 0.1);
    const auto target = torch::zeros({64, 6}, it.x.options());
    const auto x = it.x.repeat({8, 1});
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad();
      pipe->step(x, target, kMse);
      sgd.step();
      pipe->forward(x).sum().backward();
    }
  });
  add("counts_on_side_streams", [](Subject& it) {
    const SideStreams streams;
    for (const auto& where : {it.x.device(), device(3)}) {
      const auto classes = torch::tensor({0, 4, -100, -100, 3, 1, -100, 2}).to(where) * 1;
      const auto loss = tensor_loss(torch::nn::CrossEntropyLoss());
      it.pipe->step(it.x * 1, classes, loss).loss.mul_(2);
      const auto in_place = tensor_loss([](const Tensor& out, const Tensor&) { return out.mul_(2).square().mean(); });
      const auto count = [](const Value& target) { return target.tensor().ne(-100).sum(); };
      it.pipe->step(it.x * 1, classes, in_place, StepOptions().count(count).check(false));
      it.adam.step();
    }
  });
  add("output_elsewhere_on_side_streams", [](Subject& it) {
    const SideStreams streams;
    const auto away = [](Tensor x) { return x.to(device(3)) * 2; };
    const auto devices = it.pipe->devices();
    for (const int chunks : {4, 1}) {
      GPipe pipe(Sequential(Linear(6, 6), Linear(6, 5), Linear(5, 5), function_layer(away)), Balance{1, 1, 2},
                 GPipeOptions().devices(devices).chunks(chunks));
      const auto x = it.x.clone().requires_grad_();
      const auto gradient = torch::ones({8, 5}, device(3)) * 2;
      pipe->forward(x).backward(gradient);
      gradient.zero_();
      const auto loss = tensor_loss([](const Tensor& output, const Tensor&) { return output.square().mean(); });
      pipe->step(x, x.detach(), loss, StepOptions().return_output(true)).output.tensor().mul_(2);
      x.grad().mul_(2);
    }
  });
  add("outputs_on_two_devices", [](Subject& it) {
    const auto fork = [](Tensor x) -> std::vector<Tensor> { return {x * 2, x.to(device(3)) * 2}; };
    GPipe pipe(Sequential(Linear(6, 6), Linear(6, 5), Linear(5, 5), function_layer(fork)), Balance{1, 1, 2},
               GPipeOptions().devices(it.pipe->devices()).chunks(4));
    std::vector<Tensor> outputs;
    {
      const SideStreams streams;
      outputs = pipe->forward(Value(it.x * 1)).tensors();
    }
    const SideStreams others;
    torch::autograd::backward({outputs[0].square().sum(), outputs[1].square().sum()}, {});
  });
  add("errors", [](Subject& it) {
    const auto target = torch::zeros({8, 5}, it.x.options());
    auto loss = it.pipe->forward(it.x * 1).sum();
    for (const auto where : {FaultPlan::kForward, FaultPlan::kBackward}) {
      it.faults->arm(where, [] { throw std::runtime_error("stop"); });
      if (where == FaultPlan::kForward) expect_error([&] { it.pipe->forward(it.x * 1); });
      if (where == FaultPlan::kBackward) expect_error([&] { std::exchange(loss, Tensor()).backward(); });
      expect_error([&] { it.pipe->step(it.x * 1, target, kMse); });
      it.faults->disarm();
      train(it, it.x);
    }
  });
  return all;
}

// So violations can be found.
TEST(CheckedDevice, FindsAMissingWaitAndMemoryThatIsFreedTooEarly) {
  stream_order().take_violations();
  auto x = torch::ones({4}, device(0));
  const auto made = record_event(device(0));
  {
    const c10::OptionalStreamGuard scope(*new_stream(device(0)));
    x.square();
    wait(made, device(0));
    x = Tensor();
  }
  EXPECT_THAT(stream_order().take_violations(),
              ElementsAre(HasSubstr("aten::pow reads a tensor of shape [4] on stream"),
                          HasSubstr("memory returns to stream 0 of device 0")));
  const auto copy = torch::ones({4}, device(0)).to(torch::kCPU, /*non_blocking=*/true);
  EXPECT_TRUE(copy.isnan().all().item<bool>()) << "the host has not waited";
}

/// The devices of the subject's stages.
using DeviceLayout = std::pair<std::string, std::vector<Device>>;
const std::vector<DeviceLayout> kLayouts = {{"one_device", {device(0), device(0), device(0)}},
                                            {"there_and_back", {device(0), device(1), device(0)}},
                                            {"three_devices", {device(2), device(1), device(0)}},
                                            {"cpu_in_the_middle", {device(0), kCpu, device(1)}}};

class OnDevices : public ::testing::TestWithParam<std::tuple<DeviceLayout, Scenarios::value_type>> {};

TEST_P(OnDevices, WorkIsOrdered) {
  const auto& [layout, scenario] = GetParam();
  const auto before = place_of_this_thread();
  stream_order().take_violations();
  const auto names = accelerator::name_actions();
  {
    Subject subject(layout.second);
    scenario.second(subject);
  }
  EXPECT_THAT(stream_order().take_violations(), ::testing::IsEmpty());
  EXPECT_EQ(place_of_this_thread(), before) << "the caller's current device or stream was changed";
}

INSTANTIATE_TEST_SUITE_P(Pipeline, OnDevices,
                         ::testing::Combine(::testing::ValuesIn(kLayouts), ::testing::ValuesIn(scenarios())),
                         [](const auto& info) {
                           return std::get<0>(info.param).first + "_" + std::get<1>(info.param).first;
                         });

constexpr int kWorkers = 4;

/// Devices for a case: one to four, in a third of the cases also the CPU.
Devices draw_devices(std::uint64_t seed) {
  std::mt19937_64 random(seed + 3);
  const int devices = draw(random, 1, accelerator::kDevices);
  const int first = draw(random, 0, 2) == 0 ? -1 : 0;
  const auto any = [&]() -> torch::Device {
    const int index = draw(random, first, devices - 1);
    return index < 0 ? torch::Device(torch::kCPU) : device(index);
  };
  Devices drawn{{}, any(), any(), device(0)};
  for (int worker = 0; worker < kWorkers; ++worker) drawn.workers.push_back(any());
  return drawn;
}

/// What is wrong with a case: a violation, or a difference from the reference. Every other case is called on side streams.
std::string fault(const Spec& spec) {
  stream_order().take_violations();
  std::optional<SideStreams> streams;
  if (spec.seed % 2 == 0) streams.emplace();
  const auto outcome = compare(spec, draw_devices(spec.seed));
  streams.reset();
  const auto violations = stream_order().take_violations();
  if (!violations.empty()) return violations.front();
  return outcome.verdict == Outcome::kDifferent ? outcome.what : "";
}

TEST(GeneratedOnDevices, PipelinesComputeWhatTheReferenceDoes) {
  expect_no_fault(seeds_from_environment(40), /*portable=*/true, fault);
}

}  // namespace
}  // namespace gpipe
