// The state of a pipeline is the unpartitioned model's.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

TEST(State, IsTheModelsOwn) {
  Sequential model({{"first", Linear(2, 3)}, {"second", Linear(3, 2)}});
  GPipe pipe(model, {1, 1});
  EXPECT_EQ(pipe->named_parameters().keys(), model->named_parameters().keys());
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(pipe->parameters()[i].is_same(model->parameters()[i]));
  }
  std::stringstream file;
  torch::save(pipe, file);
  Sequential loaded({{"first", Linear(2, 3)}, {"second", Linear(3, 2)}});
  torch::load(loaded, file);
  EXPECT_TRUE(same(loaded->parameters(), model->parameters()));
}

TEST(State, LoadsFromTheModelAtAnyBalance) {
  const auto build = [] { return Sequential({{"first", Linear(2, 3)}, {"second", torch::nn::BatchNorm1d(3)}}); };
  auto trained = build();
  trained->forward(torch::randn({4, 2}));
  std::stringstream file;
  torch::save(trained, file);
  for (const auto& balance : {Balance{2}, Balance{1, 1}}) {
    GPipe pipe(build(), balance);
    file.clear();
    file.seekg(0);
    torch::load(pipe, file);
    EXPECT_EQ(pipe->named_buffers().keys(), trained->named_buffers().keys());
    EXPECT_TRUE(same(pipe->buffers(), trained->buffers()));
    EXPECT_TRUE(same(pipe->parameters(), trained->parameters()));
  }
}

TEST(State, ConvertsToAnotherTypeAndStaysOnItsDevices) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(6, 6)), {1, 1});
  EXPECT_THROW(pipe->to(torch::kCPU), c10::TypeError);
  EXPECT_THROW(pipe->to(torch::kCPU, torch::kFloat64), c10::TypeError);
  pipe->to(torch::kFloat64);
  EXPECT_EQ(pipe->forward(torch::zeros({4, 6}, torch::kFloat64)).scalar_type(), torch::kFloat64);
}

}  // namespace
}  // namespace gpipe
