// LanguageBinding: the functions by which another language runs layers, receives errors and polls.

#include "gpipe/binding.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

/// Runs the layers first..end-1 in order, as the run_layers of a stage does.
RunLayers run_in_a_row(const Sequential& model, int first, int end) {
  return [model, first, end](Value input, absl::FunctionRef<void(int)> begin, CellMemo&, const auto&) {
    for (int i = first; i < end; ++i) {
      begin(i - first);
      input = make_layers(*model)[i]->forward(std::move(input));
    }
    return input;
  };
}

TEST(LanguageBinding, LearnsOfErrors) {
  Sequential model(Linear(4, 4), Linear(4, 4), Functional([](Tensor) -> Tensor { throw std::domain_error("no"); }));
  std::vector<ErrorInfo> told;
  const auto on_error = [&](const ErrorInfo& info, const std::exception_ptr& error) {
    EXPECT_THROW(std::rethrow_exception(error), std::domain_error);
    told.push_back(info);
  };
  GPipe pipe(make_layers(*model), {1, 2}, in_chunks(2),
             {.run_layers = {run_in_a_row(model, 0, 1), run_in_a_row(model, 1, 3)}, .on_error = on_error});
  EXPECT_THROW(pipe->forward(torch::randn({4, 4})), std::domain_error);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].layer, 2);
  EXPECT_EQ(told[0].layer_name, "2");
  EXPECT_EQ(told[0].action.stage, 1);
}

TEST(LanguageBinding, ReplacesAnError) {
  Sequential model(Linear(4, 4), Linear(4, 4));
  const auto on_error = [](const ErrorInfo& info, const std::exception_ptr&) { throw std::domain_error(info.message); };
  GPipe pipe(make_layers(*model), {1, 1}, GPipeOptions(), {.on_error = on_error});
  EXPECT_THROW(pipe->forward(torch::randn({4, 5})), std::domain_error);
  EXPECT_EQ(pipe->last_error()->layer, 0);
  EXPECT_EQ(pipe->forward(torch::randn({4, 4})).size(0), 4);
}

TEST(LanguageBinding, EndsACallByThrowingInPoll) {
  std::atomic<bool> asked = false;
  Sequential model(Linear(4, 4));
  const auto wait = [&](Value input, absl::FunctionRef<void(int)>, CellMemo&, const auto&) {
    while (!asked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return input;
  };
  const auto poll = [&] {
    if (!asked.exchange(true)) throw std::domain_error("enough");
  };
  GPipe pipe(make_layers(*model), {1}, in_chunks(2), {.run_layers = {wait}, .poll = poll});
  EXPECT_THROW(pipe->forward(torch::randn({4, 4})), std::domain_error);
  EXPECT_FALSE(pipe->last_error());
  EXPECT_EQ(pipe->forward(torch::randn({4, 4})).size(0), 4);
}

struct StructureOfPair : Structure {
  bool equals(const Structure&) const override { return true; }
  std::string describe() const override { return "a pair"; }
};

TEST(LanguageBinding, CannotGiveObjectsToCppLayers) {
  Sequential model(Linear(4, 4), Linear(4, 4));
  const auto make_pair = [](Value input, absl::FunctionRef<void(int)> begin, CellMemo&, const auto&) {
    begin(0);
    const std::shared_ptr<const Structure> structure = std::make_shared<StructureOfPair>();
    return Value(structure, {input.tensor() * 2, input.tensor() * 3});
  };
  GPipe pipe(make_layers(*model), {1, 1}, GPipeOptions(), {.run_layers = {make_pair, run_in_a_row(model, 1, 2)}});
  EXPECT_THAT([&] { pipe->forward(Value(torch::randn({4, 4}))); }, refused("cannot take a pair"));
}

}  // namespace
}  // namespace gpipe
