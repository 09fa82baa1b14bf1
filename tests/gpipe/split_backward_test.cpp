// What I and W of a split backward compute and hold. The generated cases compare schedules that split with the
// reference.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWide = 128;
constexpr std::int64_t kBatch = 48;  // three micro-batches, large enough for products to be split

// All forwards, then the I's, then the W's: as far apart as can be. With `split` false: a B in place of each I.
ScheduleFunction weights_last(bool split) {
  return [split](const Layout& layout) {
    auto lists = fill(layout);
    const auto append = [&](Kind kind, int stage) {
      for (int m = 0; m < layout.micro_batches; ++m) lists[layout.placement[stage]].push_back({kind, stage, m});
    };
    for (int stage = layout.stages; stage-- > 0;) append(split ? Kind::I : Kind::B, stage);
    for (int stage = 0; split && stage < layout.stages; ++stage) append(Kind::W, stage);
    return lists;
  };
}

const LossFunction kSum = tensor_loss([](const Tensor& out, const Tensor&) { return out.sin().sum(); });

/// Returns the gradients of the parameters and the buffers after a step, from the same buffers each time.
std::vector<Tensor> run(Sequential& model, const Balance& balance, bool split, const Tensor& x,
                        GPipeOptions options = {}) {
  const auto before = copies(model->buffers());
  GPipe pipe(model, balance, options.chunks(3).intraop_threads(1).schedule_function(weights_last(split)));
  torch::manual_seed(3);
  pipe->step(x, x.detach(), kSum, kOfSums);
  const auto results = buffers_and_gradients(*model);
  for (std::size_t i = 0; i < before.size(); ++i) model->buffers()[i].copy_(before[i]);
  return results;
}

void expect_exact(Sequential model, const Balance& balance, const Tensor& x, const GPipeOptions& options = {}) {
  EXPECT_TRUE(same(run(model, balance, false, x, options), run(model, balance, true, x, options)));
}

Tensor numbers() { return torch::randn({kBatch, kWide}); }
Linear wide() { return Linear(kWide, kWide); }

TEST(SplitBackward, IsExactUnderAutocast) {
  torch::manual_seed(1);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  expect_exact(Sequential(wide(), nn::Tanh(), wide(), nn::ReLU(), wide()), {2, 3}, numbers());
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST(SplitBackward, SurvivesAnErrorInALongChain) {
  Sequential model(Sharer(torch::eye(64).requires_grad_(), [](Tensor x, const Tensor& weight) {
    x = on_backward(x, [] { throw std::runtime_error("enough"); });
    for (int i = 0; i < 30000; ++i) x = x.matmul(weight);
    return x;
  }));
  EXPECT_THROW(run(model, {1}, true, torch::ones({1, 64}).requires_grad_()), std::runtime_error);
}

/// x * w, whose backward counts its runs.
struct CountedProduct : torch::autograd::Function<CountedProduct> {
  static Tensor forward(AutogradContext* context, Tensor x, Tensor w) {
    context->save_for_backward({x, w});
    return x.matmul(w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    ++runs;
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1].t()), saved[0].t().matmul(gradients[0])};
  }
  inline static std::atomic<int> runs = 0;
};

TEST(SplitBackward, RunsCustomFunctionsAndHooksOnce) {
  std::atomic<int> hooks = 0;
  const Sharer hooked(torch::eye(kWide).requires_grad_(), [&](const Tensor& x, const Tensor& weight) {
    auto h = x.matmul(weight);
    if (h.requires_grad()) h.register_hook([&](const Tensor&) { ++hooks; });
    return CountedProduct::apply(h, weight);
  });
  Sequential model(wide(), hooked);
  CountedProduct::runs = 0;
  run(model, {1, 1}, true, numbers());
  EXPECT_EQ(CountedProduct::runs, 3);
  EXPECT_EQ(hooks, 3);
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
  run(model, {5}, true, x);  // checks once whether backwards can be split
  {
    const Operators operators;
    run(model, {5}, true, x);
    EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('W', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('I', "aten::gelu_backward"), 3 * 2);
    EXPECT_EQ(operators.count('W', "aten::gelu_backward"), 0);
  }
  Sequential small(Linear(8, 8), nn::GELU(), Linear(8, 8));
  const Operators operators;
  run(small, {3}, true, torch::randn({kBatch, 8}).requires_grad_());
  EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 4);
  EXPECT_EQ(operators.count('W', "aten::mm"), 0);
}

// I frees seven results of pointwise operators, and leaves the input's gradient and those of the products' outputs.
TEST(SplitBackward, FreesWhatWDoesNotNeed) {
  torch::manual_seed(1);
  const auto pointwise = [] { return Functional([](Tensor x) { return x.sin().exp().tanh().sigmoid(); }); };
  Sequential model(wide(), pointwise(), wide(), pointwise());
  GPipe pipe(model, {4}, in_chunks(3).intraop_threads(1).schedule_function(weights_last(true)));
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
