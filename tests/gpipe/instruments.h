// Layers that watch or disturb the pipeline that runs them.
#pragma once

#include "tests/gpipe/helpers.h"

namespace gpipe {

/// Returns a copy of the input. Calls `act` when the backward reaches it.
inline Tensor on_backward(const Tensor& x, std::function<void()> act) {
  auto y = x.clone();
  if (y.requires_grad()) y.register_hook([act = std::move(act)](const Tensor&) { act(); });
  return y;
}

/// Tells Faulty layers in which pass to call `fault`.
struct FaultPlan {
  enum Where { kNowhere, kForward, kRecompute, kBackward };
  void arm(Where at, std::function<void()> f) {
    where = at;
    fault = std::move(f);
  }
  void disarm() { where = kNowhere; }
  Where where = kNowhere;
  std::function<void()> fault;
};

/// Passes its input on, or fails as its plan says.
struct FaultyImpl : torch::nn::Module {
  explicit FaultyImpl(std::shared_ptr<FaultPlan> plan) : plan(std::move(plan)) {}
  Tensor forward(Tensor x) {
    if (plan->where == (is_recomputing() ? FaultPlan::kRecompute : FaultPlan::kForward)) plan->fault();
    return on_backward(x, [plan = plan] {
      if (plan->where == FaultPlan::kBackward) plan->fault();
    });
  }
  const std::shared_ptr<FaultPlan> plan;
};
TORCH_MODULE(Faulty);

/// The number of graphs alive: now, and the most at once.
struct Live {
  std::atomic<int> now = 0;
  std::atomic<int> peak = 0;
};

/// Counts the live graphs that contain it: one per forward that builds a graph, until that graph is freed.
struct PeakImpl : torch::nn::Module {
  Tensor forward(Tensor x) {
    struct Token : torch::autograd::FunctionPreHook {
      explicit Token(std::shared_ptr<Live> live) : live(std::move(live)) {
        const int now = ++this->live->now;
        this->live->peak = std::max(this->live->peak.load(), now);
      }
      ~Token() override { --live->now; }
      torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
        return gradients;
      }
      std::shared_ptr<Live> live;
    };
    auto y = x.sigmoid();
    if (y.requires_grad()) y.grad_fn()->add_pre_hook(std::make_unique<Token>(live));
    return y;
  }
  std::shared_ptr<Live> live = std::make_shared<Live>();
};
TORCH_MODULE(Peak);

}  // namespace gpipe
