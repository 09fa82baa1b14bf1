// Shared by the tests of whole pipelines.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

using torch::Tensor;
using torch::nn::Functional;
using torch::nn::Linear;
using torch::nn::Sequential;
using Balance = std::vector<std::int64_t>;

inline constexpr Checkpoint kModes[] = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};

/// Matches a callable that throws an `Error` whose message contains the text.
template <class Error>
auto throws(const std::string& text) {
  return ::testing::ThrowsMessage<Error>(::testing::HasSubstr(text));
}

/// Whether two tensors are bit-equal, or both undefined.
inline bool same(const Tensor& a, const Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || torch::equal(a, b));
}

inline bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& one, const Tensor& other) { return same(one, other); });
}

inline std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

/// The model's parameters, each once: C++ modules list a tied one at each of its places.
inline std::vector<Tensor> distinct_parameters(const torch::nn::Module& model) {
  std::vector<Tensor> parameters;
  for (const auto& parameter : model.parameters()) {
    const auto is_it = [&](const Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(parameters.begin(), parameters.end(), is_it)) parameters.push_back(parameter);
  }
  return parameters;
}

/// The state of the default CPU generator.
inline Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

/// The number of threads of this process.
inline std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

inline std::int64_t parameter_count(const Sequential& model) {
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

inline std::vector<std::string> layer_names(const Sequential& model) {
  std::vector<std::string> names;
  for (const auto& child : model->named_children()) names.push_back(child.key());
  return names;
}

}  // namespace gpipe
