#include "gpipe/graph/graph_layer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_split.h"
#include "gpipe/base/json.h"

namespace gpipe {
namespace {

std::pair<std::string, std::string> split_last(const std::string& name) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

}  // namespace

GraphLayer::GraphLayer(const std::string& graph, std::vector<NamedTensor> tensors, std::string source)
    : GraphLayer(std::make_unique<const Graph>(graph), std::move(tensors), std::move(source)) {}

GraphLayer::GraphLayer(std::unique_ptr<const Graph> graph, std::vector<NamedTensor> tensors, std::string source)
    : Skippable({graph->stashes(), graph->pops(), graph->peeks()}),
      graph_(std::move(graph)),
      tensors_(std::move(tensors)),
      source_(std::move(source)) {
  for (const auto& [name, tensor, is_parameter] : tensors_) {
    const auto [path, own] = split_last(name);
    is_parameter ? module_at(path).register_parameter(own, tensor, tensor.requires_grad())
                 : module_at(path).register_buffer(own, tensor);
  }
  for (const auto& name : graph_->tensors()) {
    const auto found = std::ranges::find(tensors_, name, &NamedTensor::name);
    if (found == tensors_.end()) refuse_argument("the model lacks the tensor '", name, "'");
    used_.push_back(found->tensor);
  }
}

torch::nn::Module& GraphLayer::module_at(const std::string& path) {
  constexpr auto kMostLevels = 100;  // because modules recurse
  if (std::count(path.begin(), path.end(), '.') >= kMostLevels) {
    refuse_argument("a module's path has more than ", kMostLevels, " levels");
  }
  torch::nn::Module* module = this;
  for (const auto& name : absl::StrSplit(path, '.', absl::SkipEmpty())) {
    const auto children = module->named_children();
    const auto* child = children.find(std::string(name));
    module = child != nullptr ? child->get()
                              : module->register_module(std::string(name), std::make_shared<torch::nn::Module>()).get();
  }
  return *module;
}

Value GraphLayer::forward(Value input) {
  Graph::State state{
      .tensors = used_, .training = is_training(), .pops = pops(), .peeks = peeks(), .stashes = stashes()};
  auto outputs = graph_->run(graph_->with_constants(std::move(input).tensors()), state);
  std::erase_if(outputs, [](const at::Tensor& output) { return !output.defined(); });
  return outputs.size() == 1 ? Value(std::move(outputs.front())) : Value(std::move(outputs));
}

}  // namespace gpipe
