#include "gpipe/graph/graph.h"
#include "tests/support/matchers.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

namespace gpipe {
namespace {

std::vector<at::Tensor> run(const std::string& description, std::vector<at::Tensor> inputs,
                            const Graph::State& state = {}) {
  return Graph(description).run(std::move(inputs), state);
}

at::Tensor number(double value) { return torch::tensor({value}); }

TEST(Graph, FollowsTheMode) {
  const std::string both = R"({"values": 3, "inputs": [0],
    "calls": [{"operator": "aten::mul.Scalar", "result": 1,
               "args": [{"value": 0}, {"training": 10, "evaluation": 20}]},
              {"operator": "aten::neg", "args": [{"value": 1}], "result": 2, "mode": false}],
    "outputs": [{"value": 1}, {"value": 2}]})";
  auto outputs = run(both, {number(1)}, {.training = true});
  EXPECT_EQ(outputs[0].item<double>(), 10);
  EXPECT_FALSE(outputs[1].defined());
  outputs = run(both, {number(1)});
  EXPECT_EQ(outputs[0].item<double>(), 20);
  EXPECT_EQ(outputs[1].item<double>(), -20);
}

TEST(Graph, ComputesSizes) {
  const auto computed = [](const std::string& number) {
    const auto description = R"({"values": 2, "inputs": [0],
      "calls": [{"operator": "aten::full", "result": 1,
                 "args": [[], {"size": )" +
                             number + R"(}], "kwargs": {"dtype": {"dtype": "float64"}}}],
      "outputs": [{"value": 1}]})";
    return run(description, {torch::zeros({7, 3})}).front().item<double>();
  };
  EXPECT_EQ(computed(R"({"size": [0, 0]})"), 7);
  EXPECT_EQ(computed(R"(["+", {"size": [0, 0]}, 1, 2])"), 10);
  EXPECT_EQ(computed(R"(["//", ["*", {"size": [0, 0]}, -1], 2])"), -4);
  EXPECT_EQ(computed(R"(["%", ["*", {"size": [0, 0]}, -1], 4])"), 1);
  EXPECT_EQ(computed(R"(["%", -9223372036854775807, 3])"), 2);
  EXPECT_EQ(computed(R"(["/", {"size": [0, 0]}, 2])"), 3.5);
  EXPECT_EQ(computed(R"(["max", 3, ["min", {"size": [0, 0]}, 5]])"), 5);
  EXPECT_EQ(computed(R"(["**", {"size": [0, 0]}, 0.5])"), std::pow(7, 0.5));
  EXPECT_EQ(computed(R"(["or", ["<", {"size": [0, 0]}, 7], ["==", {"size": [0, 0]}, 7]])"), 1);
  EXPECT_EQ(computed(R"(["and", ["<=", {"size": [0, 0]}, 7], ["!=", {"size": [0, 0]}, 7]])"), 0);
}

TEST(Graph, TakesNamesForEnumerators) {
  const auto outputs = run(R"({"values": 2, "inputs": [0],
    "calls": [{"operator": "aten::clone", "args": [{"value": 0}], "result": 1,
               "kwargs": {"memory_format": {"memory format": "channels_last"}}}], "outputs": [{"value": 1}]})",
                           {torch::zeros({2, 3, 4, 4})});
  EXPECT_TRUE(outputs.front().is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(Graph, ChecksShapesAndGuards) {
  const Graph graph(R"({"values": 1, "inputs": [0, null], "shapes": [[null, 3], null],
    "guards": [[["<", 2, {"size": [0, 0]}], "samples > 2"]], "outputs": [{"value": 0}]})");
  EXPECT_EQ(graph.run({torch::zeros({3, 3}), {}}, {}).front().size(0), 3);
  const auto expect_refused = [&](at::Tensor first, at::Tensor second, const std::string& message) {
    EXPECT_THAT([&] { graph.run({first, second}, {}); }, refused(message));
  };
  expect_refused(torch::zeros({3, 4}), {}, "input 0 has the shape (3, 4), but the model was converted for (batch, 3)");
  expect_refused({}, {}, "input 0 has the shape of None");
  const Graph pair(R"({"values": 2, "inputs": [0, 1], "shapes": [[null], [null]]})");
  EXPECT_THAT(
      [&] {
        pair.run({number(1), torch::ones({2})}, {});
      },
      refused("input 1 has 2 samples, but another has 1"));
  expect_refused(torch::zeros({3, 3}), number(1), "input 1 was a constant");
  expect_refused(torch::zeros({2, 3}), {}, "inputs with samples > 2, but a micro-batch has the shape (2, 3)");
}

TEST(Graph, EntersContexts) {
  const auto context = [](const std::string& of_first, const std::string& of_second) {
    return R"({"values": 3, "inputs": [0],
      "calls": [{"operator": "aten::mm", "args": [{"value": 0}, {"value": 0}], "result": 1, "within": )" +
           of_first + R"(}, {"operator": "aten::mm", "args": [{"value": 0}, {"value": 0}], "result": 2, "within": )" +
           of_second + R"(}], "outputs": [{"value": 1}, {"value": 2}]})";
  };
  const auto x = torch::ones({2, 2}).requires_grad_();
  auto outputs = run(context(R"([{"grad": false}])", "[]"), {x});
  EXPECT_FALSE(outputs[0].requires_grad());
  EXPECT_TRUE(outputs[1].requires_grad());
  const std::string autocast = R"([{"autocast": "bfloat16", "enabled": true, "cache": true}])";
  outputs = run(context("[]", autocast), {x});
  EXPECT_EQ(outputs[0].scalar_type(), at::kFloat);
  EXPECT_EQ(outputs[1].scalar_type(), at::kBFloat16);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Graph, FreesValuesAfterTheirLastUse) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> weak;
  const Graph graph(R"({"values": 4, "inputs": [0, 1],
    "calls": [{"operator": "aten::neg", "args": [{"value": 0}], "result": 2},
              {"python": "look", "args": [{"value": 2}], "result": 3}], "outputs": [{"value": 3}]})",
                    [&](const std::string&, std::vector<c10::IValue> arguments) {
                      for (const auto& input : weak) EXPECT_TRUE(input.expired());
                      const auto tensor = std::exchange(arguments, {}).front().toTensor();
                      return c10::IValue(torch::tensor(static_cast<std::int64_t>(tensor.use_count())));
                    });
  std::vector<at::Tensor> inputs;
  for (const double value : {1, 2}) weak.emplace_back(inputs.emplace_back(number(value)).getIntrusivePtr());
  EXPECT_EQ(graph.run(std::move(inputs), {}).front().item<std::int64_t>(), 2);  // the frame's and its own
}

TEST(Graph, TellsTheLineOfAnError) {
  const std::string description = R"({"values": 2, "inputs": [0], "outputs": [{"value": 1}],
    "calls": [{"operator": "aten::mm", "args": [{"value": 0}, {"value": 0}], "result": 1, "at": "model.py:12"}]})";
  const auto x = torch::zeros({2, 3});
  EXPECT_THAT([&] { run(description, {x}); }, throws<c10::Error>("in aten::mm, called at model.py:12"));
}

TEST(Graph, RefusesWhatIsNotADescription) {
  const auto call = [](const std::string& text) {
    return R"({"values": 2, "inputs": [0], "outputs": [{"value": 1}], "calls": [)" + text + "]}";
  };
  const auto add = [&](const std::string& args) {
    return call(R"({"operator": "aten::add.Tensor", "result": 1, "args": )" + args + "}");
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "the model's description is not valid"},
      {"[]", "the model's description is not valid"},
      {R"({"values": -1})", "values"},
      {R"({"values": 1, "inputs": [1]})", "the model sets value 1, but has 1"},
      {R"({"values": 1, "outputs": [{"value": 3}]})", "the model uses value 3, but has 1"},
      {R"({"values": 1, "guards": [[{"size": [1, 0]}, ""]]})", "the model uses value 1, but has 1"},
      {call(R"({"operator": "aten::no_such_operator", "result": 1})"), "aten::no_such_operator, which this version"},
      {call(R"({"python": "os:system", "args": [], "result": 1})"), "os:system, which only Python can run"},
      {add(R"([{"value": 0}])"), "without its argument 'other'"},
      {add(R"([{"value": 0}, {"value": 0}, 1, 2, 3])"), "does not know"},
      {add(R"([{"value": 0}, "text"])"), R"("text", where its operator takes Tensor)"},
      {add(R"([{"value": 0}, [1]])"), "[1], where its operator takes Tensor"},
      {add(R"([{"value": 0}, {"dtype": "float3"}])"), R"("float3", which this version of torch)"},
      {add(R"([{"value": 0}, {"value": 0}, {"dtype": "float32"}])"), "where its operator takes Scalar"},
      {call(R"({"operator": "aten::to.dtype", "args": [{"value": 0}, 99]})"), "where an operator takes ScalarType"},
      {add(R"([{"value": 0}, {"size": ["?", 1]}])"), "which this version lacks"},
  };
  for (const auto& each : cases) {
    EXPECT_THAT([&] { Graph graph(each.first); }, refused(each.second)) << each.first;
  }
}

}  // namespace
}  // namespace gpipe
