// Buffers that two stages share.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

TEST(SharedBuffers, OfBatchNormAreRefusedInTraining) {
  auto norm = torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(6).affine(false));
  NestedSequential one{{"norm", norm}};
  NestedSequential two{{"norm", norm}};
  const auto x = torch::rand({4, 6});
  for (const bool deferred : {false, true}) {
    GPipe pipe(Sequential(one, two), {1, 1}, GPipeOptions().deferred_batch_norm(deferred));
    EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("' of stages 0 and 1"));
    pipe->eval();
    EXPECT_NO_THROW(pipe->forward(x));
    pipe->train();
  }
  EXPECT_NO_THROW(GPipe(Sequential(one, two), {2})->forward(x));
}

/// Multiplies by a table, which it may change. Hidden writes leave the version counter as it is.
struct PositionsImpl : torch::nn::Module {
  enum Writes { kNone, kPlain, kHidden };

  explicit PositionsImpl(const Tensor& table) : table(register_buffer("table", table)) {}
  Tensor forward(Tensor x) {
    if (writes == kPlain) table.add_(1);
    if (writes == kHidden) table.variable_data().add_(1);
    return x * table;
  }
  Tensor table;
  Writes writes = kNone;
};

TEST(SharedBuffers, WorkUntilAStageWritesToThemAndAfterwards) {
  const auto table = torch::arange(6.0);
  for (const auto writes : {PositionsImpl::kPlain, PositionsImpl::kHidden}) {
    auto second = std::make_shared<PositionsImpl>(table);
    GPipe pipe(Sequential(std::make_shared<PositionsImpl>(table), second), {1, 1}, GPipeOptions().chunks(2));
    const auto x = torch::ones({4, 6});
    if (writes == PositionsImpl::kPlain) EXPECT_TRUE(same(pipe->forward(x), table.square().expand({4, 6})));
    second->writes = writes;
    EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("'table' of stages 0 and 1"));
    EXPECT_TRUE(same(table, torch::arange(6.0)));
    second->writes = PositionsImpl::kNone;
    EXPECT_TRUE(same(pipe->forward(x), table.square().expand({4, 6})));
  }
}

}  // namespace
}  // namespace gpipe
