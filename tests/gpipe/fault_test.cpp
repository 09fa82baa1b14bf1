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
// In a backward, PyTorch's engine supports only std::exception, so not the last one.
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

/// A pipeline that trains step after step, each from the same buffers. It has skips over several stages, in-place
/// layers, batch norm and dropout; each stage can throw.
class Trainee {
 public:
  Trainee(Checkpoint checkpoint, bool deferred_batch_norm, const std::string& schedule = "gpipe") {
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
  void backward(const Tensor& output) { output.backward(gradient_); }
  void step(const LossFunction& loss = kMse) { pipe->step(x_, gradient_, loss, StepOptions().check(false)); }

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
  /// All results of a step with one seed.
  std::vector<Tensor> result_of_step() {
    begin(2);
    const auto output = forward();
    backward(output);
    auto result = state();
    result.push_back(output.detach());
    for (const auto& gradient : gradients()) result.push_back(gradient);
    begin(2);
    return result;
  }

  const std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
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

TEST(Fault, LeavesNothingBehind) {
  constexpr int kFailures = 20;  // for each of six pipelines
  auto& memory = FaultyAllocator::instance();
  memory.install();
  const absl::Cleanup put_back = [&] { memory.remove(); };
  std::mt19937_64 random(1);
  std::set<std::string> seen;
  for (const auto checkpoint : kModes) {
    for (const bool deferred : {false, true}) {
      Trainee trainee(checkpoint, deferred);
      trainee.result_of_step();  // the first step allocates memory that stays in use
      const auto expected = trainee.result_of_step();
      int allocations[2];  // in a forward, in a backward
      memory.fuse.passed = 0;
      {
        const auto output = trainee.forward();
        allocations[0] = memory.fuse.passed.exchange(0);
        trainee.backward(output);
        allocations[1] = memory.fuse.passed;
      }
      trainee.begin(2);
      const auto threads = thread_count();
      const auto live = memory.live();

      Fuse of_layers;
      for (int failures = 0; failures < kFailures && !::testing::Test::HasFailure();) {
        const bool in_backward = draw(random, 0, 1) == 0;
        const bool in_layer = draw(random, 0, 1) == 0;
        auto& fuse = in_layer ? of_layers : memory.fuse;
        int time = draw(random, 1, in_layer ? kStages * kMicroBatches : allocations[in_backward]);
        // The caller allocates at the beginning and at the end.
        if (!in_layer && draw(random, 0, 3) == 0) {
          time = draw(random, 0, 1) == 0 ? draw(random, 1, 4) : allocations[in_backward] - draw(random, 0, 3);
        }
        const auto& exceptions = in_layer ? kOfLayers : kOutOfMemory;
        const auto raise = exceptions[draw(random, 0, in_layer && !in_backward ? 2 : 1)];
        const bool for_good = draw(random, 0, 1) == 0;
        trainee.plan->arm(static_cast<FaultPlan::Where>(draw(random, FaultPlan::kForward, FaultPlan::kBackward)),
                          [&] { of_layers.pass(); });
        trainee.begin(random());
        {
          const auto output = in_backward ? trainee.forward() : Tensor();
          const auto before = trainee.state();
          fuse.arm(raise, time, for_good);
          const auto* thrown = type_thrown_by([&] {
            if (in_backward) trainee.backward(output);
            if (!in_backward) trainee.forward();
          });
          fuse.disarm();
          trainee.plan->disarm();
          EXPECT_EQ(thrown != nullptr, fuse.blown);
          if (thrown == nullptr) continue;
          ++failures;
          const auto error = trainee.pipe->last_error();
          auto where = std::string(in_layer ? "layer " : "memory ");
          where += error         ? std::string(1, "FRB"[static_cast<int>(error->action.kind)])
                   : in_backward ? "backward's caller"
                                 : "forward's caller";
          seen.insert(where);
          SCOPED_TRACE(where + (for_good ? ", from then on, time " : ", time ") + std::to_string(time) +
                       ", checkpoint " + to_string(checkpoint) + (deferred ? ", deferred" : ""));
          EXPECT_STREQ(thrown->name(), type_thrown_by(raise)->name());
          EXPECT_TRUE(same(trainee.state(), before));
          for (const auto& gradient : trainee.gradients()) EXPECT_FALSE(gradient.defined());
        }
        EXPECT_EQ(thread_count(), threads);
        EXPECT_EQ(memory.live(), live);
        EXPECT_TRUE(same(trainee.result_of_step(), expected));
      }
    }
  }
  EXPECT_EQ(seen.size(), 3U + 5U) << "some kind of failure never occurred";
}

// Its last allocations, on the caller's thread, are for the gradients that leave it.
TEST(Fault, LeavesNothingBehindOfAStepThatRunsOutOfMemory) {
  auto& memory = FaultyAllocator::instance();
  memory.install();
  const absl::Cleanup put_back = [&] { memory.remove(); };
  for (const bool deferred : {false, true}) {
    Trainee trainee(Checkpoint::kExceptLast, deferred, "zb_h1");
    const auto step = [&] {
      trainee.begin(2);
      trainee.step();
      return trainee.gradients();
    };
    step();
    memory.fuse.passed = 0;
    const auto expected = step();
    const int allocations = memory.fuse.passed;
    for (int time = 1; time <= allocations; time += time + 10 < allocations ? 7 : 1) {
      SCOPED_TRACE("time " + std::to_string(time) + " of " + std::to_string(allocations));
      trainee.begin(2);
      const auto before = trainee.state();
      const auto raise = kOutOfMemory[time % 2];
      memory.fuse.arm(raise, time, /*for_good=*/time % 3 == 0);
      const auto* thrown = type_thrown_by([&] { trainee.step(); });
      memory.fuse.disarm();
      EXPECT_EQ(thrown, type_thrown_by(raise));
      EXPECT_TRUE(same(trainee.state(), before));
      for (const auto& gradient : trainee.gradients()) EXPECT_FALSE(gradient.defined());
    }
    EXPECT_TRUE(same(step(), expected));
  }
}

// Errors in the loss, and in backwards, among them one between the R and the B of a cell.
TEST(Fault, OfAStepLeavesEverythingAsItWas) {
  for (const auto* schedule : {"gpipe", "1f1b", "zb_h2", "interleaved_zb"}) {
    for (int failing = 0; failing <= 4; ++failing) {  // the number of the backward, or 0: the loss
      Trainee trainee(failing == 0 ? Checkpoint::kExceptLast : Checkpoint::kAlways, false, schedule);
      trainee.begin(2);
      trainee.step();
      const auto expected = trainee.gradients();
      trainee.begin(2);
      const auto before = trainee.state();
      Fuse fuse;
      fuse.arm(kOfLayers[0], failing == 0 ? 3 : failing, /*for_good=*/false);
      if (failing > 0) trainee.plan->arm(FaultPlan::kBackward, [&] { fuse.pass(); });
      const auto loss = [&](const Value& output, const Value& target) {
        if (failing == 0) fuse.pass();
        return kMse(output, target);
      };
      EXPECT_THROW(trainee.step(loss), std::domain_error);
      trainee.plan->disarm();
      const auto error = trainee.pipe->last_error();
      ASSERT_TRUE(error);
      EXPECT_EQ(error->message, "injected");
      if (failing == 0) EXPECT_EQ(std::pair(error->layer_name, error->layer), std::pair(std::string("loss"), 17));
      for (const auto& gradient : trainee.gradients()) EXPECT_FALSE(gradient.defined());
      EXPECT_TRUE(same(trainee.state(), before));
      trainee.step();  // with the same numbers as the first
      EXPECT_TRUE(same(trainee.gradients(), expected));
      EXPECT_FALSE(trainee.pipe->last_error());
    }
  }
}

}  // namespace
}  // namespace gpipe
