#include "gpipe/autograd/split_check.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "gpipe/autograd/boundary.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

// A graph with a weight used twice, an operator with several outputs, an in-place operation, a convolution and a bias.
class Trial {
 public:
  Trial() {
    const at::AutoGradMode grad_mode(true);
    const auto x = leaf({16, 128});
    const auto w = leaf({128, 128});
    const auto kernel = leaf({64, 2, 9});
    const auto product = leaf({64 * 56, 16});
    const auto bias = leaf({16});
    const auto halves = at::matmul(at::matmul(x, w), w).tanh().chunk(2, 1);
    auto h = at::conv1d(at::stack({halves[0], halves[1] * halves[0]}, 1), kernel);
    h.relu_();
    root_ = leave(at::addmm(bias, h.flatten(1), product));
  }
  ~Trial() {
    for (auto* sink : sinks_) sink->sums = nullptr;
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  Gradients whole() {
    run({root_}, {gradient()});
    return sums_.take();
  }

  // Empty if nothing was deferred.
  Gradients split(Split split) {
    auto parts = split({root_}, {sinks_.front()});
    run({root_}, {gradient()});
    if (!parts.end_inputs()) return {};
    auto of_inputs = sums_.take();
    sums_ = GradientSums(sinks_.size());
    for (std::size_t i = 1; i < of_inputs.size(); ++i) {
      if (of_inputs[i].defined()) return {};
    }
    auto [roots, gradients] = parts.take_weights();
    run(roots, gradients);
    auto all = sums_.take();
    if (all.front().defined()) return {};
    all.front() = of_inputs.front();
    return all;
  }

 private:
  static at::Tensor numbers(at::IntArrayRef sizes) {
    return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().mul(0.1).view(sizes);
  }
  static at::Tensor gradient() { return numbers({16, 16}); }

  at::Tensor leaf(at::IntArrayRef sizes) {
    auto tensor = enter(numbers(sizes));
    auto* sink = static_cast<GradientSink*>(tensor.grad_fn().get());
    sink->indices = {sinks_.size()};
    sink->sums = &sums_;
    sinks_.push_back(sink);
    tensors_.push_back(tensor);
    return tensor;
  }

  static void run(const edge_list& roots, const variable_list& gradients) {
    Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                         /*accumulate_grad=*/true);
  }

  std::vector<at::Tensor> tensors_;  // keep the sinks
  std::vector<GradientSink*> sinks_;
  GradientSums sums_{5};
  torch::autograd::Edge root_;
};

bool equal(const Gradients& got, const Gradients& expected) {
  return std::equal(
      got.begin(), got.end(), expected.begin(), expected.end(),
      [](const at::Tensor& one, const at::Tensor& other) { return one.defined() && at::equal(one, other); });
}

}  // namespace

bool splits_exactly(Split split) {
  bool exact = false;
  std::exception_ptr out_of_memory;
  // A thread of its own has none of the caller's modes and hooks, and takes the rest of a failed backward with it.
  std::thread([&] {
    try {
      const auto expected = Trial().whole();
      exact = equal(Trial().split(split), expected);
    } catch (const std::bad_alloc&) {
      out_of_memory = std::current_exception();
    } catch (const c10::OutOfMemoryError&) {
      out_of_memory = std::current_exception();
    } catch (const std::exception&) {  // this version of PyTorch refuses
    }
  }).join();
  if (out_of_memory) std::rethrow_exception(out_of_memory);
  return exact;
}

bool can_split_backward() {
  static const bool can = [] {
    const bool exact =
        splits_exactly([](const auto& roots, const auto& inputs) { return SplitBackward(roots, inputs); });
    if (!exact) {
      TORCH_WARN(
          "[gpipe] this version of PyTorch does not allow splitting a backward, so I computes all gradients and W "
          "none; results stay exact, but zero-bubble schedules have the idle time of 1f1b");
    }
    return exact;
  }();
  return can;
}

}  // namespace gpipe
