#include "balance/trial.h"

#include <ATen/Functions.h>
#include <torch/csrc/api/include/torch/autograd.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "gpipe/run/micro_batch.h"

namespace gpipe {

void trial_step(GPipe& pipe, const Value& batch) {
  const auto output = pipe->forward(batch);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> ones;
  for (const auto& tensor : output.tensors()) {
    if (!tensor.requires_grad()) continue;
    roots.push_back(tensor);
    ones.push_back(at::ones_like(tensor));
  }
  if (roots.empty()) return;
  // Cut the edges behind the pipeline's node, so that nothing is accumulated and no hook runs.
  const auto node = roots.front().grad_fn();
  node->set_next_edges(torch::autograd::edge_list(node->num_outputs()));
  torch::autograd::backward(roots, ones);
}

void trial_schedule(GPipe& pipe, const Value& batch) {
  const auto sum = [](const Value& output, const Value&) {
    at::Tensor sum;
    for (const auto& tensor : output.tensors()) {
      if (!tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) continue;
      const auto part = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum.defined() ? sum : at::zeros({});
  };
  pipe->loss(batch, at::zeros({batch_size(batch)}), sum, StepOptions().reduction(Reduction::kSum));
}

Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes) {
  auto first = scatter(batch, sizes).front();
  for (std::size_t i = 0; i < first.tensors.size(); ++i) first.tensors[i].set_requires_grad(first.wants_gradient[i]);
  return Value(first.form, std::move(first.tensors));
}

Value copy_of(const Value& value) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) tensor = tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  return Value(value.form(), std::move(tensors));
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace gpipe
