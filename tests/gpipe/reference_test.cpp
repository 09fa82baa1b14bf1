// Transparency: a pipeline trains the function of the unpartitioned model, and equals the reference bit by bit.
#include "tests/gpipe/reference.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>

#include "gpipe/run/micro_batch.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(Reference, TheUnpartitionedModelComputesTheSameInFloat64) {
  torch::manual_seed(1);
  Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(Linear(6, 6));
    model->push_back(torch::nn::Tanh());
  }
  model->to(torch::kFloat64);
  const auto x = torch::randn({7, 6}, torch::kFloat64).requires_grad_();
  const auto expected = model->forward(x);
  expected.pow(2).sum().backward();
  const auto x_gradient = x.grad().clone();
  std::vector<Tensor> gradients;
  for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  for (const auto checkpoint : kModes) {
    for (const int chunks : {1, 2, 3, 7, 20}) {
      model->zero_grad();
      x.mutable_grad().reset();
      GPipe pipe(model, {3, 1, 4}, GPipeOptions().chunks(chunks).checkpoint(checkpoint));
      const auto y = pipe->forward(x);
      EXPECT_TRUE(torch::allclose(y, expected, 1e-12, 1e-14));
      y.pow(2).sum().backward();
      EXPECT_TRUE(torch::allclose(x.grad(), x_gradient, 1e-11, 1e-13));
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_TRUE(torch::allclose(model->parameters()[i].grad(), gradients[i], 1e-11, 1e-13));
      }
    }
  }
}

struct Case {
  Balance balance;
  std::int64_t batch;
  std::int64_t chunks;
  Checkpoint checkpoint;
};

/// Every balance with several batch sizes and numbers of chunks, in every checkpoint mode.
std::vector<Case> grid(const std::vector<Balance>& balances) {
  std::vector<Case> cases;
  for (const auto& balance : balances) {
    for (const auto& [batch, chunks] : {std::pair{6, 1}, {6, 3}, {7, 3}, {2, 4}, {1, 2}, {9, 8}}) {
      for (const auto checkpoint : kModes) cases.push_back({balance, batch, chunks, checkpoint});
    }
  }
  return cases;
}

void expect_reference(const Sequential& model, const Case& c, std::vector<Tensor> inputs, Value::Form form) {
  SCOPED_TRACE(::testing::Message() << "balance " << ::testing::PrintToString(c.balance) << ", batch " << c.batch
                                    << ", chunks " << c.chunks << ", checkpoint " << to_string(c.checkpoint));
  GPipe pipe(model, c.balance, GPipeOptions().chunks(c.chunks).checkpoint(c.checkpoint).intraop_threads(1));
  pipe->train();
  const auto sizes = micro_batch_sizes(c.batch, c.chunks, 0);
  torch::manual_seed(5);
  const auto output = pipe->forward(Value(form, inputs));
  std::vector<Tensor> gradients;
  std::vector<Tensor> differentiable;
  std::vector<Tensor> output_gradients;
  for (const auto& tensor : output.tensors()) {
    gradients.push_back(tensor.requires_grad() ? torch::randn_like(tensor) : Tensor());
    if (!tensor.requires_grad()) continue;
    differentiable.push_back(tensor);
    output_gradients.push_back(gradients.back());
  }
  std::vector<Tensor> wanted;
  for (const auto& tensor : inputs) {
    if (tensor.requires_grad()) wanted.push_back(tensor);
  }
  const auto parameters = model->parameters();
  wanted.insert(wanted.end(), parameters.begin(), parameters.end());
  const auto got = torch::autograd::grad(differentiable, wanted, output_gradients, false, false, true);

  torch::manual_seed(5);
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);
  const auto expected = reference(model, c.balance, Value(form, inputs), sizes, gradients);
  torch::set_num_threads(threads);
  ASSERT_EQ(output.tensors().size(), expected.outputs.size());
  for (std::size_t k = 0; k < expected.outputs.size(); ++k) {
    EXPECT_TRUE(same(output.tensors()[k].detach(), expected.outputs[k])) << "output " << k;
  }
  std::size_t next = 0;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (inputs[k].requires_grad()) {
      EXPECT_TRUE(same(got[next++], expected.input_gradients[k])) << "input " << k;
    }
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    EXPECT_TRUE(same(got[next++], expected.parameter_gradients[p])) << "parameter " << p;
  }
}

TEST(Reference, EqualsAPipelineWithDropout) {
  torch::manual_seed(2);
  Sequential model;
  for (int i = 0; i < 3; ++i) {
    model->push_back(Linear(6, 6));
    model->push_back(torch::nn::Dropout(0.4));
    model->push_back(torch::nn::Tanh());
  }
  for (const auto& c : grid({{9}, {4, 5}, {1, 1, 7}, {2, 3, 2, 2}})) {
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_()}, Value::Form::kTensor);
  }
}

TEST(Reference, EqualsAPipelineWithSkips) {
  torch::manual_seed(3);
  auto model = skip_model();
  for (const auto& c : grid({{10}, {5, 5}, {1, 2, 7}, {3, 3, 2, 2}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}})) {
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_()}, Value::Form::kTensor);
  }
}

TEST(Reference, EqualsAPipelineWithSeveralTensorsAndInPlaceLayers) {
  torch::manual_seed(4);
  auto model = tuple_model();
  for (const auto& c : grid({{6}, {1, 5}, {2, 4}, {3, 3}, {1, 1, 1, 1, 1, 1}})) {
    const auto ids = torch::randint(0, 5, {c.batch}, torch::kLong);
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_(), ids}, Value::Form::kTuple);
  }
}

}  // namespace
}  // namespace gpipe
