#include <torch/torch.h>

#include "gpipe/graph/graph_layer.h"
#include "gpipe/model.h"
#include "gpipe/snapshot/safetensors.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

/// A model of one layer, or with a second one whose weight is tied to the first one's.
torch::nn::Sequential model(const TemporaryDirectory& folder, bool is_tied = false) {
  Safetensors file;
  file.tensors = {{"in.w", torch::ones({2, 2})},
                  {"in.frozen", torch::full({2}, 3.0)},
                  {"in.phase", torch::complex(torch::zeros({2}), torch::ones({2}))},
                  {".in.step", torch::arange(2)}};
  file.model = R"({"version": 1, "layers": [{"name": "a",
    "tensors": [["in.w", "parameter", null], ["in.frozen", "frozen", null], ["in.phase", "buffer", null],
                [".in.step", "buffer", null], ["out.w", "parameter", "in.w"]],
    "graph": {"values": 6, "inputs": [0],
      "tensors": [["in.w", 1], ["out.w", 2], ["in.frozen", 3], ["in.step", 4]],
      "calls": [{"operator": "aten::add_.Tensor", "args": [{"value": 4}, 1]},
                {"operator": "aten::addmm", "args": [{"value": 3}, {"value": 0}, {"value": 1}], "result": 5}],
      "outputs": [{"value": 5}]}})";
  if (is_tied) {
    file.model += R"(, {"name": "b", "tensors": [["last.w", "parameter", "in.w"]],
      "graph": {"values": 1, "inputs": [0], "outputs": [{"value": 0}]}})";
  }
  file.model += "]}";
  write_safetensors(folder / "model", file);
  return load_model(folder / "model");
}

void expect_equal(const GraphLayer& layer, const GraphLayer& expected) {
  ASSERT_EQ(layer.tensors().size(), expected.tensors().size());
  for (std::size_t i = 0; i < layer.tensors().size(); ++i) {
    const auto& [name, tensor, is_parameter] = layer.tensors()[i];
    const auto& other = expected.tensors()[i];
    EXPECT_EQ(name, other.name);
    EXPECT_EQ(is_parameter, other.is_parameter) << name;
    EXPECT_EQ(tensor.requires_grad(), other.tensor.requires_grad()) << name;
    EXPECT_TRUE(tensor.dtype() == other.tensor.dtype() && torch::equal(tensor, other.tensor)) << name;
  }
  EXPECT_FALSE(layer.tensors()[1].tensor.requires_grad()) << "the frozen parameter is not";
  EXPECT_TRUE(layer.tensors()[0].tensor.is_same(layer.tensors()[4].tensor)) << "the tie is lost";
}

TEST(ModelFile, KeepsEachTensor) {
  const TemporaryDirectory folder;
  auto first = model(folder);
  first->forward<Value>(Value(torch::ones({1, 2})));  // changes the buffer
  save_model(folder / "saved", *first);
  const auto second = load_model(folder / "saved");
  expect_equal(*second->ptr<GraphLayer>(0), *first->ptr<GraphLayer>(0));
  EXPECT_EQ(second->ptr<GraphLayer>(0)->tensors()[3].tensor[0].item<int>(), 1);
}

TEST(ModelFile, CallsOnlyOperatorsOfNamespacesThatTheProgramTrusts) {
  const TemporaryDirectory folder;
  const auto write = [&](const std::string& name) {
    Safetensors file;
    file.model = R"({"version": 1, "layers": [{"name": "a", "tensors": [], "graph": {"values": 2,
      "inputs": [0], "calls": [{"operator": ")" +
                 name + R"(", "args": [{"value": 0}], "result": 1}],
      "outputs": [{"value": 1}]}}]})";
    write_safetensors(folder / "model", file);
  };
  const auto load = [&] { load_model(folder / "model"); };
  write("my_library::read");
  EXPECT_THAT(load, throws<std::runtime_error>("it calls my_library::read; if you trust it, give load_model() the "
                                               "namespace 'my_library'"));
  EXPECT_THAT([&] { load_model(folder / "model", {"my_library"}); },
              throws<std::runtime_error>("this version of torch does not have"));
  write("aten::from_file");
  EXPECT_THAT(load, throws<std::runtime_error>("aten::from_file, which reads other files"));
  write("aten::from_file.out");
  EXPECT_THAT(load, throws<std::runtime_error>("which reads other files"));
  write("aten::neg");
  load();
}

}  // namespace
}  // namespace gpipe
