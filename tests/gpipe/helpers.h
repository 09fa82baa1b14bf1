// Shared by the tests of whole pipelines. torch/torch.h includes most headers of C++.
#pragma once

#include <torch/torch.h>

#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "gpipe/gpipe.h"
#include "gpipe/timeline.h"
#include "tests/support/matchers.h"

namespace gpipe {

using torch::Tensor;
using torch::nn::Functional;
using torch::nn::Linear;
using torch::nn::Sequential;
using Balance = std::vector<std::int64_t>;

inline constexpr Checkpoint kModes[] = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};

inline GPipeOptions in_chunks(std::int64_t chunks, const Checkpoints& checkpoint = Checkpoint::kExceptLast) {
  return GPipeOptions().chunks(chunks).checkpoint(checkpoint);
}

inline const LossFunction kMse =
    tensor_loss([](const Tensor& out, const Tensor& target) { return torch::mse_loss(out, target); });
inline const LossFunction kSumLoss = tensor_loss([](const Tensor& out, const Tensor&) { return out.sum(); });
inline const StepOptions kOfSums = StepOptions().reduction(Reduction::kSum);

/// Whether two tensors are bit-equal, or both undefined.
inline bool same(const Tensor& a, const Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || torch::equal(a, b));
}

inline bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::ranges::equal(a, b, [](const Tensor& one, const Tensor& other) { return same(one, other); });
}

inline std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

inline Tensor gradient_of(const Tensor& loss, const Tensor& input, bool retain_graph = false) {
  return torch::autograd::grad({loss}, {input}, {}, retain_graph)[0];
}

/// The gradients of the parameters, which lose them.
inline std::vector<Tensor> take_gradients(const torch::nn::Module& module) {
  std::vector<Tensor> gradients;
  for (auto& parameter : module.parameters()) gradients.push_back(std::exchange(parameter.mutable_grad(), Tensor()));
  return gradients;
}

inline bool is_one_of(const Tensor& tensor, const std::vector<Tensor>& others) {
  return std::ranges::any_of(others, [&](const Tensor& other) { return other.is_same(tensor); });
}

/// The model's parameters, each once: C++ modules list a tied one at each of its places.
inline std::vector<Tensor> distinct_parameters(const torch::nn::Module& model) {
  std::vector<Tensor> parameters;
  for (const auto& parameter : model.parameters()) {
    if (!is_one_of(parameter, parameters)) parameters.push_back(parameter);
  }
  return parameters;
}

/// The message of an exception, without a backtrace.
inline std::string text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

inline void expect_close(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double relative = 1e-5,
                         double absolute = 1e-8) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (a[i].defined()) EXPECT_TRUE(torch::allclose(a[i], b[i], relative, absolute)) << i;
  }
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

inline std::vector<std::string> layer_names(const Sequential& model) { return model->named_children().keys(); }

}  // namespace gpipe
