// What I and W of a split backward compute and hold. The generated cases compare schedules that split with the
// reference.
#include <ATen/record_function.h>

#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kWide = 128;
constexpr std::int64_t kBatch = 48;  // three micro-batches, large enough for products to be split

// All forwards, then the I's, then the W's: as far apart as can be.
Schedule weights_last(const Layout& layout) {
  auto lists = fill(layout);
  const auto append = [&](Kind kind, int stage) {
    for (int m = 0; m < layout.micro_batches; ++m) lists[layout.placement[stage]].push_back({kind, stage, m});
  };
  for (int stage = layout.stages; stage-- > 0;) append(Kind::I, stage);
  for (int stage = 0; stage < layout.stages; ++stage) append(Kind::W, stage);
  return lists;
}

GPipe pipeline(const Sequential& model, const Balance& balance) {
  return GPipe(model, balance, in_chunks(3, Checkpoint::kNever).intraop_threads(1).schedule_function(weights_last));
}

void run(const Sequential& model, const Balance& balance, const Tensor& x) {
  pipeline(model, balance)->step(x, x.detach(), kSumLoss, kOfSums);
}

Tensor numbers() { return torch::randn({kBatch, kWide}); }
Linear wide() { return Linear(kWide, kWide); }

TEST(SplitBackward, SurvivesAnErrorInALongChain) {
  Sequential model(Sharer(torch::eye(64).requires_grad_(), [](Tensor x, const Tensor& weight) {
    x = on_backward(x, [] { throw std::runtime_error("enough"); });
    for (int i = 0; i < 30000; ++i) x = x.matmul(weight);
    return x;
  }));
  EXPECT_THROW(run(model, {1}, torch::ones({1, 64}).requires_grad_()), std::runtime_error);
}

// Counts operators of the running action, by kind.
class Operators {
 public:
  Operators() : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin, end))) { counts.clear(); }
  ~Operators() { at::removeCallback(handle_); }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;

  int count(char kind, const std::string& name) const { return counts[{kind, name}]; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    const std::string name = range.name();
    if (range.scope() == at::RecordScope::USER_SCOPE && name.starts_with("gpipe 0")) kind_of_this_thread = name[7];
    if (range.scope() == at::RecordScope::FUNCTION) ++counts[{kind_of_this_thread, name}];
    return nullptr;
  }
  static void end(const at::RecordFunction&, at::ObserverContext*) {}

  // A pipeline of one stage has one worker.
  inline static std::map<std::pair<char, std::string>, int> counts;
  inline static thread_local char kind_of_this_thread = ' ';
  const at::CallbackHandle handle_;
};

TEST(SplitBackward, LeavesLargeProductsAndConvolutionsToW) {
  torch::manual_seed(1);
  Sequential model(wide(), nn::GELU(), wide(), nn::GELU(), wide());
  const auto x = numbers().requires_grad_();
  run(model, {5}, x);  // checks once whether backwards can be split
  {
    const Operators operators;
    run(model, {5}, x);
    EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('W', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('I', "aten::gelu_backward"), 3 * 2);
    EXPECT_EQ(operators.count('W', "aten::gelu_backward"), 0);
  }
  Sequential small(Linear(8, 8), nn::GELU(), Linear(8, 8));
  const Operators operators;
  run(small, {3}, torch::randn({kBatch, 8}).requires_grad_());
  EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 4);
  EXPECT_EQ(operators.count('W', "aten::mm"), 0);
}

// I frees seven results of pointwise operators, and leaves the input's gradient and those of the products' outputs.
TEST(SplitBackward, FreesWhatWDoesNotNeed) {
  torch::manual_seed(1);
  const auto pointwise = [] { return Functional([](Tensor x) { return x.sin().exp().tanh().sigmoid(); }); };
  Sequential model(wide(), pointwise(), wide(), pointwise());
  auto pipe = pipeline(model, {4});
  const auto timeline = std::make_shared<Timeline>();
  const auto product = tensor_loss([](const Tensor& out, const Tensor& t) { return (out * t).sum(); });
  const auto step = [&] { pipe->step(numbers().requires_grad_(), torch::ones({kBatch, kWide}), product, kOfSums); };
  step();
  pipe->trace(timeline);
  step();
  std::map<std::string, Footprint> bytes;
  for (const auto& span : timeline->spans) bytes[to_string(span.action)] = span.bytes;
  const std::int64_t tensor = kBatch / 3 * kWide * 4;
  EXPECT_EQ(bytes["0I1"].after - bytes["0I1"].before, (3 - 7) * tensor);
  EXPECT_EQ(bytes["0W1"].after - bytes["0W1"].before, -3 * tensor);
}

}  // namespace
}  // namespace gpipe
