// Training steps that fail at random places, on workers and on the caller's thread, because a layer throws
// or memory runs out. None leaves a trace.
#include <c10/core/CPUAllocator.h>
#include <cxxabi.h>

#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

/// A function that throws.
using Raise = void (*)();

const std::vector<Raise> kOutOfMemory = {
    [] { throw std::bad_alloc(); },
    [] { TORCH_CHECK_WITH(OutOfMemoryError, false, "injected"); },
};
// The last one only in a forward: in a backward, PyTorch's engine supports only std::exception.
const std::vector<Raise> kOfLayers = {
    [] { throw std::domain_error("injected"); },
    [] { TORCH_CHECK(false, "injected"); },
    [] { throw 7; },
};

/// Counts its passes, on any thread. When armed, it throws in those from `first` to `last`.
struct Fuse {
  void arm(Raise to_throw, int from, bool for_good) {
    raise = to_throw;
    first = from;
    last = for_good ? std::numeric_limits<int>::max() : from;
    passed = 0;
    blown = false;
  }
  void disarm() { last = 0; }
  void pass() {
    const int time = ++passed;
    if (time < first || time > last) return;
    blown = true;
    raise();
  }

  Raise raise = nullptr;
  int first = 0;
  int last = 0;
  std::atomic<int> passed = 0;
  std::atomic<bool> blown = false;
};

/// Wraps the CPU's allocator: counts the live blocks and passes a fuse in each allocation. PyTorch may free a raw block
/// through another allocator than the one that made it, so blocks are identified by their addresses.
class FaultyAllocator : public c10::Allocator {
 public:
  /// Never destroyed, because tensors may outlive every other object.
  static FaultyAllocator& instance() {
    static auto* const it = new FaultyAllocator();
    return *it;
  }

  void install() {
    wrapped_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this);
  }
  void remove() { c10::SetCPUAllocator(wrapped_); }

  /// The numbers of blocks and of bytes that are alive.
  std::pair<std::size_t, std::size_t> live() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& block : sizes_) bytes += block.second;
    return {sizes_.size(), bytes};
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    fuse.pass();
    void* data = wrapped_->raw_allocate(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (data != nullptr) sizes_.emplace(data, bytes);
    return {data, data, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { instance().free(data); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  Fuse fuse;

 private:
  void free(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      sizes_.erase(data);
    }
    wrapped_->raw_deallocate(data);
  }

  c10::Allocator* wrapped_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
};

constexpr int kStages = 4;
constexpr int kMicroBatches = 4;

/// Its weight's gradient has other strides than the weight.
struct TurnedImpl : nn::Module {
  Tensor forward(const Tensor& x) { return x.matmul(weight.t().contiguous()); }
  Tensor weight = register_parameter("weight", torch::rand({6, 6}));
};
TORCH_MODULE(Turned);

enum class Pass { kForward, kBackward, kStep };

/// A pipeline that trains step after step, each from the same buffers. It has skips over several stages, in-place
/// layers, batch norm and dropout; each stage can throw, and the loss.
class Trainee {
 public:
  Trainee(Checkpoint checkpoint, bool deferred_batch_norm, const std::string& schedule) {
    torch::manual_seed(1);
    model_ = Sequential(Turned(), Stash("a"), Faulty(plan), nn::BatchNorm1d(6), nn::ReLU(nn::ReLUOptions(true)),
                        Stash("b"), Linear(6, 6), Faulty(plan), nn::Dropout(0.3), Pop("a"), Linear(6, 6),
                        nn::BatchNorm1d(6), Faulty(plan), nn::Dropout(0.3), Pop("b"), Faulty(plan), Turned());
    auto options = in_chunks(kMicroBatches, checkpoint).deferred_batch_norm(deferred_batch_norm).intraop_threads(1);
    const std::vector<torch::Device> devices(schedule.starts_with("interleaved") ? 2 : kStages, torch::kCPU);
    pipe = GPipe(model_, {4, 5, 4, 4}, options.devices(devices).schedule(schedule));
    x_ = torch::randn({8, 6}).requires_grad_();
    gradient_ = torch::randn({8, 6});
    buffers_ = copies(model_->buffers());
  }

  void begin(std::uint64_t seed) {
    for (std::size_t i = 0; i < buffers_.size(); ++i) model_->buffers()[i].copy_(buffers_[i]);
    model_->zero_grad();
    x_.mutable_grad().reset();
    torch::manual_seed(seed);
  }
  Tensor forward() { return pipe->forward(x_); }
  /// REQUIRES: an output for a backward.
  void run(Pass pass, const Tensor& output) {
    const auto loss = [this](const Value& out, const Value& target) {
      if (of_loss) of_loss();
      return kMse(out, target);
    };
    if (pass == Pass::kForward) forward();
    if (pass == Pass::kBackward) output.backward(gradient_);
    if (pass == Pass::kStep) pipe->step(x_, gradient_, loss, StepOptions().check(false));
  }

  /// The state that a failed call must not change.
  std::vector<Tensor> state() {
    auto state = copies(model_->buffers());
    state.push_back(generator_state());
    return state;
  }
  /// The gradients of the input and the parameters.
  std::vector<Tensor> gradients() {
    auto gradients = take_gradients(*model_);
    gradients.push_back(x_.grad());
    return gradients;
  }
  /// All results of a step, or of a forward and a backward, with one seed.
  std::vector<Tensor> results(bool by_step) {
    begin(2);
    const auto output = by_step ? Tensor() : forward();
    run(by_step ? Pass::kStep : Pass::kBackward, output);
    auto results = state();
    if (!by_step) results.push_back(output.detach());
    for (const auto& gradient : gradients()) results.push_back(gradient);
    begin(2);
    return results;
  }

  const std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  std::function<void()> of_loss;
  GPipe pipe = nullptr;

 private:
  Sequential model_ = nullptr;
  Tensor x_;
  Tensor gradient_;
  std::vector<Tensor> buffers_;
};

/// The type that a call throws, or nullptr.
template <class Call>
const std::type_info* type_thrown_by(Call call) {
  try {
    call();
  } catch (...) {
    return abi::__cxa_current_exception_type();
  }
  return nullptr;
}

/// The numbers of allocations of a forward, a backward and a step.
std::array<int, 3> allocations_of(Trainee& trainee) {
  auto& passed = FaultyAllocator::instance().fuse.passed;
  std::array<int, 3> allocations{};
  passed = 0;
  const auto output = trainee.forward();
  allocations[0] = passed.exchange(0);
  trainee.run(Pass::kBackward, output);
  allocations[1] = passed.exchange(0);
  trainee.gradients();
  trainee.run(Pass::kStep, {});
  allocations[2] = passed;
  return allocations;
}

TEST(Fault, LeavesNothingBehind) {
  constexpr int kFailures = 25;  // for each of six pipelines
  auto& memory = FaultyAllocator::instance();
  memory.install();
  const absl::Cleanup put_back = [&] { memory.remove(); };
  std::mt19937_64 random(1);
  std::set<std::string> seen;
  const char* const schedules[] = {"gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_zb", "interleaved_1f1b"};
  for (int number = 0; number < 6; ++number) {
    const auto checkpoint = kModes[number / 2];
    const bool deferred = number % 2 == 1;
    Trainee trainee(checkpoint, deferred, schedules[number]);
    std::vector<Tensor> expected[2];
    for (int i = 0; i < 4; ++i) expected[i % 2] = trainee.results(i % 2 == 1);  // the first two allocate for good
    const auto allocations = allocations_of(trainee);
    trainee.begin(2);
    const auto threads = thread_count();
    const auto live = memory.live();

    Fuse of_layers;
    for (int failures = 0; failures < kFailures && !::testing::Test::HasFailure();) {
      const auto pass = static_cast<Pass>(draw(random, 0, 2));
      const std::string source = draw(random, 0, 1) == 0 ? "memory" : draw(random, 0, 3) == 0 ? "loss" : "layer";
      const int most = source == "memory" ? allocations[static_cast<int>(pass)] : kStages * kMicroBatches;
      int time = draw(random, 1, source == "loss" ? kMicroBatches : most);
      // The caller allocates at the beginning and, for the gradients that leave it, at the end.
      if (source == "memory" && draw(random, 0, 2) == 0) {
        time = draw(random, 0, 1) == 0 ? draw(random, 1, 4) : most - draw(random, 0, 9);
      }
      const auto& exceptions = source == "memory" ? kOutOfMemory : kOfLayers;
      const auto raise = exceptions[draw(random, 0, source == "layer" && pass == Pass::kForward ? 2 : 1)];
      const bool for_good = draw(random, 0, 1) == 0;
      auto& fuse = source == "memory" ? memory.fuse : of_layers;
      if (source == "layer") {
        trainee.plan->arm(static_cast<FaultPlan::Where>(draw(random, FaultPlan::kForward, FaultPlan::kBackward)),
                          [&] { of_layers.pass(); });
      }
      if (source == "loss") trainee.of_loss = [&] { of_layers.pass(); };
      trainee.begin(random());
      {
        const auto output = pass == Pass::kBackward ? trainee.forward() : Tensor();
        const auto before = trainee.state();
        fuse.arm(raise, time, for_good);
        const auto* thrown = type_thrown_by([&] { trainee.run(pass, output); });
        fuse.disarm();
        trainee.plan->disarm();
        trainee.of_loss = nullptr;
        EXPECT_EQ(thrown != nullptr, fuse.blown);
        if (thrown == nullptr) continue;
        ++failures;
        const auto error = trainee.pipe->last_error();
        const auto place = error ? std::string(1, "FRBBB"[static_cast<int>(error->action.kind)])
                                 : "caller " + std::to_string(static_cast<int>(pass));
        seen.insert(source + " " + place);
        SCOPED_TRACE(source + " " + place + (for_good ? ", from then on, time " : ", time ") + std::to_string(time) +
                     ", checkpoint " + to_string(checkpoint) + ", " + schedules[number]);
        EXPECT_STREQ(thrown->name(), type_thrown_by(raise)->name());
        if (source == "loss") EXPECT_EQ(std::pair(error->layer_name, error->layer), std::pair(std::string("loss"), 17));
        EXPECT_TRUE(same(trainee.state(), before));
        for (const auto& gradient : trainee.gradients()) EXPECT_FALSE(gradient.defined());
      }
      EXPECT_EQ(thread_count(), threads);
      EXPECT_EQ(memory.live(), live);
      EXPECT_TRUE(same(trainee.results(pass == Pass::kStep), expected[pass == Pass::kStep]));
    }
  }
  EXPECT_EQ(seen.size(), 3U + 3U + 3U + 2U) << ::testing::PrintToString(seen);
}

}  // namespace
}  // namespace gpipe
