#pragma once

#include "gpipe/graph/graph.h"
#include "gpipe/value.h"

namespace gpipe {

/// A layer of a model file: a graph with its tensors, which are at their paths in the original model.
class GraphLayer : public torch::nn::Module, public Skippable {
 public:
  struct NamedTensor {
    std::string name;
    at::Tensor tensor;
    bool is_parameter = false;
  };

  /// `source` is for source(). Errors: as Graph; std::invalid_argument for a missing tensor or a name that is taken.
  GraphLayer(const std::string& graph, std::vector<NamedTensor> tensors, std::string source);

  /// Takes and returns a tensor or a vector of them. The first layer takes the model's inputs without constants.
  Value forward(Value input);

  const std::vector<NamedTensor>& tensors() const { return tensors_; }

  /// The layer's description in the file.
  const std::string& source() const { return source_; }

 private:
  /// Returns the module at a path; makes those that are missing. Errors: std::invalid_argument for too long a path.
  torch::nn::Module& module_at(const std::string& path);
  GraphLayer(std::unique_ptr<const Graph> graph, std::vector<NamedTensor> tensors, std::string source);

  const std::unique_ptr<const Graph> graph_;
  const std::vector<NamedTensor> tensors_;
  const std::string source_;
  std::vector<at::Tensor> used_;  // in the order of the graph
};

}  // namespace gpipe
